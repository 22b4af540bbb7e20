"""The decode tables of docs/performance.md: `python -m tools.decode_table FOLDER` on a GPU, resumable.

Each line is a run of `minserve bench step` in a process of its own, whose last line is kept in the folder; what lies there
already is not measured again. Prints the table of all that is there, with the share of the floor at a copy's bandwidth and at
that of a kernel that only reads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

READING = 4.3 / 4.69
"""The floor's copy bandwidth over that of reading alone."""
MODELS = ("qwen3-30b-a3b", "qwen3-30b-a3b-fp8", "moonlight-16b-a3b")
RUNS: dict[str, tuple[str, list[str]]] = {
    **{f"{model}-1k": (model, ["--batch", "1", "2", "4", "8", "16", "32", "64", "128", "256"]) for model in MODELS},
    **{f"{model}-8k": (model, ["--batch", "1", "8", "32", "--context", "8192"]) for model in MODELS},
    **{f"{model}-32k": (model, ["--batch", "1", "8", "--context", "32768"]) for model in MODELS[:2]},
    "qwen3-30b-a3b-deterministic": ("qwen3-30b-a3b", ["--batch", "1", "8", "32", "128", "--stack", "deterministic"]),
}
"""File to model and words of its run."""


def main() -> int:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[2:] or list(RUNS)
    for name in wanted:
        file = folder / f"{name}.json"
        if not file.exists():
            model, words = RUNS[name]
            command = [sys.executable, "-m", "minserve", "bench", "step", f"configs/shapes/{model}", "--modes", "graph", *words]
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if run.returncode:
                sys.stderr.write(f"{name}: exit code {run.returncode}\n")
                continue
            file.write_text(run.stdout.splitlines()[-1] + "\n")
        _show(name, json.loads(file.read_text()))
    return 0


def _show(name: str, report: dict[str, Any]) -> None:
    lines = [
        f"\n{name}: {report['stack']}, context {report['context']}, {report['device']}\n",
        "| batch | ms a step | spread | device, ms | floor, ms | share | share, reading alone |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        times = f"{row['step']:.2f} | {row['spread']:.1%} | {row['device']:.2f} | {row['floor']:.2f}"
        lines.append(f"| {row['batch']} | {times} | {row['share']:.0%} | {row['share'] * READING:.0%} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
