"""All engines as one: admission, where each request lives and its outputs wait, aborts, pulse and death. Knows no HTTP."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from minserve.messages import AbortRequests, AddRequests, FinishRequest, Ready, StepOutputs, StepStats, ToEngine
from minserve.request import FinishReason, Request, SamplingParams, TokenOutput
from minserve.server.api_errors import RETRY_AFTER_SECONDS, ApiError, unavailable
from minserve.server.balancer import Balancer
from minserve.server.engine_client import Death, EngineClient

MAX_UNREAD_TOKENS = 4096
"""Tokens that may pile up for one answer (and 64 more for each of its choices) before its client counts as not reading."""


class Mailbox:
    """Outputs of one client's requests, in order of arrival. One task takes; the engine connection puts."""

    def __init__(self, num_sequences: int) -> None:
        self._limit = MAX_UNREAD_TOKENS + 64 * num_sequences
        self._items: list[tuple[int, TokenOutput]] = []
        self._num_tokens = 0
        self._failure: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.on_overflow: Callable[[], None] | None = None
        """Called, once, when the reader has fallen too far behind."""

    def put(self, index: int, output: TokenOutput) -> None:
        """An output of the answer's sequence number `index`."""
        self._items.append((index, output))
        self._num_tokens += len(output.token_ids)
        if self._num_tokens > self._limit and self.on_overflow is not None:
            callback, self.on_overflow = self.on_overflow, None
            callback()
        if self._waiter is not None:
            self._wake()

    def fail(self, error: ApiError) -> None:
        """Nothing more will come. Outputs that came before are still handed out."""
        self._failure = self._failure or error
        self._wake()

    async def take(self) -> list[tuple[int, TokenOutput]]:
        """All outputs that are here, at least one. Raises the ApiError of `fail` when there is none and none will come."""
        while not self._items:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        items, self._items = self._items, []
        self._num_tokens = 0
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_REQUESTS_PER_MESSAGE = 64
"""A message must stay far below the frame limit, and the engine shall begin before the last one is written."""


class _Live(NamedTuple):
    mailbox: Mailbox
    number: int
    rank: int
    num_prompt_tokens: int


class EnginePool:
    """The engines of this front, named by their ranks. Requests are live from `submit` until their last output, `finish` or
    `abort`.

    Of several workers each admits its share, and takes ids that leave its number as the rest when divided by `num_workers`.
    """

    def __init__(self, ranks: range, max_queued_requests: int, worker: int = 0, num_workers: int = 1) -> None:
        self.engines = [EngineClient(rank, self._on_outputs, self.lose, itertools.count(worker, num_workers)) for rank in ranks]
        self.death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        """Done when an engine ended that was not told to."""
        self.worker = worker
        self._balancer = Balancer(len(ranks))
        self._num_workers = num_workers
        self._max_queued = max(1, max_queued_requests // num_workers)
        self._live: dict[int, _Live] = {}
        self._ids = itertools.count(worker + num_workers, num_workers)
        self._capacity = 0
        self._last_token_at = time.monotonic()

    async def connect(self, connections: list[socket.socket]) -> None:
        """The engines' sockets in order of rank; they are closed with the pool."""
        for engine, connection in zip(self.engines, connections, strict=True):
            await engine.connect(connection)

    async def ready(self) -> list[Ready]:
        """Wait until every engine is ready; their facts in order of rank."""
        facts = [await asyncio.shield(engine.ready) for engine in self.engines]  # who gives up waiting does not undo it
        self._capacity = sum(ready.max_num_seqs for ready in facts) // self._num_workers
        self._balancer.know_pages([ready.num_pages for ready in facts], min(ready.page_size for ready in facts))
        return facts

    def tell(self, message: ToEngine) -> None:
        """The same to every engine."""
        for engine in self.engines:
            engine.send(message)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def admit(self) -> None:
        """Raises ApiError 429 when the queue is full. A request that comes when there is room enters whole, however wide."""
        if len(self._live) - self._capacity >= self._max_queued:
            message = f"The queue is full ({self._max_queued} requests wait); try again later"
            raise ApiError(429, message, code="queue_full", retry_after=RETRY_AFTER_SECONDS)

    def submit(self, prompts: list[tuple[list[int], list[SamplingParams]]], mailbox: Mailbox) -> list[int]:
        """Start every choice of every prompt; outputs go to the mailbox under running numbers. Returns the request ids.

        Choices of one prompt go to one rank, which then computes the prompt once.
        """
        if self.death.done():
            raise unavailable("The engine has ended", "engine_dead")
        now = time.monotonic()
        stats = self.stats()
        by_rank: dict[int, list[Request]] = {}
        ids: list[int] = []
        for token_ids, choices in prompts:
            rank = self._balancer.choose(token_ids, stats)
            for sampling in choices:
                request = Request(id=next(self._ids), prompt_token_ids=token_ids, sampling=sampling, arrival_time=now)
                self._live[request.id] = _Live(mailbox, len(ids), rank, len(token_ids))
                self._balancer.add(rank, len(token_ids))
                by_rank.setdefault(rank, []).append(request)
                ids.append(request.id)
        for rank, requests in by_rank.items():
            for start in range(0, len(requests), _REQUESTS_PER_MESSAGE):
                self.engines[rank].send(AddRequests(requests[start : start + _REQUESTS_PER_MESSAGE]))
        return ids

    def finish(self, request_id: int, num_tokens: int) -> None:
        """The front saw a stop string; does nothing for a request that has ended."""
        live = self._remove(request_id)
        if live is not None:
            self.engines[live.rank].send(FinishRequest(request_id, FinishReason.STOP, num_tokens))

    def abort(self, request_ids: list[int]) -> int:
        """Ends those that still live, without further outputs; how many that were."""
        by_rank: dict[int, list[int]] = {}
        for request_id in request_ids:
            live = self._remove(request_id)
            if live is not None:
                by_rank.setdefault(live.rank, []).append(request_id)
        for rank, ids in by_rank.items():
            self.engines[rank].send(AbortRequests(ids))
        return sum(map(len, by_rank.values()))

    async def call_all(self, method: str, arguments: dict[str, Any] | None = None) -> list[Any]:
        """One answer of each engine, in order of rank. Raises ApiError like EngineClient.call."""
        return list(await asyncio.gather(*(engine.call(method, arguments) for engine in self.engines)))

    def silence(self) -> tuple[int, float]:
        """The rank that was heard last longest ago, and the seconds since; engines that still start are not counted."""
        now = time.monotonic()
        ages = [(now - engine.last_heard, engine.rank) for engine in self.engines if engine.ready.done()]
        age, rank = max(ages, default=(0.0, 0))
        return rank, age

    def forgive(self) -> None:
        """Forget for how long engines have been silent."""
        for engine in self.engines:
            engine.last_heard = time.monotonic()

    def token_age(self) -> float:
        """Seconds since an engine last told of a token."""
        return time.monotonic() - self._last_token_at

    def stats(self) -> list[StepStats]:
        return [engine.stats for engine in self.engines]

    def lose(self, death: Death) -> None:
        """An engine has ended, or is as good as dead: its clients are told."""
        if not self.death.done():
            self.death.set_result(death)
        mailboxes = {id(live.mailbox): live.mailbox for live in self._live.values()}
        self.abort(list(self._live))
        for mailbox in mailboxes.values():
            mailbox.fail(unavailable("The engine has ended; the server is going down", "engine_dead"))

    async def shut_down(self, timeout: float) -> None:
        """Tell every engine to leave and wait for that, at most `timeout` seconds; then the sockets are closed."""
        for engine in self.engines:
            engine.shut_down()
        try:
            async with asyncio.timeout(timeout):
                for engine in self.engines:
                    await engine.closed.wait()
        except TimeoutError:
            pass
        self.close()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def _on_outputs(self, step: StepOutputs) -> None:
        if step.outputs:
            self._last_token_at = time.monotonic()
        for output in step.outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue  # late tokens of a request that was aborted or finished by a stop string
            live.mailbox.put(live.number, output)
            if output.finish_reason is not None:
                self._remove(output.request_id)

    def _remove(self, request_id: int) -> _Live | None:
        live = self._live.pop(request_id, None)
        if live is not None:
            self._balancer.remove(live.rank, live.num_prompt_tokens)
        return live
