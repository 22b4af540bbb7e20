"""What the next step shall do, who holds which pages, and what a retired step means.

Plain integers: knows no tensors, sockets or clocks. Steps are scheduled before the results of the one in flight are known:
rows of requests that turn out to have ended are dropped when they retire, and pages go back only after the last step that
touches them has retired.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator

import msgspec

from minserve.config import Config
from minserve.messages import StepStats
from minserve.request import FinishReason, Request, TokenOutput
from minserve.runtime.page_allocator import PageAllocator
from minserve.runtime.prefill_pace import PrefillPace
from minserve.runtime.prefix_cache import PrefixCache
from minserve.runtime.sequence import Phase, Sequence
from minserve.runtime.step import RowResult, ScheduledRow, ScheduledStep, StepResult


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The ceilings of one engine."""

    max_num_seqs: int
    chunked_prefill_size: int
    page_size: int
    num_pages: int
    max_model_len: int
    """At most num_pages * page_size, so that any one request fits alone."""
    vocab_size: int
    enable_prefix_caching: bool = True
    prefill_step_ratio: float = 2.0
    """A step that reads prompts beside decode rows may take this many times what the decode rows take alone."""
    prefill_floor_seconds: float = 0.0
    """Or so long, where that is more."""
    mixed_sizes: tuple[int, ...] = ()
    """Tokens to which steps that read prompts are padded, ascending; none: they are not."""

    @classmethod
    def of(cls, config: Config, vocab_size: int, num_pages: int, max_model_len: int) -> Limits:
        """What the config says, with what only the start finds out."""
        return cls(
            max_num_seqs=config.max_num_seqs,
            chunked_prefill_size=config.chunked_prefill_size,
            page_size=config.page_size,
            num_pages=num_pages,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            enable_prefix_caching=config.enable_prefix_caching,
            prefill_step_ratio=config.prefill_step_ratio,
        )

    @property
    def max_step_tokens(self) -> int:
        """Decode rows always ride, and a prompt always gets a token: the larger of the two ceilings."""
        return max(self.chunked_prefill_size, self.max_num_seqs)


class Scheduler:
    """Requests in order of arrival: the older ones run, the younger ones wait; the youngest is preempted first."""

    def __init__(self, limits: Limits) -> None:
        if limits.max_model_len > limits.num_pages * limits.page_size:
            raise ValueError("max_model_len is more than the pages hold")
        self.limits = limits
        self.pages = PageAllocator(limits.num_pages, PrefixCache())
        self._pace = PrefillPace(
            limits.prefill_step_ratio, limits.chunked_prefill_size, limits.prefill_floor_seconds, limits.mixed_sizes
        )
        self._sequences: dict[int, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._leaving: collections.deque[tuple[int, list[int], int | None]] = collections.deque()
        """(step, pages, slot): given back when that step retires."""
        self._scheduled_step = 0
        self._retired_step = 0
        self._prefix_queries = self._prefix_hits = self._preemptions = 0
        self._mixed_steps = self._nan_rows = self._dummy_steps = 0
        self._eager_decode_steps: collections.Counter[str] = collections.Counter()
        self._graph_replays: collections.Counter[int] = collections.Counter()

    # requests come and go

    def add(self, request: Request) -> TokenOutput | None:
        """Queue a request; the answer that ends it at once when it cannot run."""
        error = self._refusal(request)
        if error is not None:
            return TokenOutput(request_id=request.id, finish_reason=FinishReason.ERROR, error=error)
        sequence = Sequence(request, self.limits.max_model_len)
        self._sequences[request.id] = sequence
        self._waiting.append(sequence)
        return None

    def _refusal(self, request: Request) -> str | None:
        """The front validates for people; this keeps a faulty front from harming the other requests."""
        length, limits = len(request.prompt_token_ids), self.limits
        if request.id in self._sequences:
            return f"request id {request.id} is in use"
        if length == 0:
            return "the prompt is empty"
        if length >= limits.max_model_len:
            return f"the prompt has {length} tokens; the model's context is {limits.max_model_len}"
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < limits.vocab_size:
            return f"the prompt holds a token id outside the vocabulary of {limits.vocab_size}"
        if request.sampling.max_tokens < 0:
            return f"max_tokens is {request.sampling.max_tokens}"
        return None

    def drop(self, request_ids: Iterable[int]) -> None:
        """End requests without an answer: aborted, or finished by the front. Unknown ids have ended already."""
        for request_id in request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                self._end(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether the next step could read prompts that have not come yet."""
        budget = self._budget(sum(sequence.decodes for sequence in self._running))
        return self._readable(self._reading(), budget) < budget

    # the next step

    def schedule(self, now: float = 0.0, most_tokens: int | None = None) -> ScheduledStep | None:
        """The next step, or None when nothing can run before the step in flight has retired.

        `now` is on the clock of the requests' `arrival_time`; `most_tokens` is a limit for this step's, and no decode row's.
        """
        number = self._scheduled_step + 1
        rows = list(self._decode_rows(number))
        num_decode_rows = len(rows)
        budget = self._budget(num_decode_rows)
        if most_tokens is not None:
            budget = min(budget, max(0, most_tokens - num_decode_rows))
        if budget:
            reading = self._reading()
            budget = self._pace.worth_reading(num_decode_rows, self._readable(reading, budget))
            rows.extend(self._prompt_rows(number, reading, budget, now))
        if not rows:
            return None
        self._scheduled_step = number
        step = ScheduledStep.of(number, rows, num_decode_rows)
        self._pace.scheduled(num_decode_rows, step.num_tokens - num_decode_rows)
        return step

    def _decode_rows(self, step: int) -> Iterator[ScheduledRow]:
        """One token for every request that can decode, oldest first, so that a preempted one has no row yet."""
        for sequence in self._running.copy():
            if sequence.phase is Phase.RUNNING and sequence.decodes and self._has_page_for_next(sequence):
                yield sequence.take_row(step, 1, from_device=True)

    def _has_page_for_next(self, sequence: Sequence) -> bool:
        """Make room for the next token, preempting younger requests; False when this one has to sit out."""
        if sequence.position < len(sequence.pages) * self.limits.page_size:
            return True
        while self.pages.available == 0:
            if self._pages_will_return():
                return False
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.pages.extend(self.pages.allocate(1))
        return True

    def _pages_will_return(self) -> bool:
        """Whether the step in flight frees pages when it retires: preempting more would be for nothing."""
        held = any(pages for _, pages, _ in self._leaving)
        return held or any(s.remaining == 0 and s.last_step > self._retired_step for s in self._running)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue, to be computed again from the start. It keeps its slot and what is sampled there."""
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)
        sequence.phase = Phase.WAITING
        sequence.num_preemptions += 1
        self._preemptions += 1
        self._give_back(sequence.last_step, sequence.forget_pages(), None)

    # prompts

    def _budget(self, num_decode_rows: int) -> int:
        """Prompt tokens that may ride with so many decode rows."""
        return min(max(1, self.limits.chunked_prefill_size - num_decode_rows), self._pace.tokens(num_decode_rows))

    def _reading(self) -> list[Sequence]:
        """Those that run and still read their prompts, in order of arrival."""
        return [sequence for sequence in self._running if sequence.remaining and not sequence.decodes]

    def _readable(self, reading: list[Sequence], most: int) -> int:
        """Prompt tokens that are there to be read, up to `most`; what the prefix cache has of those that wait included."""
        there = 0
        for sequence in itertools.chain(reading, self._waiting):
            there += sequence.remaining
            if there >= most:
                return most
        return there

    def _prompt_rows(self, step: int, reading: list[Sequence], budget: int, now: float) -> Iterator[ScheduledRow]:
        """Share `budget` tokens between prompts: a short one is not held up by long ones, the oldest always gets on.

        The oldest takes what it needs if that ends it, else half. The rest goes to the shortest first, waiting requests
        included, which are admitted in their order. What nobody else can use goes to the oldest.
        """
        oldest = reading[0] if reading else None
        others = sorted(reading[1:], key=lambda s: s.remaining)
        shares: list[tuple[Sequence, int]] = []
        left = budget
        reserved = 0
        if oldest is not None:
            reserved = oldest.remaining if oldest.remaining <= left else (left + 1) // 2
            left -= reserved
        may_admit = True
        while left > 0:
            sequence = None
            if may_admit and self._waiting and (not others or len(self._waiting[0].tokens) < others[0].remaining):
                sequence = self._admit()
                may_admit = sequence is not None
            if sequence is None and others:
                sequence = others.pop(0)
            if sequence is not None:
                share = min(sequence.remaining, left)
                shares.append((sequence, share))
                left -= share
            elif not may_admit or not self._waiting:
                break
        if oldest is not None:
            shares.insert(0, (oldest, min(oldest.remaining, reserved + left)))
        for sequence, share in shares:
            if sequence.queue_seconds is None:
                sequence.queue_seconds = max(0.0, now - sequence.request.arrival_time)
            yield sequence.take_row(step, share)

    def _admit(self) -> Sequence | None:
        """The head of the queue with pages for its whole context so far; None when it has to wait."""
        sequence = self._waiting[0]
        if sequence.last_step > self._retired_step:
            return None  # just preempted: the step in flight will tell its newest token
        if sequence.slot is None and not self._free_slots:
            return None
        matched = self._match_prefix(sequence)
        # Shared first, counted second: an idle page that is matched is no longer available.
        self.pages.share(matched)
        missing = self._pages_for(len(sequence.tokens)) - len(matched)
        if not self._fits(sequence, missing):
            self.pages.release(matched)
            return None
        self._waiting.popleft()
        self._running.append(sequence)
        sequence.phase = Phase.RUNNING
        sequence.pages = matched + self.pages.allocate(missing)
        sequence.num_findable = len(matched)
        sequence.write_from = len(matched) * self.limits.page_size
        sequence.position = min(sequence.write_from, sequence.reusable_length())
        if sequence.slot is None:
            sequence.slot = self._free_slots.pop()
        if not sequence.num_preemptions and self.limits.enable_prefix_caching and not sequence.wants_scores:
            self._prefix_queries += sequence.num_prompt
            self._prefix_hits += sequence.position
        sequence.cached_tokens = min(sequence.position, sequence.num_prompt)  # as of the run that gives the first answer
        return sequence

    def _match_prefix(self, sequence: Sequence) -> list[int]:
        if not self.limits.enable_prefix_caching:
            return []
        page_size = self.limits.page_size
        whole_pages = len(sequence.tokens) // page_size
        wanted = min(whole_pages, self._pages_for(sequence.reusable_length()))
        return self.pages.cache.lookup(sequence.page_hashes(wanted, page_size))

    def _fits(self, candidate: Sequence, missing: int) -> bool:
        """Whether the candidate may start without being preempted soon.

        The running ones, itself included, must be able to grow by a page's worth of tokens, and by one more for each time
        that the candidate was preempted: so the work thrown away stays small against the work done.
        """
        available = self.pages.available - missing
        if available < 0:
            return False
        if not self._running:
            return True
        horizon = self.limits.page_size * (1 + candidate.num_preemptions)
        growth = sum(self._growth(s, horizon) - len(s.pages) for s in self._running)
        own = self._growth(candidate, horizon) - self._pages_for(len(candidate.tokens))
        return growth + own <= available

    def _growth(self, sequence: Sequence, horizon: int) -> int:
        """Pages once it is `horizon` tokens longer, or at its end. The last token's KV is never stored."""
        longest = max(sequence.final_length - 1, sequence.num_prompt)
        return self._pages_for(min(longest, sequence.total + horizon))

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.page_size)

    # results

    def retire(self, step: ScheduledStep, result: StepResult) -> list[TokenOutput]:
        """Take in what a step produced. Steps retire in the order in which they were scheduled; dummies are only counted."""
        if step.is_dummy:
            self._dummy_steps += 1
            return []
        self._retired_step = step.number
        self._count(step, result)
        outputs = []
        for row, row_result in zip(step.rows, result.rows, strict=True):
            sequence = self._sequences.get(row.request_id)
            if sequence is not None:
                output = self._take(sequence, row, row_result)
                if output is not None:
                    outputs.append(output)
        while self._leaving and self._leaving[0][0] <= self._retired_step:
            _, pages, slot = self._leaving.popleft()
            self._free(pages, slot)
        return outputs

    def _take(self, sequence: Sequence, row: ScheduledRow, result: RowResult) -> TokenOutput | None:
        if result.error is not None:
            # What it computed itself may be wrong; what it found in the cache served others well.
            self.pages.distrust(sequence.hashes[sequence.write_from // self.limits.page_size :])
            self._end(sequence)
            return TokenOutput(request_id=row.request_id, finish_reason=FinishReason.ERROR, error=result.error)
        output = sequence.take_result(row, result)
        if sequence.phase is Phase.RUNNING:
            self._offer_pages(sequence, row.start + row.num_tokens)
        if output is not None and output.finish_reason is not None:
            self._end(sequence)
        return output

    def _offer_pages(self, sequence: Sequence, computed: int) -> None:
        """Let others find the whole pages below position `computed`: their KV is there and their tokens are known."""
        if not self.limits.enable_prefix_caching:
            return
        whole = computed // self.limits.page_size
        if whole > sequence.num_findable:
            hashes = sequence.page_hashes(whole, self.limits.page_size)
            for index in range(sequence.num_findable, whole):
                self.pages.cache.register(hashes[index], sequence.pages[index])
            sequence.num_findable = whole

    def _end(self, sequence: Sequence) -> None:
        """Out of every list; pages and slot follow when the last step that carries it has retired."""
        (self._running if sequence.phase is Phase.RUNNING else self._waiting).remove(sequence)
        sequence.phase = Phase.GONE
        del self._sequences[sequence.request.id]
        self._give_back(sequence.last_step, sequence.forget_pages(), sequence.slot)

    def _give_back(self, after_step: int, pages: list[int], slot: int | None) -> None:
        if after_step <= self._retired_step:
            self._free(pages, slot)
        else:
            self._leaving.append((after_step, pages, slot))

    def _free(self, pages: list[int], slot: int | None) -> None:
        self.pages.release(pages)
        if slot is not None:
            self._free_slots.append(slot)

    def _count(self, step: ScheduledStep, result: StepResult) -> None:
        if result.seconds is not None:
            self._pace.measured(step.num_decode_rows, step.num_tokens - step.num_decode_rows, result.seconds)
        self._nan_rows += result.nan_rows
        self._mixed_steps += not step.decodes_only
        if result.graph_size is not None:
            self._graph_replays[result.graph_size] += 1
        if result.eager_reason is not None:
            self._eager_decode_steps[result.eager_reason] += 1

    def stats(self) -> StepStats:
        return StepStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            used_pages=self.pages.used,
            prefix_cache_queries=self._prefix_queries,
            prefix_cache_hits=self._prefix_hits,
            num_preemptions=self._preemptions,
            steps=self._retired_step,
            eager_decode_steps=dict(self._eager_decode_steps),
            mixed_steps=self._mixed_steps,
            graph_replays=dict(self._graph_replays),
            nan_rows=self._nan_rows,
            dummy_steps=self._dummy_steps,
        )
