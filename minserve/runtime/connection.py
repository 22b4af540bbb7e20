"""The engine's end of its socket to the front: frames in, frames out, and the news of the front's death.

Knows framing and sockets; nothing of what messages mean.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading

from minserve.config import Config
from minserve.config import decode as decode_config
from minserve.errors import ExitCode
from minserve.messages import FrameReader, ToEngine, ToFront, decode_to_engine, encode_frame

DESCRIPTOR_VARIABLE = "MINSERVE_ENGINE_FD"
_RECEIVE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
_POLLRDHUP = getattr(select, "POLLRDHUP", 0)  # Linux; elsewhere a dead peer shows as POLLHUP alone


class FrontGone(Exception):
    """The front's end of the socket is closed: it has died, or is done with this engine."""


class FrontConnection:
    """A stream of frames. Sending blocks while the front does not read: its backpressure is this engine's."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket = connection
        self._frames = FrameReader()
        self._bodies: collections.deque[bytes] = collections.deque()
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._leaving = threading.Event()

    @classmethod
    def inherited(cls) -> FrontConnection:
        """The socket whose number the environment tells. Raises KeyError or OSError when there is none."""
        return cls(socket.socket(fileno=int(os.environ[DESCRIPTOR_VARIABLE])))

    def receive_config(self) -> Config:
        """The first frame. Waits for it; raises FrontGone."""
        while not self._bodies:
            self._fill(None)
        return decode_config(self._bodies.popleft())

    def receive(self, timeout: float) -> list[ToEngine]:
        """All messages that are there, after waiting up to `timeout` seconds for a first one. Raises FrontGone, FrameError."""
        if not self._bodies:
            self._fill(timeout)
        messages = [decode_to_engine(body) for body in self._bodies]
        self._bodies.clear()
        return messages

    def _fill(self, timeout: float | None) -> None:
        """One read, whatever it brings: a long frame comes in several."""
        if not self._readable.poll(None if timeout is None else timeout * 1000):
            return
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except ConnectionError as error:
            raise FrontGone from error
        if not data:
            raise FrontGone
        self._bodies.extend(self._frames.feed(data))

    def send(self, message: ToFront) -> None:
        """Raises FrontGone."""
        try:
            self._socket.sendall(encode_frame(message))
        except OSError as error:
            raise FrontGone from error

    def leave_with_front(self) -> None:
        """From now on the front's death ends this process at once, wherever it is: loading, in a long step, or stuck."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):  # the socket tells it as well
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        threading.Thread(target=self._watch, name="front-watch", daemon=True).start()

    def _watch(self) -> None:
        hang_up = select.poll()
        hang_up.register(self._socket, _POLLRDHUP)
        hang_up.poll()
        if not self._leaving.is_set():
            os._exit(ExitCode.RANK_DIED)

    def leave_alone(self) -> None:
        """This process ends by itself now, with its own exit code, whatever the front does."""
        self._leaving.set()

    def close(self) -> None:
        self._socket.close()
