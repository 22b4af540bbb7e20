"""Ranks find each other: over Unix sockets on one host, over TCP between hosts; strangers and different models are refused."""

from __future__ import annotations

import json
import socket
import time

import pytest
import torch.distributed as dist
from parallel_ranks import mesh, together

from minserve.errors import ExitCode, RankLost, UsageError
from minserve.runtime import parallel
from minserve.runtime.parallel import Group
from minserve.runtime.step_agreement import StepAgreement
from minserve.seat import Seat


def seats(count: int, ranks_per_host: int, port: int = 1) -> list[Seat]:
    return [Seat(rank=rank, num_ranks=count, ranks_per_host=ranks_per_host, port=port) for rank in range(count)]


@pytest.mark.parametrize("ranks_per_host", [4, 2])
def test_every_rank_has_a_socket_to_every_other(ranks_per_host: int) -> None:
    store = dist.HashStore()
    family = socket.AF_UNIX if ranks_per_host == 4 else socket.AF_INET
    peers = together(4, lambda rank: parallel._connect(seats(4, ranks_per_host)[rank], store))
    for rank, sockets in enumerate(peers):
        assert sorted(sockets) == [other for other in range(4) if other != rank]
        for other, connection in sockets.items():
            assert connection.family == family
            connection.sendall(f"{rank}>{other}".encode())
    for rank, sockets in enumerate(peers):
        for other, connection in sockets.items():
            assert connection.recv(10) == f"{other}>{rank}".encode()
            connection.close()


def test_a_stranger_is_no_rank() -> None:
    """Somebody connects first, with a rank's number but without the group's secret."""
    store = dist.HashStore()

    def work(rank: int) -> dict[int, socket.socket]:
        if rank == 1:
            address, port = json.loads(store.get("address/0"))
            with socket.create_connection((address, port)) as stranger:
                stranger.sendall((1).to_bytes(4, "little") + b"0" * 32)
                assert stranger.recv(1) == b""
        return parallel._connect(seats(2, 1)[rank], store)

    first, second = together(2, work)
    second[0].sendall(b"it is me")
    assert first[1].recv(20) == b"it is me"


def groups(count: int) -> list[Group]:
    store = dist.HashStore()
    agreements = [StepAgreement(rank, peers) for rank, peers in enumerate(mesh(count))]
    return [Group(seat, agreement, None, store) for seat, agreement in zip(seats(count, count), agreements, strict=True)]


def test_different_models_are_refused_on_every_rank() -> None:
    ranks = groups(3)
    together(3, lambda rank: ranks[rank].prove_equal({"model": "m"}))
    ranks = groups(3)

    def work(rank: int) -> str:
        with pytest.raises(UsageError) as refused:
            ranks[rank].prove_equal({"model": "m", "type": "bf16" if rank == 1 else "fp32"})
        return str(refused.value)

    told = together(3, work)
    assert told[0] == "all ranks need the same type: it is fp32 on rank 0 and bf16 on rank 1"
    assert told[1] == "all ranks need the same type: it is bf16 on rank 1 and fp32 on rank 0"


def test_a_slow_start_is_waited_for() -> None:
    ranks = groups(2)

    def work(rank: int) -> tuple[float, float]:
        if rank == 1:
            time.sleep(0.3)
        came = time.monotonic()
        ranks[rank].wait_for_all("ready")
        return came, time.monotonic()

    (_, first_left), (last_came, _) = together(2, work)
    assert first_left > last_came


def test_the_end_of_the_meeting_point_names_rank_0() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError(f"connection reset while {key} was set to {value}")

    (agreement,) = [StepAgreement(0, {})]
    group = Group(seats(2, 1)[1], agreement, None, Gone())
    for call in (lambda: group.wait_for_all("ready"), lambda: group.prove_equal({"a": 1})):
        with pytest.raises(RankLost, match="rank 0, where the ranks meet, has ended") as lost:
            call()
        assert lost.value.exit_code == ExitCode.RANK_DIED
