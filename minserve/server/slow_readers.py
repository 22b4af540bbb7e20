"""Cuts off clients of streams that stop reading, so that they hold neither memory nor engine. Knows nothing of what is sent."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator

from aiohttp import web

from minserve.server.generation import Generation

MAX_BLOCKED_SECONDS = 60.0
"""A client that takes no byte for so long, with its socket's buffers full, is cut off."""


class Watch:
    """One stream: since when its writer waits for the client."""

    __slots__ = ("_generation", "_request", "blocked_since")

    def __init__(self, request: web.BaseRequest, generation: Generation) -> None:
        self._request = request
        self._generation = generation
        self.blocked_since: float | None = None

    def begin(self) -> None:
        self.blocked_since = time.monotonic()

    def end(self) -> None:
        self.blocked_since = None

    def cut(self) -> None:
        """Resets the connection, so that the kernel drops what is unsent too; the task that writes is cancelled by that."""
        self._generation.abort("slow_reader")
        transport = self._request.transport
        if transport is not None:
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()


class SlowReaders:
    """All streams under way. `sweep` is called every few seconds; an overflowing mailbox cuts at once."""

    def __init__(self) -> None:
        self._watches: set[Watch] = set()

    @contextlib.contextmanager
    def watch(self, request: web.BaseRequest, generation: Generation) -> Iterator[Watch]:
        watch = Watch(request, generation)
        generation.mailbox.on_overflow = watch.cut
        self._watches.add(watch)
        try:
            yield watch
        finally:
            generation.mailbox.on_overflow = None
            self._watches.discard(watch)

    def sweep(self) -> None:
        limit = time.monotonic() - MAX_BLOCKED_SECONDS
        for watch in [watch for watch in self._watches if watch.blocked_since is not None and watch.blocked_since < limit]:
            watch.cut()
