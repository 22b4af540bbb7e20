"""How long the next step may still be left open for what comes meanwhile. Knows seconds and counts alone.

A step is made while the one before it runs. Made at once, it would keep out every prompt that comes in that time, often a whole
step's; so it is made as late as its own making allows.
"""

from __future__ import annotations

from collections.abc import Sequence

from minserve.runtime.step import ScheduledStep

SURE = 0.85
"""Of the least that a step like the one in flight took of late; it may take less this time."""
MARGIN_SECONDS = 0.002
"""For a host that comes late."""
FORGET = 0.1
"""Of the difference to a longer time, for each step that took it. However long that was, the next is not late for it."""
FORGET_MAKING = 0.05
"""Of the longest making, for each step that was made faster: steps with new prompts take several times as long as others."""


class StepClock:
    """Told of each step when it was launched, when it began on the device, and when it has retired."""

    def __init__(self, step_sizes: Sequence[int] = ()) -> None:
        """step_sizes: the tokens to which steps with prompts are padded, ascending; none: they are not."""
        self._step_sizes = step_sizes
        self._firsts: dict[tuple[int, int], float] = {}
        """What the first step of each kind took, which may have loaded kernels: alone it is not believed."""
        self._least: dict[tuple[int, int], float] = {}
        self._making_seconds = 0.0
        """What it takes to make a step and to launch it: the most of late."""
        self._expected_end: float | None = None

    def made(self, seconds: float) -> None:
        """What the host took from the choice of a step to the end of its launch."""
        self._making_seconds = max(seconds, (1 - FORGET_MAKING) * self._making_seconds)

    def begun(self, step: ScheduledStep | None, now: float) -> None:
        """A launched step is what the device works on from now on; None: nothing is."""
        expected = None if step is None else self._least.get(self._kind(step))
        self._expected_end = None if expected is None else now + SURE * expected

    def retired(self, step: ScheduledStep, seconds: float) -> None:
        """What a step took on the device."""
        kind = self._kind(step)
        if kind not in self._firsts:
            self._firsts[kind] = seconds
            return
        before = self._least.get(kind, self._firsts[kind])
        self._least[kind] = seconds if seconds < before else before + FORGET * (min(seconds, 2 * before) - before)

    def seconds_left(self, now: float) -> float:
        """Until the next step has to be made; 0 or less: it is time."""
        return 0.0 if self._expected_end is None else self._expected_end - self._making_seconds - MARGIN_SECONDS - now

    def _kind(self, step: ScheduledStep) -> tuple[int, int]:
        """Steps of one kind take about the same time."""
        rows = step.num_decode_rows.bit_length()
        if step.decodes_only:
            return rows, 0
        return rows, next((size for size in self._step_sizes if size >= step.num_tokens), 1 << step.num_tokens.bit_length())
