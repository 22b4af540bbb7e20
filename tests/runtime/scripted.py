"""A model runner without a model: the next token is a hash of the whole prefix, read through the pages.

A wrong page, a stale table, a missing write or a dropped token changes every token after it.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from minserve.request import FinishReason, Request, SamplingParams, TokenLogprobs, TokenOutput
from minserve.runtime.scheduler import Limits, Scheduler
from minserve.runtime.step import RowResult, ScheduledRow, ScheduledStep, StepResult

VOCAB = 50


def next_token(prefix: Iterable[object]) -> int:
    return zlib.crc32(repr(list(prefix)).encode()) % VOCAB


def request(
    request_id: int,
    prompt: Sequence[int],
    max_tokens: int,
    stop: tuple[int, ...] = (),
    prompt_logprobs: int | None = None,
    min_tokens: int = 0,
    logprobs: int | None = None,
) -> Request:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=0,
        temperature=0.0,
        stop_token_ids=stop,
        prompt_logprobs=prompt_logprobs,
        min_tokens=min_tokens,
        logprobs=logprobs,
    )
    return Request(id=request_id, prompt_token_ids=list(prompt), sampling=sampling, arrival_time=0.0)


def expected(asked: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What the request must answer, whatever happens around it."""
    tokens = list(asked.prompt_token_ids)
    most = min(asked.sampling.max_tokens, max_model_len - len(tokens))
    outputs: list[int] = []
    while len(outputs) < most:
        outputs.append(next_token(enumerate(tokens + outputs)))
        if outputs[-1] in asked.sampling.stop_token_ids and len(outputs) > asked.sampling.min_tokens:
            return outputs, FinishReason.STOP
    return outputs, FinishReason.LENGTH


class Launched:
    """A step whose work waits for its result to be asked for."""

    def __init__(self, step: ScheduledStep, result: Callable[[], StepResult]) -> None:
        self.step = step
        self.result = result


class ScriptedRunner:
    """Works a step only when its result is asked for, as a device does behind its queue."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.kv: dict[tuple[int, int], tuple[int, int]] = {}
        self.tables: dict[int, list[int]] = collections.defaultdict(list)
        self.last_tokens: dict[int, int] = {}
        self.steps: list[ScheduledStep] = []
        self.failing: dict[int, int] = {}
        """Request to length: its rows that reach that length end with an error."""

    def launch(self, step: ScheduledStep) -> Launched:
        assert step.num_tokens == sum(row.num_tokens for row in step.rows) <= self.limits.max_step_tokens
        assert [bool(row.token_ids) for row in step.rows] == sorted(bool(row.token_ids) for row in step.rows)
        assert step.num_decode_rows == sum(not row.token_ids for row in step.rows)
        assert len({row.slot for row in step.rows}) == len(step.rows)
        assert all(0 <= row.slot < self.limits.max_num_seqs for row in step.rows)
        self.steps.append(step)
        return Launched(step, lambda: self._work(step))

    def _work(self, step: ScheduledStep) -> StepResult:
        written: set[tuple[int, int]] = set()
        for row in step.rows:
            if row.table_offset == 0:
                self.tables[row.slot] = []
            assert len(self.tables[row.slot]) == row.table_offset
            self.tables[row.slot].extend(row.new_pages)
            for position, token in enumerate(row.token_ids or (self.last_tokens[row.slot],), row.start):
                place = self._place(row, position)
                if position >= row.write_from:
                    assert place[0] != 0
                    assert place not in written, "two rows of a step write to one place"
                    written.add(place)
                    self.kv[place] = (position, token)
        results = tuple(self._result(row) for row in step.rows)
        return StepResult(rows=results, eager_reason="scripted" if step.num_decode_rows == len(step.rows) else None)

    def _place(self, row: ScheduledRow, position: int) -> tuple[int, int]:
        page_size = self.limits.page_size
        return self.tables[row.slot][position // page_size], position % page_size

    def _read(self, row: ScheduledRow, length: int) -> list[tuple[int, int] | None]:
        return [self.kv.get(self._place(row, position)) for position in range(length)]

    def _result(self, row: ScheduledRow) -> RowResult:
        scored = []
        for index, token in enumerate(row.scored_ids):
            position = row.start + row.scored_offset + index
            assert row.scored_offset + index < row.num_tokens
            scored.append(score(self._read(row, position + 1), token))
        token_id = None
        if row.samples:
            token_id = self.last_tokens[row.slot] = next_token(self._read(row, row.start + row.num_tokens))
        if row.start + row.num_tokens >= self.failing.get(row.request_id, 1 << 30):
            return RowResult(error="broken on purpose")
        return RowResult(token_id=token_id, scored=tuple(scored))


def score(prefix: Iterable[object], token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -float(next_token(prefix)), 1, (), ())


class Loop:
    """The engine's loop without its socket: one step in flight while the next is made."""

    def __init__(self, limits: Limits, runner: Any = None) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.runner = runner or ScriptedRunner(limits)
        self.in_flight: Any = None
        self.results: list[StepResult] = []
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.outputs: dict[int, list[TokenOutput]] = collections.defaultdict(list)

    def add(self, asked: Request) -> None:
        self.requests[asked.id] = asked
        self.tokens[asked.id] = []
        output = self.scheduler.add(asked)
        if output is not None:
            self._collect(output)

    def drop(self, request_id: int) -> None:
        self.scheduler.drop([request_id])

    def turn(self) -> bool:
        """One turn of the loop; False when nothing was left to do."""
        step = self.scheduler.schedule()
        launched = self.runner.launch(step) if step is not None else None
        retiring, self.in_flight = self.in_flight, launched
        if retiring is not None:
            self.results.append(retiring.result())
            for output in self.scheduler.retire(retiring.step, self.results[-1]):
                self._collect(output)
        return retiring is not None or launched is not None

    def run(self) -> None:
        for _ in range(20_000):
            if not self.turn():
                assert not self.scheduler.has_work, "work is left and no step comes"
                return
        raise AssertionError("the requests do not come to an end")

    def _collect(self, output: TokenOutput) -> None:
        assert output.request_id not in self.reasons, "an output after the end"
        self.outputs[output.request_id].append(output)
        self.tokens[output.request_id].extend(output.token_ids)
        if output.finish_reason is not None:
            self.reasons[output.request_id] = output.finish_reason

    def check_answer(self, request_id: int) -> None:
        tokens, reason = expected(self.requests[request_id], self.limits.max_model_len)
        assert self.tokens[request_id] == tokens
        assert self.reasons[request_id] is reason

    def check_at_rest(self) -> None:
        """Nothing runs: every page is free or idle, each exactly once, every slot is back."""
        scheduler = self.scheduler
        allocator = scheduler.pages
        assert scheduler.stats().num_running == scheduler.stats().num_waiting == 0
        assert allocator.used == 0
        assert allocator.available == self.limits.num_pages
        assert all(allocator._users[page] == 0 for page in range(1, self.limits.num_pages + 1))
        assert sorted(scheduler._free_slots) == list(range(self.limits.max_num_seqs))
        assert not scheduler._leaving
        allocator.flush()
        assert sorted(allocator._free) == list(range(1, self.limits.num_pages + 1))


def make_limits(**changes: int | bool) -> Limits:
    values: dict[str, int | bool] = {
        "max_num_seqs": 4,
        "chunked_prefill_size": 16,
        "page_size": 4,
        "num_pages": 32,
        "max_model_len": 64,
        "vocab_size": VOCAB,
    }
    return Limits(**(values | changes))  # type: ignore[arg-type]
