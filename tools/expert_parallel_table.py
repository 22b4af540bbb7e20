"""Expert parallelism on paper: what DeepSeek-V3 and Kimi-K2 would need and reach on 1 to 8 hosts of 8 H200, from the roofline.

`python -m tools.expert_parallel_table` prints the tables of docs/expert-parallel.md; `--plot FILE` draws them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from minserve.plan import Settings, make_plan, read_config
from minserve.roofline import H200, crossing, shape_from_config, step_floor

SHAPES = Path(__file__).parent.parent / "configs" / "shapes"
MODELS = {"deepseek-v3": "DeepSeek-V3 (FP8)", "kimi-k2-instruct": "Kimi-K2 (FP8)"}
RANKS = (8, 16, 32, 64)
BATCHES = (1, 32, 128)
CONTEXT = 4096
MOST = 2048


def table(name: str) -> str:
    """Markdown: one line for each number of ranks."""
    config, _ = read_config(SHAPES / name)
    shape = shape_from_config(config)
    lines = [
        "| ranks | weights a rank, GB | KV tokens a rank | batch a rank | GPU, ms | NVLink, ms | RDMA, ms | floor, ms "
        "| tokens/s a GPU | takes the most from batch |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for ranks in RANKS:
        plan = make_plan(config, name, Settings(ep_size=ranks, max_model_len=CONTEXT, max_num_seqs=max(BATCHES)))
        first = crossing(shape, H200, CONTEXT, ranks, MOST)
        later = ", ".join(f"{resource} {batch}" for resource, batch in first.items() if batch is not None)
        for batch in BATCHES:
            floor = step_floor(shape, H200, batch, CONTEXT, ranks)
            heads = (
                [str(ranks), f"{sum(plan.weights.values()) / 1e9:.0f}", f"{plan.kv_tokens:,}" if plan.fits else "does not fit"]
                if batch == 1
                else ["", "", ""]
            )
            here = sum(part.seconds for part in floor.parts.values()) * 1e3
            wire = floor.traffic
            cells = [
                *heads, str(batch), f"{here:.2f}", f"{wire.nvlink_seconds * 1e3:.2f}", f"{wire.rdma_seconds * 1e3:.2f}",
                f"{floor.seconds * 1e3:.2f}", f"{batch / floor.seconds:,.0f}", later if batch == 1 else "",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tables() -> str:
    return "\n\n".join(f"### {title}\n\n{table(name)}" for name, title in MODELS.items())


def draw(path: Path) -> None:
    """Milliseconds of memory and wire over the batch, one panel for each model and number of ranks."""
    matplotlib.use("Agg")
    figure = Figure(figsize=(13, 6), layout="constrained")
    panels = figure.subplots(len(MODELS), len(RANKS), sharex=True, sharey=True)
    batches = [2**power for power in range(9)]
    for row, (name, title) in zip(panels, MODELS.items(), strict=True):
        shape = shape_from_config(read_config(SHAPES / name)[0])
        for panel, ranks in zip(row, RANKS, strict=True):
            floors = [step_floor(shape, H200, batch, CONTEXT, ranks) for batch in batches]
            memory = [sum(part.seconds for part in floor.parts.values()) * 1e3 for floor in floors]
            wire = [floor.traffic.seconds * 1e3 for floor in floors]
            panel.stackplot(
                batches,
                memory,
                wire,
                labels=("GPU: memory and matrix units", "wire: NVLink and RDMA"),
                colors=("#4477aa", "#ee6677"),
            )
            panel.set_xscale("log", base=2)
            panel.set_title(f"{title}, {ranks} ranks", fontsize=9)
    panels[0][0].legend(loc="upper left", fontsize=8)
    figure.supxlabel(f"requests a rank, {CONTEXT:,} tokens each")
    figure.supylabel("floor of a decode step, ms")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, help="also draw to this file")
    options = parser.parse_args()
    sys.stdout.write(tables() + "\n")
    if options.plot is not None:
        draw(options.plot)


if __name__ == "__main__":
    main()
