"""Prompts beside decode rows: how long steps take on machines of several kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minserve.request import Request, SamplingParams
from minserve.runtime.cuda_graph import mixed_sizes
from minserve.runtime.prefill_pace import BEYOND_LEAST, LEAST_TOKENS, REFRESH_STEPS, PrefillPace
from minserve.runtime.scheduler import Scheduler
from minserve.runtime.step import RowResult, StepResult
from tests.runtime.scripted import make_limits

MOST = 2048
Machine = Callable[[int], float]
"""Prompt tokens beside decode rows to seconds."""


def run(machine: Machine, steps: int, *, rows: int = 8, ratio: float = 2.0, pace: PrefillPace | None = None) -> list[int]:
    """The prompt tokens of each step while there is more prompt than can be read; results come one step late."""
    pace = pace or PrefillPace(ratio, MOST)
    pace.measured(rows, 0, machine(0))
    chosen: list[int] = []
    for _ in range(steps):
        tokens = pace.tokens(rows)
        pace.scheduled(rows, tokens)
        if chosen:
            pace.measured(rows, chosen[-1], machine(chosen[-1]))
        chosen.append(tokens)
    return chosen


@pytest.mark.parametrize("ratio", [1.5, 2.0, 4.0])
def test_steps_with_prompts_stay_within_the_ratio_and_use_it(ratio: float) -> None:
    def machine(tokens: int) -> float:
        return 0.016 + 0.0001 * tokens

    chosen = run(machine, 200, ratio=ratio)
    mixed = [machine(tokens) / machine(0) for tokens in chosen if tokens]
    assert max(mixed) <= ratio
    assert sum(mixed[20:]) / len(mixed[20:]) > 0.8 * ratio


@pytest.mark.parametrize("decode_seconds", [0.004, 0.02])
def test_a_floor_is_allowed_however_fast_decode_rows_are(decode_seconds: float) -> None:
    """As on a GPU, where the first prompt token reads nearly all experts."""

    def machine(tokens: int) -> float:
        return max(decode_seconds, 0.014) + 1e-5 * tokens if tokens else decode_seconds

    chosen = run(machine, 200, pace=PrefillPace(2.0, MOST, floor_seconds=0.03))
    mixed = [machine(tokens) for tokens in chosen if tokens]
    assert max(mixed) <= max(0.03, 2 * decode_seconds)
    assert sum(mixed[20:]) / len(mixed[20:]) > 0.8 * max(0.03, 2 * decode_seconds)


def test_steps_are_as_large_as_they_are_padded() -> None:
    """A machine that takes as long for a padded step as for a full one: no step is padded while prompts abound."""
    sizes = (256, 512, 1024, 1536, 2048)

    def machine(tokens: int) -> float:
        return 0.02 + 2e-5 * next(size for size in sizes if size >= tokens + 8) if tokens else 0.02

    chosen = run(machine, 200, pace=PrefillPace(2.0, MOST, 0.06, sizes))
    assert {tokens + 8 for tokens in chosen if tokens} <= set(sizes)
    assert chosen.count(1528) > 150  # 2,048 take longer than allowed, 1,536 do not


@pytest.mark.parametrize(
    ("rows", "there", "read"),
    [
        *((0, 8192, 8192), (0, 7169, 7169), (0, 7168, 4096), (0, 4097, 4096), (0, 4096, 4096), (0, 3100, 3100), (0, 10, 10)),
        *((100, 6968, 3996), (100, 6969, 6969), (300, 3796, 3796), (4096, 900, 900)),
    ],
)
def test_prompts_that_would_be_much_padding_are_two_steps(rows: int, there: int, read: int) -> None:
    """The second one holds the decode rows again."""
    assert PrefillPace(2.0, 8192, step_sizes=mixed_sizes(8192)).worth_reading(rows, there) == read


def test_without_padding_all_is_read_at_once() -> None:
    assert PrefillPace(2.0, MOST).worth_reading(0, 1500) == 1500


def test_the_scheduler_reads_the_rest_of_a_burst_without_much_padding() -> None:
    limits = make_limits(
        num_pages=1 << 12, max_model_len=1 << 12, chunked_prefill_size=MOST, max_num_seqs=8, mixed_sizes=(256, 512, MOST)
    )
    scheduler = Scheduler(limits)
    for number in range(4):
        once = SamplingParams(max_tokens=1, seed=0)
        scheduler.add(Request(id=number, prompt_token_ids=[number] * 650, sampling=once, arrival_time=0.0))
    sizes = []
    while (step := scheduler.schedule()) is not None:
        sizes.append(step.num_tokens)
        scheduler.retire(step, StepResult(rows=tuple(RowResult(token_id=3 if row.samples else None) for row in step.rows)))
    assert sizes == [2048, 512, 40]


def test_a_fast_reader_soon_gets_whole_chunks() -> None:
    chosen = run(lambda tokens: 0.01 + 1e-6 * tokens, 30)
    assert chosen[-1] == MOST
    assert chosen.index(MOST) < 25


def test_pieces_shrink_as_the_context_grows() -> None:
    pace = PrefillPace(2.0, MOST)
    run(lambda tokens: 0.01 + 1e-5 * tokens, 40, pace=pace)
    later = run(lambda tokens: 0.01 + 1e-4 * tokens, 20, pace=pace)
    assert all(1e-4 * tokens <= 0.01 for tokens in later[4:])


def test_where_any_prompt_costs_much_the_pieces_are_not_the_least() -> None:
    def machine(tokens: int) -> float:
        return 0.01 + (0.03 + 1e-5 * tokens if tokens else 0)

    chosen = run(machine, 100)
    least = machine(LEAST_TOKENS)
    assert max(chosen[60:]) > 20 * LEAST_TOKENS
    assert all(machine(tokens) <= 1.01 * BEYOND_LEAST * least for tokens in chosen[60:])


def test_one_pause_of_the_machine_does_not_loosen_the_ratio() -> None:
    pace = PrefillPace(2.0, MOST)
    pace.measured(8, 0, 0.01)
    pace.measured(8, 64, 5.0)
    pace.measured(8, 16, 5.0)
    chosen = run(lambda tokens: 0.01 + 1e-4 * tokens, 100, pace=pace)
    assert all(1e-4 * tokens <= 0.01 for tokens in chosen)


def test_a_slow_reader_still_gets_on() -> None:
    chosen = run(lambda tokens: 0.01 + 0.01 * tokens, 100)
    assert all(tokens == 0 or tokens >= LEAST_TOKENS for tokens in chosen)
    assert sum(tokens == 0 for tokens in chosen) <= 100 / REFRESH_STEPS + 1


def test_the_decode_step_is_measured_anew_while_prompts_are_read() -> None:
    chosen = run(lambda tokens: 0.01 + 1e-5 * tokens, 3 * REFRESH_STEPS)
    assert 0 in chosen[REFRESH_STEPS:]


def test_a_batch_of_another_size_is_measured_before_prompts_join_it() -> None:
    pace = PrefillPace(2.0, MOST)
    pace.measured(2, 0, 0.01)
    assert pace.tokens(2) > 0
    assert pace.tokens(16) == 0
    pace.measured(16, 0, 0.02)
    assert pace.tokens(16) > 0


def test_prompts_alone_are_not_paced() -> None:
    pace = PrefillPace(2.0, MOST)
    pace.measured(4, 0, 0.001)
    pace.measured(4, 64, 10.0)
    assert pace.tokens(0) == MOST
    assert pace.tokens(4) == LEAST_TOKENS


def test_a_small_chunk_is_never_exceeded() -> None:
    assert set(run(lambda _: 0.01, 40, pace=PrefillPace(2.0, 4))) <= {0, 4}


def test_the_scheduler_keeps_a_long_prompt_from_stretching_decode_steps() -> None:
    scheduler = Scheduler(make_limits(num_pages=1 << 12, max_model_len=1 << 12, chunked_prefill_size=MOST, max_num_seqs=8))
    scheduler.add(Request(id=1, prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=500, seed=0), arrival_time=0.0))
    ratios: list[float] = []
    for number in range(200):
        if number == 10:
            prompt = [token % scheduler.limits.vocab_size for token in range(3000)]
            once = SamplingParams(max_tokens=1, seed=0)
            scheduler.add(Request(id=2, prompt_token_ids=prompt, sampling=once, arrival_time=0.0))
        step = scheduler.schedule()
        assert step is not None
        assert all(row.num_tokens for row in step.rows)
        seconds = 0.01 + 0.0001 * (step.num_tokens - step.num_decode_rows)
        if step.num_decode_rows < len(step.rows) and step.num_decode_rows:
            ratios.append(seconds / 0.01)
        rows = tuple(RowResult(token_id=3 if row.samples else None) for row in step.rows)
        scheduler.retire(step, StepResult(rows=rows, seconds=seconds))
    assert len(ratios) > 20
    assert max(ratios) <= 2.0
