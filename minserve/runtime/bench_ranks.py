"""Runs a benchmark once a rank, side by side on this machine; the first rank prints. Knows processes and seats, no benchmark."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from minserve import seat as seats
from minserve.seat import SEAT_VARIABLE


def spawn(program: Sequence[str], num_ranks: int) -> int:
    """Run `python PROGRAM` as each rank; the first exit code that is not 0. When one fails, all end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        processes = [
            subprocess.Popen(
                [sys.executable, *program],
                env=os.environ | {SEAT_VARIABLE: seats.encode(seat), "GLOO_SOCKET_IFNAME": "lo"},
                pass_fds=[] if seat.listener is None else [seat.listener],
                stdout=None if seat.rank == 0 else subprocess.DEVNULL,
            )
            for seat in seats.host_seats(range(num_ranks), num_ranks, "127.0.0.1", 0, listener)
        ]
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
