"""Draws a plan: one stacked bar of memory a rank. Needs matplotlib, which is an extra. Knows nothing of how a plan is made."""

from __future__ import annotations

import textwrap
from pathlib import Path

from minserve.errors import EnvironmentFault, UsageError
from minserve.plan import Plan


def draw(plan: Plan, path: Path) -> None:
    """Writes the picture in the format of the path's ending. EnvironmentFault without matplotlib, UsageError for the path."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentFault("--plot needs matplotlib: pip install 'minserve[plot]'") from error
    figure = Figure(figsize=(max(5.0, 2.5 + 0.7 * plan.ep_size), 5.0), layout="constrained")
    axes = figure.subplots()
    ranks = range(plan.ep_size)
    names = {part.replace("_", " "): size for part, size in plan.weights.items()}
    names |= {f"{part} (estimate)": size for part, size in plan.buffers.items()} | {"KV cache": plan.kv_cache}
    below = 0.0
    for number, (name, size) in enumerate(names.items()):
        colour = "lightgrey" if name == "KV cache" else colormaps["tab20"](number)
        axes.bar(ranks, [size / 1e9] * plan.ep_size, bottom=below, label=name, width=0.8, color=colour)
        below += size / 1e9
    axes.axhline(plan.usable / 1e9, color="black", linestyle="--", linewidth=1, label=f"usable of an {plan.gpu}")
    axes.set_xticks(list(ranks))
    axes.set_xlabel("rank")
    axes.set_ylabel("GB")
    figure.suptitle("\n".join([plan.model, *textwrap.wrap(plan.verdict.split(";")[0], 60)]), fontsize=9)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, reverse=True)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}") from error
