"""An engine's double for tests of the edge: speaks minserve.messages over a socket and emits scripted tokens. Knows no model."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from waiting import PATIENCE

from minserve.messages import (
    AbortRequests,
    AddRequests,
    Call,
    Fatal,
    FinishRequest,
    FrameReader,
    Ready,
    Reply,
    Shutdown,
    Starting,
    StepOutputs,
    StepStats,
    ToEngine,
    ToFront,
    Vocabulary,
    decode_to_engine,
    encode_frame,
)
from minserve.request import FinishReason, Request, TokenLogprobs, TokenOutput

Script = Callable[[Request], Iterable[int]]
"""The tokens that a request gets. When they run out the request ends with `stop`, without a token more."""


@dataclasses.dataclass
class Sequence:
    request: Request
    tokens: Iterator[int]
    num_tokens: int = 0


class ScriptedEngine:
    """Runs in a thread until its socket closes. Attributes may be set from the test at any time."""

    def __init__(self, connection: socket.socket, script: Script, *, ready: Ready, be_ready: bool = True) -> None:
        self.script = script
        self.step_seconds = 0.0
        """Pause before each step."""
        self.tokens_per_step = 1
        self.max_batch = ready.max_num_seqs
        self.added: list[Request] = []
        self.aborted: list[int] = []
        self.finished: list[FinishRequest] = []
        self.calls: list[Call] = []
        self.vocabularies: list[Vocabulary] = []
        self.refuse: Callable[[Request], TokenOutput] | None = None
        """When set, what every request is answered with at its next step."""
        self.was_shut_down = False
        self.fail_with: str | None = None
        """When set, every request ends with this error at its next step."""
        self.running = threading.Event()
        """Cleared: no steps, but a pulse."""
        self.running.set()
        self.frozen = threading.Event()
        """Set: not a word, like a stuck process."""
        self.stats: StepStats | None = None
        """When set, what it says of itself instead of the truth."""
        self.steps = 0
        self._connection = connection
        self.ready = ready
        self._frames = FrameReader()
        self._live: dict[int, Sequence] = {}
        self._outbox: list[ToFront] = [Starting("load", 0.5)]
        self._pulse_at = 0.0
        if be_ready:
            self._outbox.append(ready)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def become_ready(self) -> None:
        self._outbox.append(self.ready)

    def say(self, message: ToFront) -> None:
        self._outbox.append(message)

    def die(self, fatal: Fatal | None = None) -> None:
        """Close the socket, with a last word or without."""
        if fatal is not None:
            self._connection.sendall(encode_frame(fatal))
        with contextlib.suppress(OSError):  # the front has read the last word and hung up first
            self._connection.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except OSError:
            pass
        finally:
            self._connection.close()

    def _turn(self) -> bool:
        busy = bool(self._live) and self.running.is_set()
        readable, _, _ = select.select([self._connection], [], [], 0 if busy or self._outbox else 0.005)
        if self.frozen.is_set():
            time.sleep(0.005)
            return True
        while self._outbox:
            self._send(self._outbox.pop(0))
        if readable:
            data = self._connection.recv(1 << 20)
            if not data:
                return False
            for body in self._frames.feed(data):
                self._receive(decode_to_engine(body))
            if self.was_shut_down:
                return False
        if busy:
            self._step()
        elif time.monotonic() > self._pulse_at:
            self._send(StepOutputs([], self._stats()))
        return True

    def _send(self, message: ToFront) -> None:
        self._connection.sendall(encode_frame(message))
        self._pulse_at = time.monotonic() + 0.1

    def _receive(self, message: ToEngine) -> None:
        match message:
            case AddRequests():
                for request in message.requests:
                    self.added.append(request)
                    self._live[request.id] = Sequence(request, iter(self.script(request)))
            case AbortRequests():
                self.aborted += message.request_ids
                for request_id in message.request_ids:
                    self._live.pop(request_id, None)
            case FinishRequest():
                self.finished.append(message)
                self._live.pop(message.request_id, None)
            case Call():
                self.calls.append(message)
                error = f"there is no {message.method}" if message.method == "start_profile" else None
                self._outbox.append(Reply(message.call_id, {"called": message.method}, error))
            case Vocabulary():
                self.vocabularies.append(message)
            case Shutdown():
                self.was_shut_down = True

    def _step(self) -> None:
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self.steps += 1
        batch = list(itertools.islice(self._live.values(), self.max_batch))
        outputs = [self._advance(sequence) for sequence in batch]
        for output in outputs:
            if output.finish_reason is not None:
                del self._live[output.request_id]
        self._send(StepOutputs(outputs, self._stats()))

    def _advance(self, sequence: Sequence) -> TokenOutput:
        request, sampling = sequence.request, sequence.request.sampling
        if self.refuse is not None:
            return self.refuse(request)
        if self.fail_with is not None:
            return TokenOutput(request_id=request.id, finish_reason=FinishReason.ERROR, error=self.fail_with)
        tokens: list[int] = []
        finish: FinishReason | None = FinishReason.LENGTH if sampling.max_tokens == 0 else None
        first = sequence.num_tokens == 0
        while finish is None and len(tokens) < self.tokens_per_step:
            token = next(sequence.tokens, None)
            if token is None:
                finish = None if tokens else FinishReason.STOP
                break
            sequence.num_tokens += 1
            tokens.append(token)
            if token in sampling.stop_token_ids:
                finish = FinishReason.STOP
            elif sequence.num_tokens >= sampling.max_tokens:
                finish = FinishReason.LENGTH
        prompt_logprobs = None
        if first and sampling.prompt_logprobs is not None:
            rest = request.prompt_token_ids[1:]
            prompt_logprobs = (None, *(logprobs_of(token, sampling.prompt_logprobs) for token in rest))
        return TokenOutput(
            request_id=request.id,
            token_ids=tuple(tokens),
            logprobs=() if sampling.logprobs is None else tuple(logprobs_of(token, sampling.logprobs) for token in tokens),
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish,
            cached_tokens=2 if first else 0,
            queue_seconds=0.001 if first else None,
        )

    def _stats(self) -> StepStats:
        return self.stats or StepStats(
            num_running=len(self._live), used_pages=len(self._live), steps=self.steps, graph_replays={1: self.steps}
        )


def logprobs_of(token: int, num_top: int) -> TokenLogprobs:
    """What this engine says of a token: it is the second likeliest, after its neighbour."""
    ids = [token + 1, token, *range(2, 40)][:num_top]
    values = [-0.25 - 0.1 * place - 0.001 * (token % 100) for place in range(len(ids))]
    return TokenLogprobs(token, -0.35 - 0.001 * (token % 100), 2, tuple(ids), tuple(values))
