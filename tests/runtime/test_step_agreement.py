"""Ranks agree on every step, sleep and wake together, and name whoever is missing."""

from __future__ import annotations

import random
import select
import socket
import statistics
import time

import pytest
from parallel_ranks import mesh, together
from waiting import PATIENCE

from minserve.errors import ExitCode, RankLost
from minserve.runtime import step_agreement
from minserve.runtime.step_agreement import Agreed, Kind, Proposal, StepAgreement

IDLE = Proposal(Kind.IDLE, 0)


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads of this process here: it must not end because a test takes a second to close them all."""
    monkeypatch.setattr(step_agreement, "GRACE_SECONDS", PATIENCE)


def quiet() -> None:
    pass


def ranks(count: int, watchdog_seconds: float = 60.0, ranks_per_host: int | None = None) -> list[StepAgreement]:
    return [
        StepAgreement(rank, peers, ranks_per_host=ranks_per_host or count, watchdog_seconds=watchdog_seconds)
        for rank, peers in enumerate(mesh(count))
    ]


@pytest.fixture
def three():
    made = ranks(3)
    yield made
    for rank in made:
        rank.close()


def test_a_rank_alone_agrees_with_itself() -> None:
    alone = StepAgreement(0, {})
    assert alone.agree(Proposal(Kind.MIXED, 40, 2, True), quiet) == Agreed(Kind.MIXED, 40, 2, True)
    assert not alone.called and alone.descriptors == []


def test_all_ranks_agree_on_the_same_many_times(three) -> None:
    """Each round: random proposals, ranks that come at different times; everybody gets the largest of all."""
    generator = random.Random(1)
    rounds = [[Proposal(Kind(generator.randrange(4)), generator.randrange(100)) for _ in range(3)] for _ in range(300)]

    def work(rank: int) -> list[Agreed]:
        own = random.Random(rank)
        agreed = []
        for proposals in rounds:
            if own.random() < 0.02:
                time.sleep(own.random() / 100)
            agreed.append(three[rank].agree(proposals[rank], quiet))
        return agreed

    told = together(3, work)
    assert told[0] == told[1] == told[2]
    for agreed, proposals in zip(told[0], rounds, strict=True):
        kinds = {p.kind for p in proposals}
        decode, prefill = ({kind for kind in kinds if kind & part} for part in (Kind.DECODE, Kind.PREFILL))
        kind = Kind.DECODE * bool(decode) | Kind.PREFILL * bool(prefill)
        assert agreed == (kind, max(p.num_tokens for p in proposals), 0, False, Kind.DECODE in kinds)


def test_one_that_leaves_stops_all(three) -> None:
    told = together(3, lambda rank: three[rank].agree(Proposal(Kind.IDLE, 0, leaving=rank == 1), quiet))
    assert [agreed.stop for agreed in told] == [True] * 3


def test_calls_wait_for_the_ranks_of_the_same_host_only() -> None:
    four = ranks(4, ranks_per_host=2)
    told = together(4, lambda rank: four[rank].agree(Proposal(Kind.IDLE, 0, num_calls=[2, 3, 0, 1][rank]), quiet))
    assert [agreed.num_calls for agreed in told] == [2, 2, 0, 0]
    for rank in four:
        rank.close()


def wake_up() -> float:
    """Seconds from a byte to the thread that sleeps until it comes: less than this no call can take, here and now."""
    here, there = socket.socketpair()

    def work(rank: int) -> float:
        if rank == 1:
            there.recv(1)
        else:
            time.sleep(0.002)
        at = time.perf_counter()
        if rank == 0:
            here.send(b"x")
        return at

    with here, there:
        called, up = together(2, work)
    return up - called


def test_sleeping_ranks_are_called_by_the_first_that_has_work(three) -> None:
    """Waking takes well under a millisecond: a rank that sleeps on its descriptors is up as soon as another proposes."""
    latencies, least = [], []
    for _ in range(30):
        least.append(wake_up())
        assert not three[1].called
        woken = select.poll()
        for descriptor in three[1].descriptors:
            woken.register(descriptor, select.POLLIN)

        def work(rank: int, woken=woken) -> float:
            if rank == 1:
                woken.poll()
                at = time.perf_counter()
                assert three[1].called
            elif rank == 0:
                time.sleep(0.002)  # the others sleep by now
                at = time.perf_counter()
            three[rank].agree(Proposal(Kind.MIXED, 9) if rank == 0 else IDLE, quiet)
            return at if rank < 2 else 0.0

        called, up, _ = together(3, work)
        latencies.append(up - called)
    assert statistics.median(latencies) < max(0.001, 5 * statistics.median(least))


def test_a_late_rank_is_named_with_the_step_and_the_wait_is_heard() -> None:
    pair = ranks(2, watchdog_seconds=1.5)
    together(2, lambda rank: pair[rank].agree(IDLE, quiet))
    heard: list[float] = []
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1 did not come to step 2 \(rank 0's part: decode, 5 tokens\) within 1.2 s") as lost:
        pair[0].agree(Proposal(Kind.DECODE, 5), lambda: heard.append(time.monotonic()))
    assert time.monotonic() - began > 1.1
    assert 0 < len(heard) <= (time.monotonic() - began) / step_agreement.WAIT_SECONDS
    assert (lost.value.rank, lost.value.exit_code) == (1, ExitCode.RANK_DIED)
    for rank in pair:
        rank.close()


def test_a_dead_rank_is_named_at_once(three) -> None:
    three[2].close()

    def work(rank: int) -> str:
        with pytest.raises(RankLost) as lost:
            three[rank].agree(Proposal(Kind.MIXED, 7), quiet)
        return str(lost.value)

    told = together(2, work)  # and not by the watchdog, which would say so
    assert told == [f"rank 2 has ended before step 1 (rank {rank}'s part: mixed, 7 tokens)" for rank in (0, 1)]
    for rank in three:
        rank.close()


def test_a_failed_rank_accuses_itself_and_the_others_pass_it_on(three) -> None:
    three[2].accuse(2)
    with pytest.raises(RankLost, match="rank 2 failed in step 1"):
        three[0].agree(IDLE, quiet)
    three[0].accuse(2)
    lost = three[1].blame()
    assert lost is not None and lost.rank == 2


def test_after_a_failed_collective_whoever_says_nothing_is_to_blame() -> None:
    """Ranks 0 and 1 waited for rank 2 in vain; it is stuck outside of the collective and says nothing."""
    stuck = ranks(3, watchdog_seconds=10.0)
    told = together(2, lambda rank: stuck[rank].blame())
    assert [lost.rank for lost in told] == [2, 2]
    assert "rank 2 took no part in step 1" in str(told[0])
    for rank in stuck:
        rank.close()


def test_nobody_is_blamed_when_all_are_well(three) -> None:
    assert together(3, lambda rank: three[rank].blame()) == [None] * 3


def test_a_rank_out_of_step_is_told() -> None:
    pair = ranks(2)
    together(2, lambda rank: pair[rank].agree(IDLE, quiet))
    pair[1]._number = 7
    with pytest.raises(RankLost, match="rank 1 is at step 7 while this rank is at step 2"):
        together(2, lambda rank: pair[rank].agree(IDLE, quiet))
    for rank in pair:
        rank.close()
