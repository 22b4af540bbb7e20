"""Several engines behind one edge, and the small parts between: balance, mailbox, calls."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable

import pytest
from scripted_engine import ScriptedEngine
from waiting import PATIENCE

from minserve.errors import ExitCode
from minserve.messages import Ready, StepOutputs, StepStats, encode_frame
from minserve.request import Request, SamplingParams, TokenOutput
from minserve.server import engine_client, engine_pool
from minserve.server.api_errors import ApiError, unavailable
from minserve.server.balancer import Balancer
from minserve.server.engine_client import EngineClient
from minserve.server.engine_pool import EnginePool, Mailbox

SAMPLING = SamplingParams(max_tokens=3, seed=1)
READY = Ready(
    model_type="x",
    vocab_size=300,
    max_model_len=100,
    max_num_seqs=2,
    eos_token_ids=(),
    num_pages=8,
    page_size=64,
    startup_seconds={},
    info={},
)


def letters(_: Request) -> list[int]:
    return [97, 98, 99, 100]


class Pool:
    """`async with Pool(2) as (pool, engines)`."""

    def __init__(self, num_engines: int, max_queued: int = 8) -> None:
        pairs = [socket.socketpair() for _ in range(num_engines)]
        self.engines = [ScriptedEngine(theirs, letters, ready=READY) for _, theirs in pairs]
        self._ours = [ours for ours, _ in pairs]
        self._max_queued = max_queued

    async def __aenter__(self) -> tuple[EnginePool, list[ScriptedEngine]]:
        self.pool = EnginePool(range(len(self.engines)), self._max_queued)
        await self.pool.connect(self._ours)
        assert await self.pool.ready() == [READY] * len(self.engines)
        return self.pool, self.engines

    async def __aexit__(self, *_: object) -> None:
        self.pool.close()
        await asyncio.sleep(0.02)
        for engine in self.engines:
            engine.join()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


async def collect(box: Mailbox, count: int) -> dict[int, list[int]]:
    """Tokens by number, once `count` of them have ended."""
    tokens: dict[int, list[int]] = {}
    ended = 0
    async with asyncio.timeout(PATIENCE):
        while ended < count:
            for number, output in await box.take():
                tokens.setdefault(number, []).extend(output.token_ids)
                ended += output.finish_reason is not None
    return tokens


def test_prompts_spread_over_ranks_and_choices_stay_together() -> None:
    async def run() -> None:
        async with Pool(2) as (pool, engines):
            box = Mailbox(8)
            pool.submit([([1] * 5, [SAMPLING] * 2) for _ in range(4)], box)
            tokens = await collect(box, 8)
            assert tokens == {number: [97, 98, 99] for number in range(8)}
            assert [len(engine.added) for engine in engines] == [4, 4]
            for engine in engines:
                assert [request.id % 2 for request in engine.added] == [1, 0, 1, 0]
            assert pool.num_live == 0

    asyncio.run(run())


def test_aborts_and_finishes_go_to_the_rank_that_has_the_request() -> None:
    async def run() -> None:
        async with Pool(2) as (pool, engines):
            for engine in engines:
                engine.running.clear()
            ids = pool.submit([([1], [SAMPLING]), ([2], [SAMPLING]), ([3], [SAMPLING])], Mailbox(3))
            pool.finish(ids[1], 2)
            assert pool.abort([ids[0], ids[1], 999]) == 1
            assert pool.abort([ids[0]]) == 0
            assert pool.num_live == 1
            await until(lambda: bool(engines[0].aborted and engines[1].finished))
            assert engines[0].aborted == [ids[0]]
            assert [(finish.request_id, finish.num_tokens) for finish in engines[1].finished] == [(ids[1], 2)]
            assert engines[1].aborted == []

    asyncio.run(run())


def test_the_death_of_one_rank_fails_all_requests() -> None:
    async def run() -> None:
        async with Pool(2) as (pool, engines):
            for engine in engines:
                engine.running.clear()
            box = Mailbox(2)
            pool.submit([([1], [SAMPLING]), ([2], [SAMPLING])], box)
            engines[1].die()
            death = await asyncio.wait_for(pool.death, PATIENCE)
            assert (death.rank, death.exit_code, death.message) == (1, ExitCode.RANK_DIED, None)
            with pytest.raises(ApiError) as caught:
                await box.take()
            assert caught.value.status == 503
            with pytest.raises(ApiError):
                pool.submit([([1], [SAMPLING])], box)
            with pytest.raises(ApiError):
                await pool.call_all("server_info")

    asyncio.run(run())


def test_engines_of_a_later_host_are_named_by_their_rank_in_the_group() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        pool = EnginePool(range(9, 10), 8)
        with theirs:
            await pool.connect([ours])
        assert (await asyncio.wait_for(pool.death, 5)).rank == 9
        pool.close()

    asyncio.run(run())


def test_calls_are_answered_refused_or_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with Pool(2) as (pool, engines):
            assert await pool.call_all("flush_cache", {"a": 1}) == [{"called": "flush_cache"}] * 2
            assert engines[0].calls[0].arguments == {"a": 1}
            with pytest.raises(ApiError) as refused:
                await pool.call_all("start_profile")
            assert refused.value.status == 400
            monkeypatch.setattr(engine_client, "CALL_TIMEOUT_SECONDS", 0.05)
            engines[0].frozen.set()
            with pytest.raises(ApiError) as late:
                await pool.call_all("flush_cache")
            assert late.value.status == 504
            engines[0].frozen.clear()

    asyncio.run(run())


def test_the_queue_has_room_for_the_batches_of_all_ranks_and_itself() -> None:
    async def run() -> None:
        async with Pool(2, max_queued=1) as (pool, engines):
            for engine in engines:
                engine.running.clear()
            for number in range(5):
                pool.admit()
                pool.submit([([number], [SAMPLING])], Mailbox(1))
            with pytest.raises(ApiError) as full:
                pool.admit()
            assert full.value.status == 429

    asyncio.run(run())


def test_the_silent_rank_is_named() -> None:
    async def run() -> None:
        async with Pool(3) as (pool, engines):
            engines[1].frozen.set()
            await until(lambda: pool.silence()[0] == 1 and pool.silence()[1] > 0.2)
            engines[1].frozen.clear()

    asyncio.run(run())


def test_the_balancer_weighs_sequences_and_prompts() -> None:
    balancer = Balancer(3)
    assert balancer.choose() == 0
    balancer.add(0, 10_000)
    balancer.add(1, 0)
    assert balancer.choose() == 2
    balancer.add(2, 100)
    assert balancer.choose() == 1
    for _ in range(5):
        balancer.add(1, 0)
    assert balancer.choose() == 2
    balancer.remove(0, 10_000)
    assert balancer.choose() == 0
    assert [balancer.num_sequences(rank) for rank in range(3)] == [0, 6, 1]


def test_a_mailbox_hands_out_what_came_before_its_failure() -> None:
    async def run() -> None:
        box = Mailbox(1)
        output = TokenOutput(request_id=1, token_ids=(5,))
        box.put(0, output)
        box.fail(unavailable("gone", "x"))
        box.fail(unavailable("later", "y"))
        assert await box.take() == [(0, output)]
        with pytest.raises(ApiError, match="gone"):
            await box.take()

    asyncio.run(run())


def test_a_mailbox_tells_once_that_its_reader_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(engine_pool, "MAX_UNREAD_TOKENS", 10)
        calls: list[int] = []
        box = Mailbox(1)  # 10, and 64 for its one choice
        box.on_overflow = lambda: calls.append(1)
        for _ in range(74):
            box.put(0, TokenOutput(request_id=1, token_ids=(5,)))
        assert calls == []
        await box.take()
        for _ in range(80):
            box.put(0, TokenOutput(request_id=1, token_ids=(5,)))
        assert calls == [1]

    asyncio.run(run())


def test_a_burst_of_outputs_leaves_turns_for_others() -> None:
    """What an engine has written long ago is not all read before a probe or another client is heard."""

    async def run() -> None:
        arrived: list[int] = []
        at_each_turn: list[int] = []
        ours, theirs = socket.socketpair()
        client = EngineClient(
            0, lambda step: arrived.extend(out.request_id for out in step.outputs), lambda _: None, itertools.count()
        )
        frame = encode_frame(StepOutputs([TokenOutput(request_id=number, token_ids=(1,)) for number in range(60)], StepStats()))
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.sendall(frame * 100)
        await client.connect(ours)
        while len(arrived) < 6000:
            at_each_turn.append(len(arrived))
            await asyncio.sleep(0)
        turns = [after - before for before, after in itertools.pairwise([*at_each_turn, len(arrived)])]
        assert max(turns) <= 60 * (engine_client.READ_BYTES // len(frame) + 1)
        assert max(turns) < 2000
        client.close()
        theirs.close()

    asyncio.run(run())
