"""What came of a load: percentiles, table, JSON and picture. Knows nothing of HTTP."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from minserve.errors import EnvironmentFault, UsageError

PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(slots=True)
class Sample:
    """One request as its client saw it; times are `time.monotonic()` seconds."""

    begun: float
    ended: float = 0.0
    arrivals: list[float] = dataclasses.field(default_factory=list)
    """Of each event that brought text."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.begun

    @property
    def gaps(self) -> list[float]:
        """Seconds between events that brought text."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]

    @property
    def per_token(self) -> float | None:
        """Mean seconds of a token after the first; None for a single one."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    seconds: float
    completed: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    spreads: dict[str, dict[str, float]]
    """Name to distribution in milliseconds: its mean, percentiles and largest value; empty ones are left out."""
    errors: dict[str, int]

    @property
    def rates(self) -> dict[str, float]:
        """Per second."""
        return {
            "requests_per_second": self.completed / self.seconds,
            "output_tokens_per_second": self.output_tokens / self.seconds,
            "total_tokens_per_second": (self.prompt_tokens + self.output_tokens) / self.seconds,
        }

    def as_json(self) -> dict[str, Any]:
        """Flat: `ttft_ms_p50` and so on."""
        return {
            "seconds": self.seconds,
            "completed": self.completed,
            "failed": self.failed,
            "total_prompt_tokens": self.prompt_tokens,
            "total_output_tokens": self.output_tokens,
            **self.rates,
            **{f"{name}_ms_{place}": value for name, spread in self.spreads.items() for place, value in spread.items()},
        }


_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between two tokens",
    "longest_gap": "longest gap of a stream",
    "e2e": "whole request",
}


def summarize(samples: Sequence[Sample], seconds: float) -> Report:
    """`seconds`: from the first request to the end of the last."""
    good = [sample for sample in samples if sample.error is None]
    measured: dict[str, list[float]] = {
        "ttft": [sample.first for sample in good],
        "tpot": [pace for sample in good if (pace := sample.per_token) is not None],
        "itl": [gap for sample in good for gap in sample.gaps],
        "longest_gap": [max(sample.gaps) for sample in good if sample.gaps],
        "e2e": [sample.ended - sample.begun for sample in good],
    }
    return Report(
        seconds=seconds,
        completed=len(good),
        failed=len(samples) - len(good),
        prompt_tokens=sum(sample.prompt_tokens for sample in good),
        output_tokens=sum(sample.output_tokens for sample in good),
        spreads={name: _spread(values) for name, values in measured.items() if values},
        errors=dict(collections.Counter(sample.error for sample in samples if sample.error is not None)),
    )


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(value * 1000 for value in values)
    percentiles = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {"mean": statistics.fmean(ordered), **percentiles, "max": ordered[-1]}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between two neighbours in proportion; `ordered` is sorted and not empty."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def table(model: str, report: Report) -> Table:
    made = Table(title=f"{report.completed} requests to {model} in {report.seconds:.2f} s", title_justify="left")
    made.add_column("")
    for place in ("mean", *(f"p{percent}" for percent in PERCENTILES), "max"):
        made.add_column(place, justify="right")
    for name, spread in report.spreads.items():
        made.add_row(f"{_TITLES[name]}, ms", *(f"{value:.2f}" for value in spread.values()))
    for name, rate in report.rates.items():
        made.add_row(name.replace("_per_second", "/s").replace("_", " "), f"{rate:.1f}")
    if report.failed:
        made.add_row("failed", str(report.failed))
    return made


def check_plot(path: Path) -> None:
    """Before any load: raises EnvironmentFault without matplotlib, UsageError for a folder that is not there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise EnvironmentFault("--plot needs matplotlib; install it with: pip install 'minserve[plot]'")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no such folder")


def draw(samples: Sequence[Sample], report: Report, path: Path) -> None:
    """Three panels: first tokens over time, the distribution of gaps, tokens a second over time."""
    from matplotlib.figure import Figure  # an optional library

    good = [sample for sample in samples if sample.error is None]
    origin = min((sample.begun for sample in samples), default=0.0)
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    first, gaps, rate = figure.subplots(1, 3)
    first.plot([sample.begun - origin for sample in good], [sample.first * 1000 for sample in good], ".")
    first.set(xlabel="sent at, s", ylabel="time to first token, ms", ylim=(0, None))
    ordered = sorted(gap * 1000 for sample in good for gap in sample.gaps)
    shown = range(0, len(ordered), max(1, len(ordered) // 2000))  # as many as a picture can show
    gaps.plot([ordered[place] for place in shown], [(place + 1) / len(ordered) for place in shown])
    gaps.set(xlabel="between two tokens, ms", ylabel="share of gaps", xscale="log", ylim=(0, 1))
    rate.hist([moment - origin for sample in good for moment in sample.arrivals], bins=60, histtype="step")
    rate.set(xlabel="s", ylabel=f"tokens in {report.seconds / 60:.2g} s")
    figure.savefig(path)
