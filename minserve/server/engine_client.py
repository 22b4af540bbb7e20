"""The front's end of one engine's socket: frames in and out, calls and their replies, the engine's pulse. Knows no requests."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from minserve.errors import ExitCode
from minserve.messages import (
    Call,
    Fatal,
    FrameError,
    FrameReader,
    Ready,
    Reply,
    Shutdown,
    Starting,
    StepOutputs,
    StepStats,
    ToEngine,
    decode_to_front,
    encode_frame,
)
from minserve.server.api_errors import ApiError

CALL_TIMEOUT_SECONDS = 60.0
READ_BYTES = 1 << 14
"""Most that is read from an engine at once: between two reads all streams are written, and all other clients heard."""


@dataclasses.dataclass(frozen=True, slots=True)
class Death:
    """How an engine ended; `message` is None when it said no last word."""

    rank: int
    exit_code: ExitCode
    message: str | None


class EngineClient(asyncio.BufferedProtocol):
    """One engine, as the front sees it. All methods belong to the event loop's thread."""

    def __init__(
        self,
        rank: int,
        on_outputs: Callable[[StepOutputs], None],
        on_death: Callable[[Death], None],
        call_ids: Iterator[int],
    ) -> None:
        self.rank = rank
        self.starting: Starting | None = None
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.stats = StepStats()
        self.last_heard = time.monotonic()
        """When the last frame came; an engine sends at least one a second."""
        self.closed = asyncio.Event()
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._frames = FrameReader()
        self._read = bytearray(READ_BYTES)
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._call_ids = call_ids
        self._transport: asyncio.Transport | None = None
        self._told_to_leave = False
        self._dead = False

    async def connect(self, connection: socket.socket) -> None:
        """Takes the socket over; it is closed with the client."""
        connection.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    def send(self, message: ToEngine) -> None:
        """Queue a message; one to an engine that is gone is dropped, its death is told elsewhere."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    async def call(self, method: str, arguments: dict[str, Any] | None = None) -> Any:
        """The engine's answer. Raises ApiError when it refuses (400), is gone (503) or does not answer in time (504)."""
        call_id = next(self._call_ids)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if self._dead:
            raise ApiError(503, "the engine has ended")
        self._calls[call_id] = future
        try:
            self.send(Call(call_id, method, arguments or {}))
            async with asyncio.timeout(CALL_TIMEOUT_SECONDS):
                reply = await future
        except TimeoutError:
            message = f"engine {self.rank} did not answer {method} within {CALL_TIMEOUT_SECONDS:g} s"
            raise ApiError(504, message) from None
        finally:
            self._calls.pop(call_id, None)
        if reply.error is not None:
            raise ApiError(400, f"engine {self.rank} refused {method}: {reply.error}")
        return reply.result

    def shut_down(self) -> None:
        """Ask the engine to leave; its end of the socket then closes without being a death."""
        self._told_to_leave = True
        self.send(Shutdown())

    def close(self) -> None:
        self._told_to_leave = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        self.last_heard = time.monotonic()
        try:
            for body in self._frames.feed(self._read[:nbytes]):
                self._receive(decode_to_front(body))
        except FrameError as error:
            self._die(ExitCode.INTERNAL, f"engine {self.rank} sent what is no message: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._die(ExitCode.RANK_DIED, None)
        self.closed.set()

    def _receive(self, message: Starting | Ready | StepOutputs | Reply | Fatal) -> None:
        match message:
            case StepOutputs():
                self.stats = message.stats
                self._on_outputs(message)
            case Reply():
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case Starting():
                self.starting = message
            case Ready():
                self.ready.set_result(message)
            case Fatal():
                known = message.exit_code in list(ExitCode)
                self._die(ExitCode(message.exit_code) if known else ExitCode.INTERNAL, message.message)

    def _die(self, code: ExitCode, message: str | None) -> None:
        """Tells of the first cause only: the end of a connection follows every last word."""
        if self._dead:
            return
        self._dead = True
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ApiError(503, "the engine has ended"))
        if not self._told_to_leave:
            self._on_death(Death(self.rank, code, message))
