"""Expert parallelism on paper: what DeepSeek-V3 and Kimi-K2 would need and reach on 1 to 8 hosts of 8 H200, from the roofline.

`python -m tools.expert_parallel_table` prints the tables of docs/expert-parallel.md; `--plot FILE` draws them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from minserve.config import Config
from minserve.plan import make_plan, read_config
from minserve.roofline import H200, ModelShape, shape_from_config, step_floor

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
        plan = make_plan(config, Config(ep_size=ranks, max_model_len=CONTEXT, max_num_seqs=max(BATCHES)))
        first = crossing(shape, ranks, MOST)
        later = ", ".join(f"{resource} {batch}" for resource, batch in first.items() if batch is not None)
        for batch in BATCHES:
            floor = step_floor(shape, H200, batch, CONTEXT, ranks)
            heads = (
                [str(ranks), f"{sum(plan.weights.values()) / 1e9:.0f}", f"{plan.kv_tokens:,}" if plan.fits else "does not fit"]
                if batch == 1
                else ["", "", ""]
            )
            cells = [
                *heads, str(batch), f"{floor.gpu_seconds * 1e3:.2f}",
                *(f"{seconds * 1e3:.2f}" for seconds in floor.wire_seconds.values()),
                f"{floor.seconds * 1e3:.2f}", f"{batch / floor.seconds:,.0f}", later if batch == 1 else "",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def crossing(m: ModelShape, ep_size: int, most: int) -> dict[str, int | None]:
    """The batch per GPU from which each resource takes the largest share of the step; None where it never does up to `most`.

    Resources: `weights` and `kv` (memory bandwidth), `matrix` (operations), `nvlink`, `rdma`.
    """
    first: dict[str, int | None] = dict.fromkeys(("weights", "kv", "matrix", "nvlink", "rdma"))
    for batch in range(1, most + 1):
        floor = step_floor(m, H200, batch, CONTEXT, ep_size)
        weights = sum(part.bytes for name, part in floor.parts.items() if name != "kv_cache") / H200.bandwidth
        compute = sum(part.seconds for part in floor.parts.values() if part.seconds > part.bytes / H200.bandwidth * (1 + 1e-9))
        seconds = {
            "weights": weights, "kv": floor.parts["kv_cache"].bytes / H200.bandwidth, "matrix": compute,
            **floor.wire_seconds,
        }  # fmt: skip
        largest = max(seconds, key=seconds.__getitem__)
        if first[largest] is None:
            first[largest] = batch
    return first


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
            memory = [floor.gpu_seconds * 1e3 for floor in floors]
            wire = [max(floor.wire_seconds.values()) * 1e3 for floor in floors]
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
