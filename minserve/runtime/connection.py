"""The engine's end of its socket to the front: frames in, frames out, and the news of the front's death.

Knows framing and sockets; nothing of what messages mean.
"""

from __future__ import annotations

import collections
import os
import select
import socket
import threading
import time
from collections.abc import Iterable

from minserve.config import Config
from minserve.config import decode as decode_config
from minserve.errors import ExitCode
from minserve.messages import (
    FrameReader,
    Reply,
    Shutdown,
    StepOutputs,
    ToEngine,
    ToFront,
    decode_to_engine,
    encode_body,
    encode_frame,
)
from minserve.request import TokenOutput
from minserve.seat import DESCRIPTOR_VARIABLE

_RECEIVE_BYTES = 1 << 20
_SHUTDOWN = encode_body(Shutdown())
_PULSE_SECONDS = 0.5
"""A worker without requests hears this often how the engine is while others have some."""
_POLLRDHUP = getattr(select, "POLLRDHUP", 0)  # Linux; elsewhere a dead peer shows as POLLHUP alone


class FrontGone(Exception):
    """The front's end of the socket is closed: it has died, or is done with this engine."""


class FrontConnection:
    """A stream of frames. Sending blocks while the front does not read: its backpressure is this engine's.

    A front of several workers has as many sockets; worker `w` of `n` uses only ids that leave the rest `w` when divided by `n`,
    which tells whose an answer is. The loop sees one front: the workers' messages are merged, and it is told to leave when all
    have said so.
    """

    def __init__(self, *connections: socket.socket) -> None:
        self._readable = select.poll()
        for connection in connections:
            connection.setblocking(True)
            self._readable.register(connection, select.POLLIN)
        self._workers: list[socket.socket | None] = list(connections)
        """None: the worker was told to leave and is done."""
        self._spoke_at = [0.0] * len(connections)
        self._frames = [FrameReader() for _ in connections]
        self._bodies: collections.deque[bytes] = collections.deque()
        self._leaving = threading.Event()

    @classmethod
    def inherited(cls, send_buffer: int | None = None) -> FrontConnection:
        """The sockets whose numbers the environment tells. Raises KeyError or OSError when there is none.

        `send_buffer`: bytes that may wait in each for the front; by default the system's choice.
        """
        connections = [socket.socket(fileno=int(number)) for number in os.environ[DESCRIPTOR_VARIABLE].split(",")]
        if send_buffer is not None:
            for connection in connections:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        return cls(*connections)

    def receive_config(self) -> Config:
        """The first frame of the first worker; the others send none before they hear that the engine is ready. Waits for it.

        Raises FrontGone.
        """
        while not self._bodies:
            self._fill(None)
        return decode_config(self._bodies.popleft())

    def wake_on(self, descriptors: Iterable[int]) -> None:
        """From now on `receive` waits no longer when one of these becomes readable; what comes there is another's to read."""
        for descriptor in descriptors:
            self._readable.register(descriptor, select.POLLIN)

    @property
    def readable(self) -> bool:
        """Whether a `receive` would find something now, be it a part of a message."""
        return bool(self._bodies or self._readable.poll(0))

    @property
    def midway(self) -> bool:
        """Whether a message has come in part: one that is longer than the socket's buffer comes as fast as it is read."""
        return any(frames.midway for frames in self._frames)

    def receive(self, timeout: float) -> list[ToEngine]:
        """All messages that are there, after waiting up to `timeout` seconds for a first one. Raises FrontGone, FrameError."""
        if not self._bodies:
            self._fill(timeout)
        messages = [decode_to_engine(body) for body in self._bodies]
        self._bodies.clear()
        return messages

    def _fill(self, timeout: float | None) -> None:
        """One read of each worker that has something, whatever it brings: a long frame comes in several."""
        for descriptor, _ in self._readable.poll(None if timeout is None else timeout * 1000):
            for number, connection in enumerate(self._workers):
                if connection is not None and connection.fileno() == descriptor:
                    self._read(number, connection)

    def _read(self, number: int, connection: socket.socket) -> None:
        try:
            data = connection.recv(_RECEIVE_BYTES)
        except ConnectionError as error:
            raise FrontGone from error
        if not data:
            raise FrontGone
        bodies = self._frames[number].feed(data)
        if bodies and self._num_workers > 1 and bodies[-1] == _SHUTDOWN:
            bodies.pop()
            self._readable.unregister(connection)
            self._workers[number] = None
            connection.shutdown(socket.SHUT_RDWR)  # closing alone would say nothing while the watcher holds it
            connection.close()
        self._bodies.extend(bodies)

    @property
    def _num_workers(self) -> int:
        return sum(connection is not None for connection in self._workers)

    def send(self, message: ToFront) -> None:
        """To the workers whom it concerns. Raises FrontGone."""
        if len(self._workers) == 1:
            self._send(0, message)
        elif isinstance(message, StepOutputs) and message.outputs:
            by_worker: dict[int, list[TokenOutput]] = {}
            for output in message.outputs:
                by_worker.setdefault(output.request_id % len(self._workers), []).append(output)
            pulse = time.monotonic() - _PULSE_SECONDS
            for number, spoke_at in enumerate(self._spoke_at):
                outputs = by_worker.get(number, [])
                if outputs or spoke_at < pulse:
                    self._send(number, StepOutputs(outputs, message.stats))
        elif isinstance(message, Reply):
            self._send(message.call_id % len(self._workers), message)
        else:
            for number in range(len(self._workers)):
                self._send(number, message)

    def _send(self, number: int, message: ToFront) -> None:
        connection = self._workers[number]
        if connection is None:
            return
        try:
            connection.sendall(encode_frame(message))
        except OSError as error:
            raise FrontGone from error
        self._spoke_at[number] = time.monotonic()

    def leave_with_front(self) -> None:
        """From now on the end of a socket ends this process at once, wherever it is: loading, in a long step, or waiting.

        The kernel kills it with the front, too, even when it hears nothing: launch has asked for that.
        """
        for number in range(len(self._workers)):
            threading.Thread(target=self._watch, args=(number,), name="front-watch", daemon=True).start()

    def _watch(self, number: int) -> None:
        connection = self._workers[number]
        if connection is None:
            return
        hang_up = select.poll()
        hang_up.register(connection, _POLLRDHUP)
        hang_up.poll()
        if not self._leaving.is_set() and self._workers[number] is not None:
            os._exit(ExitCode.RANK_DIED)

    def leave_alone(self) -> None:
        """This process ends by itself now, with its own exit code, whatever the front does."""
        self._leaving.set()

    def close(self) -> None:
        for connection in self._workers:
            if connection is not None:
                connection.close()
