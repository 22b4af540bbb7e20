"""Holds outputs to their grammars: compiles them beside the loop, and says before a step's sampling which tokens may come next.

Knows token ids and the bytes that they stand for; nothing of JSON schemas, HTTP, scheduling or devices. Whatever goes wrong
with a grammar is its own request's end.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import llguidance
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minserve.request import FinishReason, Grammar, Request, TokenOutput
from minserve.runtime.step import ScheduledStep

COMPILERS = 2
"""Threads that compile; one exploding grammar holds up half of them."""
COMPILE_SECONDS = 10.0
"""A request whose grammar takes longer ends; the compiler cannot be stopped, only left alone."""
MOST_KEPT = 64
"""Compiled grammars that are kept for further requests with the same text."""
STEP_FUEL, MOST_LEXER_STATES = 100_000, 50_000
"""Bounds of the work for one mask (about 7 ms) and of one grammar's memory (about 100 MB)."""
TOO_SLOW = "it takes too long to compile"
NO_WAY_ON = "no token of the model's vocabulary goes on with the grammar"

Words = npt.NDArray[np.uint32]


class TokenMasks(NamedTuple):
    """What the constrained rows of a step may sample."""

    rows: list[int]
    """Places among the step's sampling rows."""
    bits: Tensor
    """int32 [len(rows), ceil(vocab / 32)] on the host: bit i of word w says whether token 32 w + i may come."""


class _Waiting(NamedTuple):
    request: Request
    matcher: Future[llguidance.LLMatcher]
    deadline: float


class Grammars:
    """All of one engine's. Every method belongs to the engine's thread; only the compiling is elsewhere."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: the model's, which may be larger than the tokenizer's."""
        self._vocab_size = vocab_size
        self._num_words = vocab_size // 32 + 1  # room for one bit more: the end of the text
        self._pieces: list[bytes] = []
        self._tokenizer: llguidance.LLTokenizer | None = None
        # No thread is waited for: an engine that leaves ends its process, whatever grammar still explodes.
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="minserve-grammar")
        self._executor = llguidance.LLExecutor()
        self._limits = llguidance.LLParserLimits(
            step_lexer_fuel=STEP_FUEL, max_lexer_states=MOST_LEXER_STATES, verbose_errors=False
        )
        self._compiled: collections.OrderedDict[str, Future[llguidance.LLMatcher]] = collections.OrderedDict()
        self._waiting: dict[int, _Waiting] = {}
        self._live: dict[int, _Constraint] = {}
        self._failures: list[TokenOutput] = []
        self.num_masks = 0
        self.mask_seconds = 0.0
        """Time that steps spent on masks so far."""

    def set_vocabulary(self, pieces: Sequence[bytes], special_token_ids: Iterable[int]) -> None:
        """Each token's bytes; a special token has no text, a grammar names it by its id. Takes about a second for 128k tokens.

        All workers of a front may tell it; the first is believed.
        """
        if self._tokenizer is not None:
            return
        kept = [*pieces[: self._vocab_size], *([b""] * (self._vocab_size - len(pieces)))]
        special = sorted(token_id for token_id in special_token_ids if token_id < self._vocab_size)
        self._pieces = kept
        # The end of the text is a token of its own behind the vocabulary: its bit tells that the text may end here, whatever
        # tokens the request takes for an end.
        self._tokenizer = llguidance.LLTokenizer(_Vocabulary([*kept, b"<end of text>"], [*special, self._vocab_size]))

    # requests come and go

    def compile(self, request: Request) -> None:
        """Begin with a request's grammar; `settled` tells of the end."""
        text = _grammar_of(request).text
        future = self._compiled.get(text)
        if future is None:
            future = self._compiled[text] = self._compilers.submit(self._compile, text)
            if len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(text)
        self._waiting[request.id] = _Waiting(request, future, time.monotonic() + COMPILE_SECONDS)

    def _compile(self, text: str) -> llguidance.LLMatcher:
        """In a compiler's thread. The first mask, the dearest, is computed here too: what cannot be followed shows in it."""
        if self._tokenizer is None:
            raise ValueError("the tokenizer's vocabulary is not known")
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(_first_line(matcher.get_error()))
        return matcher

    @property
    def compiling(self) -> bool:
        """Whether a request still waits for its grammar."""
        return bool(self._waiting)

    def settled(self) -> tuple[list[Request], list[TokenOutput]]:
        """Requests whose grammars are ready now, and the ends of those whose never will be."""
        ready: list[Request] = []
        failed: list[TokenOutput] = []
        now = time.monotonic()
        for request, future, deadline in list(self._waiting.values()):
            if not future.done() and now < deadline:
                continue
            del self._waiting[request.id]
            error = future.exception() if future.done() else TOO_SLOW
            if error is None:
                self._live[request.id] = _Constraint(request, future.result().deep_copy(), self._pieces)
                ready.append(request)
            else:
                failed.append(_failure(request.id, str(error)))
        return ready, failed

    def forget(self, request_ids: Iterable[int]) -> None:
        """These requests have ended. Those without a grammar are no matter."""
        for request_id in request_ids:
            self._live.pop(request_id, None)
            self._waiting.pop(request_id, None)

    # steps

    def concern(self, step: ScheduledStep) -> bool:
        """Whether a row of the step may need a mask, once every earlier token is known."""
        return bool(self._live) and any(row.samples and row.request_id in self._live for row in step.rows)

    def masks(self, step: ScheduledStep) -> TokenMasks | None:
        """For the rows whose next token must match; None when there are none. Every earlier token must have been `advance`d.

        A row whose grammar leads nowhere is left free: its request is among the next `failures`.
        """
        if not self._live:
            return None
        sampling = (row for row in step.rows if row.samples)
        live = [(place, row.request_id, self._live.get(row.request_id)) for place, row in enumerate(sampling)]
        asked = [(place, request_id, one) for place, request_id, one in live if one is not None and one.holds]
        if not asked:
            return None
        began = time.perf_counter()
        bits = torch.zeros(len(asked), self._num_words, dtype=torch.int32)
        matchers = [(constraint.matcher, index) for index, (_, _, constraint) in enumerate(asked)]
        self._executor.unsafe_compute_mask_ptr(matchers, bits.data_ptr(), 4 * self._num_words, len(asked))
        words = bits.numpy().view(np.uint32)
        useful = [index for index, (_, own, one) in enumerate(asked) if self._finish_mask(own, one, words[index])]
        self.num_masks += len(asked)
        self.mask_seconds += time.perf_counter() - began
        return TokenMasks([asked[index][0] for index in useful], bits[useful]) if useful else None

    def _finish_mask(self, request_id: int, constraint: _Constraint, words: Words) -> bool:
        """Put the request's own ends into a mask; False when it allows nothing, and the request has to end."""
        end = self._vocab_size
        may_end = bool(words[end // 32] >> (end % 32) & 1)
        words[end // 32] &= (1 << end % 32) - 1
        allowed = list(constraint.stop_ids) if may_end else []
        if constraint.opened_by is not None:
            allowed.append(constraint.opened_by)
        for token_id in allowed:
            if 0 <= token_id < end:
                words[token_id // 32] |= 1 << token_id % 32
        error = _first_line(constraint.matcher.get_error()) if constraint.matcher.is_error() else ""
        if not error and words.any():
            return True
        self._failures.append(_failure(request_id, error or NO_WAY_ON))
        del self._live[request_id]
        return False

    def failures(self) -> list[TokenOutput]:
        """The ends of requests that `masks` could not serve, since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def advance(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Takes in what a step produced; what is to be told instead: a request may end here that goes on there."""
        if not self._live:
            return outputs
        return [told for output in outputs for told in self._advance(self._live.get(output.request_id), output)]

    def _advance(self, constraint: _Constraint | None, output: TokenOutput) -> list[TokenOutput]:
        told = [output]
        if constraint is None:
            return told
        if output.finish_reason is None:
            if not all(constraint.push(token_id) for token_id in output.token_ids):
                told = [_failure(output.request_id, _first_line(constraint.matcher.get_error()))]
            elif constraint.complete:
                # An output of its own: the text of a token that ends a request is not shown, and this one belongs to it.
                told.append(TokenOutput(request_id=output.request_id, finish_reason=FinishReason.STOP))
        if told[-1].finish_reason is not None:
            del self._live[output.request_id]
        return told


class _Constraint:
    """One request's place in its grammar."""

    def __init__(self, request: Request, matcher: llguidance.LLMatcher, pieces: Sequence[bytes]) -> None:
        grammar = _grammar_of(request)
        self.matcher = matcher
        self.stop_ids = request.sampling.stop_token_ids
        self.opened_by = grammar.opened_by if grammar.starts_after else None
        """Set as long as the first token is to come, where that one may begin a reasoning."""
        self.holds = not grammar.starts_after or self.opened_by is not None
        """Whether the next token must match."""
        self._pieces = pieces
        self._mark = grammar.starts_after.encode()
        self._tail = b""

    def push(self, token_id: int) -> bool:
        """Takes in a sampled token; False when the grammar does not allow it."""
        opens, self.opened_by = token_id == self.opened_by, None
        if opens:
            self.holds = False
        elif self.holds:
            return self.matcher.consume_token(token_id)
        else:
            self._tail = self._tail[1 - len(self._mark) :] + self._pieces[token_id]
            self.holds = self._mark in self._tail
        return True

    @property
    def complete(self) -> bool:
        """The text matches, and nothing can be added to it."""
        return self.holds and self.matcher.is_stopped() and not self.matcher.is_error()


class _Vocabulary(llguidance.TokenizerWrapper):
    """A tokenizer as llguidance takes it. Masks need no encoding."""

    def __init__(self, tokens: list[bytes], special_token_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = len(tokens) - 1
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:  # noqa: ARG002
        return []


def _grammar_of(request: Request) -> Grammar:
    if request.sampling.grammar is None:
        raise ValueError(f"request {request.id} has no grammar")
    return request.sampling.grammar


def _failure(request_id: int, reason: str) -> TokenOutput:
    error = f"the grammar cannot be followed: {reason}"
    return TokenOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=error, is_bad_request=True)


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0][:300]
