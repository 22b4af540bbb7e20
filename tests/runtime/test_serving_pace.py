"""Streams under a closed load, on a machine that is a formula: how long a token may take, and what that costs in throughput.

The formula is an H200 with a 30-billion-parameter Mixture-of-Experts: few decode rows read few experts, any prompt nearly all.
"""

from __future__ import annotations

import math

import pytest

from minserve.request import Request, SamplingParams
from minserve.runtime.cuda_graph import mixed_sizes
from minserve.runtime.scheduler import Limits, Scheduler
from minserve.runtime.step import RowResult, ScheduledStep, StepResult

SIZES = mixed_sizes(8192)
INPUT, OUTPUT, SLOTS = 1024, 64, 64


def decode_seconds(rows: int) -> float:
    return 0.002 + 0.0155 * (1 - math.exp(-rows / 16))


def step_seconds(step: ScheduledStep) -> float:
    rows = step.num_decode_rows
    if rows == len(step.rows):
        return decode_seconds(rows)
    padded = next(size for size in SIZES if size >= step.num_tokens)
    return 0.016 + 3e-5 * rows + 8.5e-6 * step.num_tokens + 2.8e-6 * padded


def serve(concurrency: int, num_requests: int, floor_seconds: float) -> tuple[float, float]:
    """(longest gap between two tokens of a stream, seconds of the whole load), one step in flight while the next is made."""
    limits = Limits(
        max_num_seqs=SLOTS,
        chunked_prefill_size=SIZES[-1],
        page_size=64,
        num_pages=SLOTS * 20,
        max_model_len=1280,
        vocab_size=10,
        enable_prefix_caching=False,
        prefill_floor_seconds=floor_seconds,
        mixed_sizes=SIZES,
    )
    scheduler = Scheduler(limits)
    sent, ended, now, free_at, longest = 0, 0, 0.0, 0.0, 0.0
    spoke: dict[int, float] = {}
    in_flight: tuple[ScheduledStep, float, float] | None = None
    while ended < num_requests:
        while sent < min(num_requests, ended + concurrency):
            sampling = SamplingParams(max_tokens=OUTPUT, seed=0, temperature=0.0)
            scheduler.add(Request(id=sent, prompt_token_ids=[1] * INPUT, sampling=sampling, arrival_time=now))
            sent += 1
        step, launched = scheduler.schedule(now), None
        if step is not None:
            seconds = step_seconds(step)
            free_at = max(free_at, now) + seconds
            launched = step, free_at, seconds
        if in_flight is not None:
            retired, now, took = in_flight
            rows = tuple(RowResult(token_id=5) if row.samples else RowResult() for row in retired.rows)
            for output in scheduler.retire(retired, StepResult(rows=rows, seconds=took)):
                longest = max(longest, now - spoke.get(output.request_id, now))
                spoke[output.request_id] = now
                ended += output.finish_reason is not None
        in_flight = launched
    return longest, now


@pytest.mark.parametrize("concurrency", [2, 16, 64])
def test_no_stream_waits_for_more_than_a_tenth_of_a_second(concurrency: int) -> None:
    longest, _ = serve(concurrency, 3 * concurrency, 0.08)
    assert longest < 0.1


def test_the_floor_is_what_makes_prompts_read_in_time() -> None:
    """Without it few streams would hold up the many prompts of a burst."""
    assert serve(64, 128, 0.08)[1] < 0.85 * serve(64, 128, 0.03)[1]
