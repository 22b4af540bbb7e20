"""Runs a benchmark once a rank, side by side on this machine; the first rank prints. Knows processes and seats, no benchmark."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from minserve import seat as seats
from minserve.runtime import parallel
from minserve.runtime.parallel import Group
from minserve.seat import SEAT_VARIABLE, Seat

_WATCHDOG_SECONDS = 300.0


def spawn(program: Sequence[str], num_ranks: int) -> int:
    """Run `python PROGRAM` as each rank; the first exit code that is not 0. When one fails, all end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        seat = Seat(num_ranks=num_ranks, ranks_per_host=num_ranks, port=listener.getsockname()[1])
        processes = []
        for rank in range(num_ranks):
            own = Seat(
                rank=rank,
                num_ranks=num_ranks,
                ranks_per_host=num_ranks,
                port=seat.port,
                listener=listener.fileno() if rank == 0 else None,
            )
            processes.append(
                subprocess.Popen(
                    [sys.executable, *program],
                    env=os.environ | {SEAT_VARIABLE: seats.encode(own), "GLOO_SOCKET_IFNAME": "lo"},
                    pass_fds=[listener.fileno()] if rank == 0 else [],
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                )
            )
    try:
        while any(process.poll() is None for process in processes):
            if failed := [process.returncode for process in processes if process.returncode]:
                return failed[0]
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return next((process.returncode for process in processes if process.returncode), 0)


def own_seat() -> Seat:
    """Of a process that `spawn` started; of any other one, a seat alone."""
    return seats.decode(os.environ.get(SEAT_VARIABLE, "{}"))


def join(*, on_gpus: bool) -> Group:
    """Meet the other ranks."""
    return parallel.join(own_seat(), parallel.GPUS if on_gpus and torch.cuda.is_available() else "gloo", _WATCHDOG_SECONDS)
