"""How the ranks of a group find each other: torch.distributed for collectives, a socket to every rank for agreements.

Knows addresses, backends and seats; nothing of steps or models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hmac
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from minserve.errors import EnvironmentFault, RankLost, UsageError
from minserve.runtime.step_agreement import StepAgreement
from minserve.seat import ALONE, SEAT_VARIABLE, Seat, encode, host_seats, own_address

START_TIMEOUT = datetime.timedelta(hours=6)
"""Ranks that load or compile may come this much later than the others; a dead one is noticed by its socket."""
_HELLO_SECONDS = 10.0
"""Whoever connects has so long to say who it is."""
_TOKEN_BYTES = 16
_RANK_BYTES = 4
GPUS = "cpu:gloo,cuda:nccl"
"""Each kind of tensor has its own way; NCCL's is made at its first use, so that ranks which share a GPU can do without."""

log = logging.getLogger("minserve.runtime")


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """One rank's ties to the others."""

    seat: Seat
    agreement: StepAgreement
    collectives: torch.distributed.ProcessGroup | None
    """None for an engine alone."""
    store: Store | None
    sharers: int = 1
    """Ranks of this host that have the same GPU, this one included."""

    def prove_equal(self, facts: Mapping[str, Any]) -> None:
        """Wait for all ranks. Raises UsageError naming the first fact that another rank has otherwise, RankLost."""
        told = [json.loads(theirs) for theirs in self.gather("facts", json.dumps(facts))]
        if self.store is not None:
            with self._store_lost():
                self.store.set(f"facts read/{self.seat.rank}", "")
                if self.seat.rank == 0:  # the others read from this process, which must not end before they have
                    self.store.wait([f"facts read/{rank}" for rank in range(len(told))])
        for name, value in facts.items():
            for rank, theirs in enumerate(told):
                if theirs.get(name) != value:
                    here, there = f"{value} on rank {self.seat.rank}", f"{theirs.get(name)} on rank {rank}"
                    raise UsageError(f"all ranks need the same {name}: it is {here} and {there}")

    def least(self, what: str, value: int) -> int:
        """The smallest of all ranks' values. Raises RankLost."""
        return min(map(int, self.gather(what, str(value))))

    def wait_for_all(self, what: str) -> None:
        """Returns once every rank has come here, however long that takes. Raises RankLost."""
        self.gather(what, "")

    def gather(self, what: str, value: str) -> list[str]:
        """Every rank's value, in order of rank; all ranks come here at once, to each `what` once. Raises RankLost."""
        if self.store is None:
            return [value]
        with self._store_lost():
            self.store.set(f"{what}/{self.seat.rank}", value)
            return [self.store.get(f"{what}/{rank}").decode() for rank in range(self.seat.num_ranks)]

    @contextlib.contextmanager
    def _store_lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLost(f"rank 0, where the ranks meet, has ended: {error}", 0) from error


def claim_gpu(seat: Seat) -> int:
    """Make the rank's GPU the current one: the ranks of a host take one each. How many ranks of this host have the same."""
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(seat.local_rank % gpus)
    if seat.ranks_per_host > gpus:
        log.warning(
            "%d ranks share %d GPU%s: right for tests and slow; they need NVIDIA's MPS daemon to run side by side",
            seat.ranks_per_host,
            gpus,
            "" if gpus == 1 else "s",
        )
    return len(range(seat.local_rank % gpus, seat.ranks_per_host, gpus))


def alone() -> Group:
    """An engine that has all experts."""
    return Group(ALONE, StepAgreement(0, {}), None, None)


def join(seat: Seat, watchdog_seconds: float, *, on_gpus: bool) -> Group:
    """Meet the other ranks; returns once all are there. Raises EnvironmentFault. `on_gpus`: ranks have one each, if any."""
    if seat.num_ranks == 1:
        return alone()
    backend = GPUS if on_gpus and torch.cuda.is_available() else "gloo"
    sharers = claim_gpu(seat) if backend == GPUS else 1
    # All collectives follow each other on one stream, captured or not. NCCL need not order them itself, for which each one would
    # become a branch of the graph and run on a stream of its own.
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    try:
        # The socket was bound by launch, so that no port can be lost between its choice and its use.
        store = TCPStore(
            seat.address,
            seat.port,
            seat.num_ranks,
            is_master=seat.rank == 0,
            timeout=START_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=seat.listener,
        )
        peers = _connect(seat, store)
        agreement = StepAgreement(seat.rank, peers, ranks_per_host=seat.ranks_per_host, watchdog_seconds=watchdog_seconds)
        torch.distributed.init_process_group(
            backend,
            store=PrefixStore("collectives", store),
            rank=seat.rank,
            world_size=seat.num_ranks,
            timeout=datetime.timedelta(seconds=agreement.patience),
        )
    except (RuntimeError, OSError) as error:
        where = f"{seat.address} port {seat.port}"
        raise EnvironmentFault(f"rank {seat.rank} could not meet the {seat.num_ranks} ranks at {where}: {error}") from error
    return Group(seat, agreement, torch.distributed.group.WORLD, store, sharers)


def _connect(seat: Seat, store: Store) -> dict[int, socket.socket]:
    """A stream socket to every other rank: each connects to the lower ones and is connected to by the higher ones."""
    if seat.rank == 0:
        store.set("token", secrets.token_hex(_TOKEN_BYTES))
    token = store.get("token")
    peers: dict[int, socket.socket] = {}
    with _listening(seat) as (listener, address):
        store.set(f"address/{seat.rank}", json.dumps(address))
        for rank in range(seat.rank):
            peers[rank] = _dial(json.loads(store.get(f"address/{rank}")))
            peers[rank].sendall(seat.rank.to_bytes(_RANK_BYTES, "little") + token)
        while len(peers) < seat.num_ranks - 1:
            connection, _ = listener.accept()
            connection.settimeout(_HELLO_SECONDS)
            said = _receive(connection, _RANK_BYTES + len(token))
            if hmac.compare_digest(said[_RANK_BYTES:], token):
                peers[int.from_bytes(said[:_RANK_BYTES], "little")] = connection
            else:  # whoever it is, it is none of us
                connection.close()
    return peers


@contextlib.contextmanager
def _listening(seat: Seat) -> Iterator[tuple[socket.socket, str | tuple[str, int]]]:
    """A socket for the higher ranks and where they find it: a Unix one where all are on one host, it is the faster."""
    if seat.one_host:
        with tempfile.TemporaryDirectory(prefix="minserve-") as folder, socket.socket(socket.AF_UNIX) as listener:
            path = str(Path(folder) / "rank")
            listener.bind(path)
            listener.listen(seat.num_ranks)
            yield listener, path
    else:
        with socket.create_server((own_address(seat.address, seat.port), 0), backlog=seat.num_ranks) as listener:
            yield listener, listener.getsockname()[:2]


def _dial(address: str | list[Any]) -> socket.socket:
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
    else:
        connection = socket.create_connection((address[0], address[1]))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _receive(connection: socket.socket, size: int) -> bytes:
    """`size` bytes, or fewer at the connection's end or when they do not come in time."""
    data = b""
    with contextlib.suppress(TimeoutError):
        while len(data) < size and (more := connection.recv(size - len(data))):
            data += more
    return data


def spawn(program: Sequence[str], num_ranks: int) -> int:
    """Run a benchmark, `python PROGRAM`, as each rank on this machine; rank 0 alone prints. When one fails, all end.

    The first exit code that is not 0.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        processes = [
            subprocess.Popen(
                [sys.executable, *program],
                env=os.environ | {SEAT_VARIABLE: encode(seat), "GLOO_SOCKET_IFNAME": "lo"},
                pass_fds=[] if seat.listener is None else [seat.listener],
                stdout=None if seat.rank == 0 else subprocess.DEVNULL,
            )
            for seat in host_seats(range(num_ranks), num_ranks, "127.0.0.1", 0, listener)
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
