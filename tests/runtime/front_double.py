"""The front's end of an engine's socket, for tests: sends messages, waits for answers, never for long."""

from __future__ import annotations

import collections
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from waiting import PATIENCE

from minserve import config as configuration
from minserve.config import Config
from minserve.messages import (
    AddRequests,
    Call,
    Fatal,
    FrameReader,
    Ready,
    Reply,
    StepOutputs,
    ToEngine,
    ToFront,
    decode_to_front,
    encode_frame,
    frame,
)
from minserve.request import FinishReason, Request, TokenOutput


class FrontDouble:
    """Keeps every output by request, and the newest stats."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames = FrameReader()
        self.messages: list[ToFront] = []
        self.heard_at: list[float] = []
        self.outputs: dict[int, list[TokenOutput]] = collections.defaultdict(list)
        self.closed = False

    def send(self, *messages: ToEngine) -> None:
        self.connection.sendall(b"".join(encode_frame(message) for message in messages))

    def ask(self, *requests: Request) -> None:
        self.send(AddRequests(list(requests)))

    def wait(self, until: Callable[[], bool], within: float = PATIENCE) -> None:
        """Take in what the engine says until the condition holds."""
        deadline = time.monotonic() + within
        while not until():
            assert not self.closed, f"the engine closed its socket; last: {self.messages[-1:]}"
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            self._take(self.connection.recv(1 << 20))

    def wait_for_close(self, within: float = PATIENCE) -> None:
        self.connection.settimeout(within)
        while not self.closed:
            self._take(self.connection.recv(1 << 20))

    def _take(self, data: bytes) -> None:
        self.closed = not data
        for body in self.frames.feed(data):
            message = decode_to_front(body)
            self.messages.append(message)
            self.heard_at.append(time.monotonic())
            if isinstance(message, StepOutputs):
                for output in message.outputs:
                    self.outputs[output.request_id].append(output)

    @property
    def ready(self) -> Ready | None:
        return next((message for message in self.messages if isinstance(message, Ready)), None)

    @property
    def stats(self):
        return next(m.stats for m in reversed(self.messages) if isinstance(m, StepOutputs))

    def tokens(self, request_id: int) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def reason(self, request_id: int) -> FinishReason | None:
        outputs = self.outputs[request_id]
        return outputs[-1].finish_reason if outputs else None

    def finish(self, *request_ids: int) -> None:
        self.wait(lambda: all(self.reason(request_id) is not None for request_id in request_ids))

    def rest(self) -> None:
        """Wait until the engine says that nothing runs and no page is in use."""
        count = len(self.messages)
        self.wait(lambda: len(self.messages) > count and self._at_rest(self.messages[-1]))

    @staticmethod
    def _at_rest(message: ToFront) -> bool:
        return isinstance(message, StepOutputs) and not (
            message.stats.num_running or message.stats.num_waiting or message.stats.used_pages
        )

    def call(self, method: str, **arguments: object) -> Reply:
        call_id = sum(isinstance(message, Reply) for message in self.messages) + 1
        self.send(Call(call_id, method, arguments))
        self.wait(lambda: self._reply(call_id) is not None)
        reply = self._reply(call_id)
        assert reply is not None
        return reply

    def _reply(self, call_id: int) -> Reply | None:
        return next((m for m in self.messages if isinstance(m, Reply) and m.call_id == call_id), None)

    def silent_for(self, seconds: float) -> bool:
        """Whether nothing comes in that time."""
        self.connection.settimeout(seconds)
        try:
            self._take(self.connection.recv(1 << 20))
        except TimeoutError:
            return True
        return False


class EngineProcess(FrontDouble):
    """An engine started the way the front starts it."""

    def __init__(self, config: Config) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = os.environ | {"MINSERVE_ENGINE_FD": str(theirs.fileno()), "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "minserve.runtime"],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                process_group=0,
            )
        super().__init__(ours)
        ours.sendall(frame(configuration.encode(config)))

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        try:
            self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise

    def exit_code(self, within: float = PATIENCE) -> int:
        return self.process.wait(within)

    @property
    def last_word(self) -> Fatal | None:
        return next((message for message in self.messages if isinstance(message, Fatal)), None)

    def wait_until_ready(self) -> Ready:
        self.wait(lambda: self.ready is not None)
        assert self.ready is not None
        return self.ready
