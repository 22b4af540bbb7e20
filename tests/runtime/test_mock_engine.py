"""The mock engine keeps an engine's promises: batch size, pace, ends, aborts, log-probabilities, control calls."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from waiting import PATIENCE

from minserve import config as configuration
from minserve.config import Config
from minserve.messages import (
    AbortRequests,
    AddRequests,
    Call,
    FinishRequest,
    FrameReader,
    Ready,
    Reply,
    Shutdown,
    StepOutputs,
    ToEngine,
    ToFront,
    decode_to_front,
    encode_frame,
    frame,
)
from minserve.request import FinishReason, Request, SamplingParams, TokenOutput
from minserve.runtime import mock_engine
from minserve.runtime.connection import FrontConnection


class Front:
    """The other end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = FrameReader()
        self.steps: list[list[TokenOutput]] = []
        """Outputs of each step that had some."""

    def send(self, *messages: ToEngine) -> None:
        self._connection.sendall(b"".join(map(encode_frame, messages)))

    def receive(self) -> list[ToFront]:
        self._connection.settimeout(PATIENCE)
        messages = [decode_to_front(body) for body in self._frames.feed(self._connection.recv(1 << 20))]
        self.steps += [message.outputs for message in messages if isinstance(message, StepOutputs) and message.outputs]
        return messages

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            self.receive()

    def of(self, request_id: int) -> list[TokenOutput]:
        return [output for step in self.steps for output in step if output.request_id == request_id]


@contextmanager
def running(**settings: float) -> Iterator[tuple[Front, Ready]]:
    ours, theirs = socket.socketpair()
    connection = FrontConnection(theirs)
    ours.sendall(frame(configuration.encode(Config(**settings))))  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: mock_engine.start(connection).run())
    thread.start()
    front = Front(ours)
    (ready,) = [message for message in front.receive() if isinstance(message, Ready)]
    yield front, ready
    front.send(Shutdown())
    thread.join(PATIENCE)
    assert not thread.is_alive()
    ours.close()
    connection.close()


def request(number: int, max_tokens: int = 4, prompt: list[int] | None = None, **sampling: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=0, **sampling)  # type: ignore[arg-type]
    return Request(id=number, prompt_token_ids=prompt or [0, 5, 6, 7], sampling=params, arrival_time=time.monotonic())


def test_every_request_gets_its_prompt_again_until_its_length() -> None:
    with running(mock_engine=math.inf, max_num_seqs=2) as (front, ready):
        assert ready.vocab_size == 384
        assert ready.max_num_seqs == 2
        front.send(AddRequests([request(1, 5), request(2, 2, [0, 9]), request(3, 3, stop_token_ids=(6,))]))
        front.until(lambda: bool(front.of(3)) and front.of(3)[-1].finish_reason is not None)
        assert [token for output in front.of(1) for token in output.token_ids] == [5, 6, 7, 5, 6]
        assert [token for output in front.of(2) for token in output.token_ids] == [9, 9]
        assert [token for output in front.of(3) for token in output.token_ids] == [5, 7, 5], "a stop token would end it early"
        assert all(front.of(number)[-1].finish_reason is FinishReason.LENGTH for number in (1, 2, 3))
        assert all(output.finish_reason is None for number in (1, 2, 3) for output in front.of(number)[:-1])
        assert max(map(len, front.steps)) == 2, "the third waited for a place"


def test_the_pace_is_that_of_each_request() -> None:
    with running(mock_engine=100.0) as (front, _):
        began = time.monotonic()
        front.send(AddRequests([request(number, 30) for number in range(1, 9)]))
        front.until(lambda: bool(front.of(8)) and front.of(8)[-1].finish_reason is not None)
        assert time.monotonic() - began >= 0.28
        assert len(front.steps) == 30, "a token for each in every step"


def test_aborted_and_finished_requests_are_gone() -> None:
    with running(mock_engine=50.0, max_num_seqs=2) as (front, _):
        front.send(AddRequests([request(number, 1000) for number in range(1, 5)]))
        front.until(lambda: bool(front.of(2)))
        front.send(AbortRequests([1, 3]), FinishRequest(2, FinishReason.STOP, 1))
        front.until(lambda: bool(front.of(4)))
        seen = len(front.of(1))
        front.until(lambda: len(front.of(4)) > 5)
        assert len(front.of(1)) <= seen + 1
        assert front.of(3) == []


@pytest.mark.parametrize("rate", [0.0, 1000.0])
def test_log_probabilities_and_control_calls(rate: float) -> None:
    with running(mock_engine=rate) as (front, _):
        front.send(AddRequests([request(1, 2, logprobs=1, prompt_logprobs=0), request(2, 0, prompt_logprobs=0)]))
        front.until(lambda: len(front.of(1)) == 2 and len(front.of(2)) == 1)
        first, second = front.of(1)
        assert first.logprobs[0].token_id == 5
        assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None and len(first.prompt_logprobs) == 4
        assert second.prompt_logprobs is None
        (scored,) = front.of(2)
        assert (scored.token_ids, scored.finish_reason) == ((), FinishReason.LENGTH)
        replies: list[Reply] = []
        front.send(Call(7, "server_info"), Call(8, "start_profile"))
        while len(replies) < 2:
            replies += [message for message in front.receive() if isinstance(message, Reply)]
        assert replies[0].result["backend"] == "mock engine"
        assert replies[1].error == "the mock engine has no start_profile"
