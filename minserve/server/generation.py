"""One client's answer under way: its prompts enter the engines, its choices grow, and it ends or is aborted.

Knows neither HTTP nor JSON.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from minserve.messages import Ready
from minserve.request import FinishReason, SamplingParams, TokenLogprobs, TokenOutput
from minserve.server.answer_format import CallDelta, ModelFormats, Part, Reasoning
from minserve.server.api_errors import ApiError
from minserve.server.detokenizer import Detokenizer, TextStream
from minserve.server.engine_pool import EnginePool, Mailbox
from minserve.server.metrics import ChoiceClock, Metrics
from minserve.server.options import ModelFacts, Options
from minserve.server.token_pieces import TokenPieces
from minserve.server.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    tokenizer: Tokenizer
    facts: ModelFacts
    metrics: Metrics
    formats: ModelFormats
    ranks: tuple[Ready, ...]
    """What each engine said when it became ready."""


class Piece(NamedTuple):
    """What is new in a choice. Neither text nor anything aside it only at its end."""

    text: str
    token_ids: Sequence[int]
    """New tokens since the last piece, those whose text is still held back included; none when nobody asked for them."""
    logprobs: Sequence[TokenLogprobs]
    offsets: Sequence[int]
    """For each log-probability: characters of output text before its token."""
    finish_reason: str | None = None
    aside: Sequence[Reasoning | CallDelta] = ()
    """What is new and not part of the content."""

    def in_order(self) -> Iterator[Part]:
        """What is new, as it follows each other: reasoning, content, calls."""
        yield from (part for part in self.aside if isinstance(part, Reasoning))
        if self.text:
            yield self.text
        yield from (part for part in self.aside if isinstance(part, CallDelta))


class Choice:
    """The state of one choice from its first token to its end."""

    def __init__(self, options: Options, pieces: TokenPieces) -> None:
        skip, self._include_stop = options.asked.skip_special_tokens, options.asked.include_stop_str_in_output
        self._text = TextStream(
            pieces,
            skip_special_tokens=skip,
            stop=options.stop,
            include_stop=self._include_stop,
            min_tokens=options.sampling.min_tokens,
            continues_text=True,
            answer=options.answer,
        )
        self._calls_are_a_stop = options.answer.calls_are_a_stop
        self._has_calls = False
        self._shown_text = Detokenizer(pieces, skip_special_tokens=skip, continues_text=True)
        self._num_characters = 0
        self._plain = options.sampling.logprobs is None and not options.asked.return_token_ids
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._offsets: list[int] = []
        self.num_tokens = 0
        """Output tokens that count: none after a stop string."""
        self.finish_reason: str | None = None
        self.stopped_early = False
        """Set when the text ended the choice and the engine does not know yet."""
        self.cached_tokens = 0
        self.sum_logprobs = 0.0
        """Over the output tokens, when log-probabilities were asked for."""
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        return self._text.num_reasoning_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice, if one did."""
        stopped = self._text.stopped
        return stopped.stop or None if stopped is not None else None

    def feed(self, output: TokenOutput) -> list[Piece]:
        """New pieces, one for each token that made text visible. Raises ApiError when the engine gave this choice up."""
        if self.finish_reason is not None:
            return []
        self.cached_tokens += output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is FinishReason.ERROR:
            if output.is_bad_request:
                raise ApiError(400, output.error or "The request cannot be served")
            raise ApiError(500, output.error or "The engine failed on this request", code="engine_error")
        if output.finish_reason is FinishReason.ABORT:
            raise ApiError(499, "The request was aborted", code="request_aborted")
        made: list[Piece] = []
        hidden = -1
        if output.finish_reason is FinishReason.STOP and not self._include_stop:
            hidden = len(output.token_ids) - 1  # the stop token counts, but its text is not part of the answer
        for number, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if not self._plain:
                self._note(token_id, output.logprobs[number] if output.logprobs else None)
            text = self._text.push_token(token_id) if number != hidden else ""
            if self._text.stopped is not None:
                self.stopped_early = output.finish_reason is None
                made.append(self._piece(text, "stop"))
                return made
            if text or self._text.aside:
                made.append(self._piece(text))
        if output.finish_reason is not None:
            rest = self._text.finish()
            made.append(self._piece(rest, "stop" if self._text.stopped is not None else output.finish_reason.value))
        return made

    def _note(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
            self._offsets.append(self._num_characters)
            self._num_characters += len(self._shown_text.push(token_id))
            self.sum_logprobs += logprobs.logprob

    def _piece(self, text: str, finish_reason: str | None = None) -> Piece:
        aside = self._text.take_aside()
        if aside:
            self._has_calls = self._has_calls or any(isinstance(part, CallDelta) for part in aside)
        if finish_reason == "stop" and self._has_calls and not self._calls_are_a_stop:
            finish_reason = "tool_calls"
        self.finish_reason = finish_reason
        if self._text.stopped is not None and (surplus := self.num_tokens - self._text.stopped.num_tokens):
            del self._token_ids[-surplus:], self._logprobs[-surplus:], self._offsets[-surplus:]
            self.num_tokens -= surplus
        if self._plain:
            return Piece(text, (), (), (), finish_reason, aside)
        piece = Piece(text, self._token_ids, self._logprobs, self._offsets, finish_reason, aside)
        self._token_ids, self._logprobs, self._offsets = [], [], []
        return piece


class Usage(NamedTuple):
    """Prompts are counted once however many choices they have; tokens of all choices are summed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int

    def told(self) -> dict[str, Any]:
        """As OpenAI's API shows it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None
    """What the client wrote, when it wrote text: an echo gives it back."""


class Generation:
    """Every choice of every prompt of one body. Choice number i belongs to prompt `i // best_of`."""

    def __init__(
        self,
        id_prefix: str,
        options: Options,
        prompts: list[Prompt],
        request_id: str,
        model: LoadedModel,
        engines: EnginePool,
    ) -> None:
        """Submits at once. Raises ApiError when the queue is full or the engine has ended.

        `request_id` is what the client calls it; several may use one name.
        """
        self.request_id = request_id
        self.id = f"{id_prefix}{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.options = options
        self.prompts = prompts
        self.model = model
        count = len(prompts) * options.best_of
        self.choices = [Choice(options, model.tokenizer.pieces) for _ in range(count)]
        self.mailbox = Mailbox(count)
        self.aborted_by: str | None = None
        self._open = count
        self._engines = engines
        arrival = time.monotonic()
        self._clocks = [ChoiceClock(model.metrics, arrival) for _ in range(count)]
        engines.admit()
        self._request_ids = engines.submit([(prompt.token_ids, self._sampling(prompt)) for prompt in prompts], self.mailbox)
        self._heard: set[int] = set()

    @property
    def open(self) -> bool:
        """Whether a choice still grows."""
        return self._open > 0

    async def advance(self) -> list[tuple[int, list[Piece]]]:
        """Wait for outputs; for each its choice's number and new pieces, perhaps none, in order.

        Raises ApiError when the answer cannot go on.
        """
        made: list[tuple[int, list[Piece]]] = []
        for number, output in await self.mailbox.take():
            choice = self.choices[number]
            if output.token_ids and choice.finish_reason is None:
                self._clocks[number].tokens(len(output.token_ids))
            if number not in self._heard:
                self._heard.add(number)
                if output.queue_seconds is not None:
                    self.model.metrics.queue_time.observe(output.queue_seconds)
                if number % self.options.best_of == 0:
                    self.model.metrics.prompt_tokens += len(self.prompt_of(number).token_ids)
            pieces = choice.feed(output)
            made.append((number, pieces))
            if pieces and choice.finish_reason is not None:
                self._open -= 1
                if choice.stopped_early:
                    self._engines.finish(self._request_ids[number], choice.num_tokens)
                self._clocks[number].end(choice.finish_reason)
        return made

    def prompt_of(self, number: int) -> Prompt:
        return self.prompts[number // self.options.best_of]

    def usage(self) -> Usage:
        """The counts so far."""
        return Usage(
            sum(len(prompt.token_ids) for prompt in self.prompts),
            sum(choice.num_tokens for choice in self.choices),
            sum(choice.cached_tokens for choice in self.choices[:: self.options.best_of]),
            sum(choice.num_reasoning_tokens for choice in self.choices),
        )

    def abort(self, cause: str, error: ApiError | None = None) -> None:
        """Ends what still runs in the engines; with `error` the task that writes the answer is told. Safe to repeat."""
        if not self.open or self.aborted_by is not None:
            return
        self.aborted_by = cause
        self.model.metrics.aborts[cause] += self._engines.abort(self._request_ids)
        if error is not None:
            self.mailbox.fail(error)

    def _sampling(self, prompt: Prompt) -> list[SamplingParams]:
        facts, length = self.model.facts, len(prompt.token_ids)
        return [self.options.sampling_for(facts, length, choice) for choice in range(self.options.best_of)]
