"""How long the next step stays open: shorter than any step like the one in flight takes, less what its making takes."""

from __future__ import annotations

import pytest

from minserve.runtime.step import ScheduledRow, ScheduledStep
from minserve.runtime.step_clock import MARGIN_SECONDS, SURE, StepClock

SIZES = (256, 512, 1024)


def step(decode_rows: int, prompt_tokens: int = 0) -> ScheduledStep:
    rows = [ScheduledRow(request_id=row, slot=row, start=9, num_tokens=1) for row in range(decode_rows)]
    if prompt_tokens:
        rows.append(ScheduledRow(request_id=decode_rows, slot=decode_rows, start=0, num_tokens=prompt_tokens))
    return ScheduledStep.of(1, rows, decode_rows)


def known(seconds: float, one: ScheduledStep) -> StepClock:
    """A clock that has seen two such steps take so long."""
    clock = StepClock(SIZES)
    for _ in range(2):
        clock.retired(one, seconds)
    return clock


def test_nothing_is_left_open_while_nothing_runs_or_nothing_is_known() -> None:
    clock = StepClock(SIZES)
    assert clock.seconds_left(5.0) == 0.0
    clock.begun(step(3), 5.0)
    assert clock.seconds_left(5.0) == 0.0
    clock = known(1.0, step(3))
    clock.begun(None, 5.0)
    assert clock.seconds_left(5.0) == 0.0


def test_a_first_step_that_loads_kernels_holds_up_no_second_one() -> None:
    clock = StepClock(SIZES)
    clock.retired(step(3), 3.0)
    clock.begun(step(3), 5.0)
    assert clock.seconds_left(5.0) == 0.0
    clock.retired(step(3), 0.02)
    clock.begun(step(3), 6.0)
    assert clock.seconds_left(6.0) < 0.02


def test_after_a_pause_of_the_machine_the_next_step_is_not_late() -> None:
    clock = known(0.02, step(3))
    clock.retired(step(3), 10.0)
    clock.begun(step(3), 5.0)
    assert 0.0 < clock.seconds_left(5.0) < 0.02


def test_the_next_step_stays_open_until_its_making_takes_the_rest() -> None:
    clock = known(1.0, step(3))
    clock.made(0.1)
    clock.begun(step(3), 5.0)
    assert clock.seconds_left(5.0) == pytest.approx(SURE - 0.1 - MARGIN_SECONDS)
    assert clock.seconds_left(5.5) == pytest.approx(SURE - 0.6 - MARGIN_SECONDS)
    assert clock.seconds_left(6.0) < 0.0


def test_the_shortest_of_late_counts() -> None:
    """One that took long, for whatever reason, makes no next step late."""
    clock = StepClock(SIZES)
    for seconds in (1.0, 9.0, 0.5, 0.6, 9.0):
        clock.retired(step(3), seconds)
    clock.begun(step(3), 0.0)
    assert clock.seconds_left(0.0) < 1.4 * SURE
    for _ in range(60):
        clock.retired(step(3), 2.0)
    clock.begun(step(3), 0.0)
    assert clock.seconds_left(0.0) == pytest.approx(2.0 * SURE, rel=0.02)


def test_the_longest_making_of_late_counts() -> None:
    clock = known(1.0, step(3))
    for seconds in (0.2, 0.01, 0.01):
        clock.made(seconds)
    clock.begun(step(3), 0.0)
    assert clock.seconds_left(0.0) < SURE - 0.18
    for _ in range(300):
        clock.made(0.01)
    assert clock.seconds_left(0.0) == pytest.approx(SURE - 0.01 - MARGIN_SECONDS)


@pytest.mark.parametrize(
    ("other", "same"),
    [(step(2), True), (step(4), False), (step(3, 100), False)],
    ids=["as many rows", "more rows", "with a prompt"],
)
def test_steps_of_another_kind_tell_nothing(other: ScheduledStep, same: bool) -> None:
    clock = known(1.0, step(3))
    clock.begun(other, 0.0)
    assert (clock.seconds_left(0.0) > 0.0) is same


def test_steps_with_prompts_are_told_apart_by_what_they_are_padded_to() -> None:
    clock = known(1.0, step(3, 300))
    for tokens, same in ((260, True), (509, True), (510, False), (2000, False)):
        clock.begun(step(3, tokens), 0.0)
        assert (clock.seconds_left(0.0) > 0.0) is same
