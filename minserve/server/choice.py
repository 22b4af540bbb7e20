"""One choice of an answer: the engine's token outputs become pieces of text. Knows nothing of JSON, HTTP or other choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minserve.request import FinishReason, TokenLogprobs, TokenOutput
from minserve.server.answer_format import CallDelta, Reasoning
from minserve.server.api_errors import ApiError
from minserve.server.detokenizer import Detokenizer, TextStream
from minserve.server.options import Options
from minserve.server.token_pieces import TokenPieces


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


class Choice:
    """The state of one choice from its first token to its end."""

    def __init__(self, options: Options, pieces: TokenPieces) -> None:
        self._include_stop = options.include_stop
        self._text = TextStream(
            pieces,
            skip_special_tokens=options.skip_special_tokens,
            stop=options.stop,
            include_stop=options.include_stop,
            min_tokens=options.sampling.min_tokens,
            continues_text=True,
            answer=options.answer,
        )
        self._calls_are_a_stop = options.answer is not None and options.answer.calls_are_a_stop
        self._has_calls = False
        self._offset_text = None
        if options.engine_logprobs is not None:
            skip = options.skip_special_tokens
            self._offset_text = Detokenizer(pieces, skip_special_tokens=skip, continues_text=True)
        self._num_characters = 0
        self._plain = options.engine_logprobs is None and not options.return_token_ids
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
        hidden = self._hidden_token(output)
        for number, token_id in enumerate(output.token_ids):
            if self._plain:
                self.num_tokens += 1
            else:
                self._note(token_id, output.logprobs[number] if output.logprobs else None)
            text = self._text.push_token(token_id) if number != hidden else ""
            if self._text.stopped is not None:
                self.stopped_early = output.finish_reason is None
                made.append(self._end(text, "stop"))
                return made
            aside = self._text.take_aside()
            if text or aside:
                made.append(self._take(text, None, aside))
        if output.finish_reason is not None:
            rest = self._text.finish()
            made.append(self._end(rest, "stop" if self._text.stopped is not None else output.finish_reason.value))
        return made

    def _hidden_token(self, output: TokenOutput) -> int:
        """The position of a stop token that ended the choice: it counts, but its text is not part of the answer."""
        if output.finish_reason is FinishReason.STOP and not self._include_stop:
            return len(output.token_ids) - 1
        return -1

    def _note(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self.num_tokens += 1
        self._token_ids.append(token_id)
        if logprobs is not None and self._offset_text is not None:
            self._logprobs.append(logprobs)
            self._offsets.append(self._num_characters)
            self._num_characters += len(self._offset_text.push(token_id))
            self.sum_logprobs += logprobs.logprob

    def _end(self, text: str, reason: str) -> Piece:
        if self._text.stopped is not None:
            surplus = self.num_tokens - self._text.stopped.num_tokens
            if surplus:
                del self._token_ids[-surplus:], self._logprobs[-surplus:], self._offsets[-surplus:]
            self.num_tokens -= surplus
        aside = self._text.take_aside()
        called = self._has_calls or any(isinstance(part, CallDelta) for part in aside)
        if reason == "stop" and called and not self._calls_are_a_stop:
            reason = "tool_calls"
        self.finish_reason = reason
        return self._take(text, reason, aside)

    def _take(self, text: str, finish_reason: str | None, aside: Sequence[Reasoning | CallDelta]) -> Piece:
        if aside:
            self._has_calls = self._has_calls or any(isinstance(part, CallDelta) for part in aside)
        if self._plain:
            return Piece(text, (), (), (), finish_reason, aside)
        piece = Piece(text, self._token_ids, self._logprobs, self._offsets, finish_reason, aside)
        self._token_ids, self._logprobs, self._offsets = [], [], []
        return piece
