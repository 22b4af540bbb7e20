"""A request's lasting state inside the engine: its tokens, pages, and how far it has been scheduled.

Knows the arithmetic of one request; nothing of its neighbours, of who owns pages, or of tensors.
"""

from __future__ import annotations

import enum

from minserve.request import FinishReason, Request, TokenLogprobs, TokenOutput
from minserve.runtime.prefix_cache import CHAIN_START, page_hash
from minserve.runtime.step import RowResult, ScheduledRow, SlotSetup


class Phase(enum.Enum):
    WAITING = enum.auto()
    """Holds no pages; new, or preempted."""
    RUNNING = enum.auto()
    GONE = enum.auto()
    """Finished or aborted; a step in flight may still carry it, and its result is dropped."""


class Sequence:
    """Counts here look ahead: they include what steps in flight will have done once they retire."""

    def __init__(self, request: Request, max_model_len: int) -> None:
        sampling = request.sampling
        self.request = request
        self.tokens = list(request.prompt_token_ids)
        """Prompt and known output tokens."""
        self.num_prompt = len(self.tokens)
        self.final_length = min(self.num_prompt + sampling.max_tokens, max_model_len)
        """The length at which the request ends at the latest."""
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.phase = Phase.WAITING
        self.slot: int | None = None
        self.pages: list[int] = []
        self.hashes: list[bytes] = []
        """Of the whole pages of `tokens`, as far as they were needed."""
        self.num_findable = 0
        """Leading pages that came from the prefix cache or were offered to it."""
        self.pending = 0
        """Tokens that steps in flight will sample."""
        self.position = 0
        """Tokens whose computation is scheduled since the last admission: the next position to compute."""
        self.write_from = 0
        self.told_pages = 0
        """Pages the runner knows of."""
        self.told_setup = False
        self.queue_seconds: float | None = None
        self.last_step = 0
        """Number of the last step that carries this request."""
        self.num_preemptions = 0
        self.cached_tokens = 0
        self.answered = False
        self.num_scoring = 0
        """Prompt positions whose prediction was scheduled to be scored; steps in flight included."""
        self.scored: list[TokenLogprobs | None] = [None]

    @property
    def total(self) -> int:
        """Length once the steps in flight have retired."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 when all that will ever be needed is scheduled."""
        if self.total >= self.final_length > self.num_prompt:
            return 0  # the last token's own KV is never read
        return self.total - self.position

    @property
    def decodes(self) -> bool:
        """All that is left to compute is the last sampled token."""
        return self.total > self.num_prompt and self.remaining == 1

    @property
    def wants_scores(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None and self.num_scoring < self.num_prompt - 1

    def reusable_length(self) -> int:
        """Tokens of a cached prefix that may be used: not the last one, whose logits are needed, nor prompt yet to be scored."""
        return self.num_scoring if self.wants_scores else len(self.tokens) - 1

    def page_hashes(self, num_pages: int, page_size: int) -> list[bytes]:
        """Hashes of the first `num_pages` whole pages of the known tokens."""
        while len(self.hashes) < num_pages:
            start = len(self.hashes) * page_size
            previous = self.hashes[-1] if self.hashes else CHAIN_START
            self.hashes.append(page_hash(previous, self.tokens[start : start + page_size]))
        return self.hashes[:num_pages]

    def take_row(self, step: int, num_tokens: int, *, from_device: bool = False) -> ScheduledRow:
        """The row for the next `num_tokens` tokens, which count as scheduled from now on. Their pages must be there.

        `from_device`: the one token is the slot's last sampled one, which the host need not know yet.
        """
        sampling = self.request.sampling
        start, end = self.position, self.position + num_tokens
        samples = end == self.total and end < self.final_length
        first_scored, last_scored = max(start, self.num_scoring), min(end, self.num_prompt - 1)
        scores = self.wants_scores and first_scored < last_scored
        row = ScheduledRow(
            request_id=self.request.id,
            slot=-1 if self.slot is None else self.slot,
            start=start,
            num_tokens=num_tokens,
            token_ids=() if from_device else tuple(self.tokens[start:end]),
            table_offset=self.told_pages,
            new_pages=tuple(self.pages[self.told_pages :]),
            write_from=self.write_from,
            samples=samples,
            logprobs=sampling.logprobs if samples else None,
            scored_ids=tuple(self.tokens[first_scored + 1 : last_scored + 1]) if scores else (),
            scored_offset=first_scored - start if scores else 0,
            scored_top=sampling.prompt_logprobs or 0,
            setup=None if self.told_setup else SlotSetup(sampling, self.request.prompt_token_ids),
        )
        if scores:
            self.num_scoring = last_scored
        self.position = end
        self.pending += samples
        self.told_pages = len(self.pages)
        self.told_setup = True
        self.last_step = step
        return row

    def forget_pages(self) -> list[int]:
        """Start over from the first token: the pages it held, which the caller gives back."""
        pages, self.pages = self.pages, []
        self.position = self.write_from = self.told_pages = 0
        return pages

    def take_result(self, row: ScheduledRow, result: RowResult) -> TokenOutput | None:
        """Append what a retired row produced; the message for the front, None when there is nothing to tell."""
        self.scored.extend(result.scored)
        if result.token_id is not None:
            self.pending -= 1
            self.tokens.append(result.token_id)
        reason = self._finish_reason(row, result.token_id)
        if result.token_id is None and reason is None:
            return None
        first, self.answered = not self.answered, True
        return TokenOutput(
            request_id=self.request.id,
            token_ids=() if result.token_id is None else (result.token_id,),
            logprobs=() if result.logprobs is None else (result.logprobs,),
            prompt_logprobs=tuple(self.scored) if first and self.request.sampling.prompt_logprobs is not None else None,
            finish_reason=reason,
            cached_tokens=self.cached_tokens if first else 0,
            queue_seconds=self.queue_seconds if first else None,
        )

    def _finish_reason(self, row: ScheduledRow, token_id: int | None) -> FinishReason | None:
        if token_id is None:  # without an output token only a request for none of them can be through
            through = self.final_length == self.num_prompt == row.start + row.num_tokens
            return FinishReason.LENGTH if through else None
        if token_id in self.stop_ids and len(self.tokens) - self.num_prompt > self.request.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.final_length else None
