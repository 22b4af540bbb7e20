"""An engine without a model, to measure the front alone: every request gets its own prompt's tokens again, at a given pace.

Knows messages and the checkpoint's config.json; never imports torch.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from minserve import messages
from minserve.config import Config, model_directory
from minserve.errors import CheckpointError, ExitCode, ServerError
from minserve.request import FinishReason, Request, TokenLogprobs, TokenOutput
from minserve.runtime.connection import FrontConnection, FrontGone

HEARTBEAT_SECONDS = 0.5
_UNREAD_BYTES = 1 << 16
"""Kept in the socket to each worker of the front: as fast as the front takes them means that few tokens wait for it."""
_CONTEXT_WITHOUT_LIMIT = 4096
_PAGE_SIZE = 64

log = logging.getLogger("minserve.mock_engine")


def echo(request: Request) -> Iterator[TokenOutput]:
    """A request's output of each step: its prompt's tokens, over and over, stop tokens left out."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    stops = frozenset(sampling.stop_token_ids)
    spoken = itertools.cycle([token for token in prompt[1:] if token not in stops] or [0])
    for made in range(1, max(1, sampling.max_tokens) + 1):
        first = made == 1
        tokens = (next(spoken),) if sampling.max_tokens else ()
        yield TokenOutput(
            request_id=request.id,
            token_ids=tokens,
            logprobs=() if sampling.logprobs is None else tuple(map(_certain, tokens)),
            prompt_logprobs=(None, *map(_certain, prompt[1:])) if first and sampling.prompt_logprobs is not None else None,
            finish_reason=FinishReason.LENGTH if made >= sampling.max_tokens else None,
            queue_seconds=time.monotonic() - request.arrival_time if first else None,
        )


def _certain(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, 0.0, 1, (token_id,), (0.0,))


class MockEngine:
    """Steps at a fixed pace; each gives every running request, `max_num_seqs` at most, one token."""

    def __init__(self, connection: FrontConnection, tokens_per_second: float, max_num_seqs: int, info: dict[str, object]) -> None:
        """`tokens_per_second`: of each request; infinite: as fast as the front takes them."""
        self._connection = connection
        self._pause = 1.0 / tokens_per_second
        self._max_num_seqs = max_num_seqs
        self._info = info
        self._running: dict[int, Iterator[TokenOutput]] = {}
        self._waiting: dict[int, Request] = {}
        self._steps = 0
        self._leaving = False
        self._spoke_at = 0.0

    def run(self) -> None:
        """Until the front says Shutdown. Raises FrontGone."""
        next_step = time.monotonic()
        while not self._leaving:
            now = time.monotonic()
            busy = bool(self._running or self._waiting)
            wait = min(HEARTBEAT_SECONDS, max(0.0, next_step - now)) if busy else HEARTBEAT_SECONDS
            for message in self._connection.receive(wait):
                self._take(message)
            now = time.monotonic()
            if not (self._running or self._waiting):
                next_step = now
                self._speak([], now)
            elif now >= next_step:
                next_step = max(next_step + self._pause, now - self._pause)  # a late step is made up for, not several
                self._speak(self._step(), now)

    def _step(self) -> list[TokenOutput]:
        self._steps += 1
        while self._waiting and len(self._running) < self._max_num_seqs:
            request = self._waiting.pop(next(iter(self._waiting)))
            self._running[request.id] = echo(request)
        outputs = list(map(next, self._running.values()))
        for output in outputs:
            if output.finish_reason is not None:
                del self._running[output.request_id]
        return outputs

    def _speak(self, outputs: list[TokenOutput], now: float) -> None:
        if outputs or now - self._spoke_at >= HEARTBEAT_SECONDS:
            running = len(self._running)
            stats = messages.StepStats(num_running=running, num_waiting=len(self._waiting), used_pages=running, steps=self._steps)
            self._connection.send(messages.StepOutputs(outputs, stats))
            self._spoke_at = now

    def _take(self, message: messages.ToEngine) -> None:
        match message:
            case messages.AddRequests():
                self._waiting.update((request.id, request) for request in message.requests)
            case messages.AbortRequests():
                self._drop(message.request_ids)
            case messages.FinishRequest():
                self._drop([message.request_id])
            case messages.Call():
                self._connection.send(self._answer(message))
            case messages.Shutdown():
                self._leaving = True

    def _drop(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)
            self._waiting.pop(request_id, None)

    def _answer(self, call: messages.Call) -> messages.Reply:
        if call.method in ("server_info", "flush_cache"):
            return messages.Reply(call.call_id, self._info if call.method == "server_info" else {})
        return messages.Reply(call.call_id, error=f"the mock engine has no {call.method}")


def start(connection: FrontConnection) -> MockEngine:
    """Reads the checkpoint's config.json and is ready. Raises ServerError."""
    config = connection.receive_config()
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    facts = _facts(config)
    rate = config.mock_engine or math.inf
    info: dict[str, object] = {"backend": "mock engine", "tokens_per_second": rate if math.isfinite(rate) else "unlimited"}
    log.warning("this is a mock engine: every answer repeats its prompt, at %s tokens/s each", info["tokens_per_second"])
    connection.send(
        messages.Ready(
            model_type=str(facts.get("model_type", "mock")),
            vocab_size=int(facts["vocab_size"]),
            max_model_len=config.max_model_len or int(facts.get("max_position_embeddings", _CONTEXT_WITHOUT_LIMIT)),
            max_num_seqs=config.max_num_seqs,
            eos_token_ids=(),
            num_pages=1 << 24,
            page_size=_PAGE_SIZE,
            startup_seconds={},
            info=info,
        )
    )
    return MockEngine(connection, rate, config.max_num_seqs, info)


def _facts(config: Config) -> dict[str, Any]:
    path = model_directory(config) / "config.json"
    try:
        facts = json.loads(path.read_bytes())
        facts = facts.get("text_config", facts)
        return {**facts, "vocab_size": int(facts["vocab_size"])}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} tells no vocab_size: {error}") from error


def main() -> int:
    """The process's exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the front, which drains and then ends this engine
        signal.signal(number, signal.SIG_IGN)
    connection = FrontConnection.inherited(send_buffer=_UNREAD_BYTES)
    connection.leave_with_front()
    try:
        start(connection).run()
    except FrontGone:
        return ExitCode.RANK_DIED
    except ServerError as error:
        connection.leave_alone()
        connection.send(messages.Fatal(error.exit_code, str(error)))
        return error.exit_code
    connection.leave_alone()
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
