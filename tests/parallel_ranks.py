"""Ranks of one group as threads of the test's process: real gloo and real sockets, without the seconds of a process's start."""

from __future__ import annotations

import datetime
import itertools
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import device
from waiting import PATIENCE

Result = TypeVar("Result")


def gloo(store: dist.Store, rank: int, num_ranks: int, seconds: float = PATIENCE) -> dist.ProcessGroup:
    """A group that is no process's default one."""
    group = dist.ProcessGroup(store, rank, num_ranks)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = datetime.timedelta(seconds=seconds)
    backend = dist.ProcessGroupGloo(store, rank, num_ranks, options)
    group._register_backend(device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def mesh(num_ranks: int) -> list[dict[int, socket.socket]]:
    """Each rank's sockets to the others."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for low, high in itertools.combinations(range(num_ranks), 2):
        ends[low][high], ends[high][low] = socket.socketpair()
    return ends


def together(num_ranks: int, work: Callable[[int], Result], timeout: float = PATIENCE) -> list[Result]:
    """`work(rank)` of all ranks at once: their results, or the first one's exception."""
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    for rank in sorted(errors):
        raise errors[rank]
    assert len(results) == num_ranks, f"ranks {sorted(set(range(num_ranks)) - set(results))} hang"
    return [results[rank] for rank in range(num_ranks)]
