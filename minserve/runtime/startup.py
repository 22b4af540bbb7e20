"""The start as a line of named phases whose seconds add up to the whole, told to the front, the log and the terminal.

Knows phases and clocks; nothing of what happens in them.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from minserve.messages import Starting

TELL_EVERY_SECONDS = 0.1

log = logging.getLogger("minserve.runtime")


class Timeline:
    """One phase at a time; the next begins where the last one ends. The first begins with the process."""

    def __init__(self, tell: Callable[[Starting], None], first_phase: str) -> None:
        self._tell = tell
        self._seconds: dict[str, float] = {}
        self._phase = first_phase
        self._began = time.monotonic() - process_age()
        self._told_at = 0.0
        on_terminal = sys.stderr is not None and sys.stderr.isatty()
        columns = TextColumn("{task.description:>10}"), BarColumn(40), TextColumn("{task.percentage:>3.0f}%")
        more = TimeElapsedColumn(), TextColumn("{task.fields[detail]}")
        self._bar = Progress(*columns, *more, console=Console(stderr=True), transient=True, disable=not on_terminal)
        self._task = self._bar.add_task(first_phase, total=1.0, detail="")
        self._bar.start()

    def begin(self, phase: str) -> None:
        """End the running phase and start this one. A name that was there before goes on counting."""
        self._end_phase()
        self._phase = phase
        self._bar.reset(self._task, description=phase, total=1.0, detail="")
        self._tell(Starting(phase, 0.0))
        self._told_at = time.monotonic()

    def progress(self, fraction: float, detail: str = "") -> None:
        """How far the running phase is, 0 to 1, and more words for the terminal. Call it as often as you like."""
        now = time.monotonic()
        if now - self._told_at < TELL_EVERY_SECONDS and fraction < 1.0:
            return
        self._told_at = now
        self._tell(Starting(self._phase, min(1.0, max(0.0, fraction))))
        self._bar.update(self._task, completed=fraction, detail=detail)

    def finish(self) -> dict[str, float]:
        """End the last phase: phase to seconds, in order."""
        self._end_phase()
        self.stop()
        return dict(self._seconds)

    def stop(self) -> None:
        """Take the bar off the terminal, also after a failed start."""
        if not self._bar.disable:
            self._bar.stop()

    def _end_phase(self) -> None:
        now = time.monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._began
        if self._bar.disable:
            log.info("start: %s took %.2f s", self._phase, now - self._began)
        self._began = now


def process_age() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
