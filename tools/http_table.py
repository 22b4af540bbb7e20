"""The HTTP tables of docs/performance.md: `python -m tools.http_table configs/shapes/MODEL [--at-once 16] [FLAG ...]` on a GPU.

Starts `minserve launch` with random weights, then `minserve bench serve` beside it: prompts alone; streams that begin together
and then all decode, whose time between two tokens stands beside that of `minserve bench step --context 1152`; answers of 256
tokens at 1, 16, 64 and 128 streams, or as many as asked. Further words are flags of the server. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from typing import Any

from tools.launched import serving

STREAMS = {1: 3, 16: 32, 64: 128, 128: 256}
"""Requests at once, and in all."""
PROMPT_TOKENS, ANSWER_TOKENS = 1024, 256
TOGETHER = (1, 8, 32, 128)
ONE_ANSWER, PROMPTS = {"--concurrency": 1, "--num-prompts": 5, "--output-len": 1}, {"--num-prompts": 128, "--output-len": 1}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.http_table", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--at-once", type=int, nargs="*", choices=STREAMS, default=[*STREAMS], help="streams")
    options, flags = parser.parse_known_args()
    began = time.monotonic()
    try:
        with serving([options.model, "--load-format", "dummy", *flags]) as server:
            ready = time.monotonic() - began
            say(f"ready after {ready:.1f} s")
            rows = measure(server.url, options.at_once)
            timeline = server.log_lines("ready after|seconds|took")
    except ChildProcessError as error:
        say(str(error)[-4000:])
        return 1
    say("\n".join(timeline[-5:]))
    say(json.dumps({"bench": "http", "model": options.model, "ready": ready, "rows": rows}))
    return 0


def measure(url: str, at_once: list[int]) -> list[dict[str, Any]]:
    seeds = itertools.count(1)  # a prompt that came before would be found in the prefix cache

    def asked(options: dict[str, int]) -> dict[str, Any]:
        return bench(url, options | {"--seed": next(seeds)})

    # The first requests after a start meet cold caches of the host; they are not counted.
    asked({"--num-prompts": 4, "--output-len": 8})
    first = asked(ONE_ANSWER)
    prompts = [asked(PROMPTS) for _ in range(3)]
    rates = sorted(row["total_prompt_tokens"] / row["seconds"] for row in prompts)
    say(f"first token of one prompt of {PROMPT_TOKENS} tokens: {first['ttft_ms_p50']:.0f} ms")
    say(f"128 such prompts: {rates[1]:,.0f} tokens/s (of three: {rates[0]:,.0f} to {rates[2]:,.0f})")
    rows = [first, *prompts]
    say("| decode together | between two tokens, p50, ms |")
    say("|---|---|")
    for streams in TOGETHER:
        rows.append(asked({"--concurrency": streams, "--num-prompts": streams, "--output-len": ANSWER_TOKENS}))
        say(f"| {streams} | {rows[-1]['itl_ms_p50']:.2f} |")
    say("| at once | answers | output tokens/s | first token, p50 / p99, ms | a later token | longest gap, p50 / max |")
    say("|---|---|---|---|---|---|")
    for streams in at_once:
        answers = STREAMS[streams]
        row = asked({"--concurrency": streams, "--num-prompts": answers, "--output-len": ANSWER_TOKENS})
        cells = [
            str(streams),
            str(answers),
            f"{row['output_tokens_per_second']:,.0f}",
            f"{row['ttft_ms_p50']:.0f} / {row['ttft_ms_p99']:.0f}",
            f"{row['tpot_ms_p50']:.2f} / {row['tpot_ms_p99']:.2f}",
            f"{row['longest_gap_ms_p50']:.1f} / {row['longest_gap_ms_max']:.1f}",
        ]
        say(f"| {' | '.join(cells)} |")
        rows.append(row)
    return rows


def bench(url: str, options: dict[str, int]) -> dict[str, Any]:
    """Raises ChildProcessError when a request failed."""
    words = [str(word) for option in ({"--input-len": PROMPT_TOKENS} | options).items() for word in option]
    command = [sys.executable, "-m", "minserve", "bench", "serve", "--base-url", url, *words]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    report: dict[str, Any] = json.loads((run.stdout.strip().splitlines() or ["{}"])[-1])
    if run.returncode or report.get("failed"):
        raise ChildProcessError(f"{' '.join(command)} ended with {run.returncode}: {run.stdout[-1000:]}")
    return report


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
