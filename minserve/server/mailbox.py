"""Where an engine's outputs wait for the task that writes one client's answer. Knows nothing of what the outputs mean."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from minserve.request import TokenOutput
from minserve.server.api_errors import ApiError

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
