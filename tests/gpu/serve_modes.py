"""The embedded model through HTTP in every mode at once: arithmetic side by side, then 200 mixed requests at once and alone.

python tests/gpu/serve_modes.py LOG_DIRECTORY [LIMIT [CHECKPOINT]]; the table comes last. Exits 1 when a mode is not sound.
CHECKPOINT: another form of the embedded model, such as its FP8 twin.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math
import random
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from server_process import ServerProcess

from minserve.clients.arithmetic_reference import PromptTokens, load_reference
from minserve.clients.openai_client import OpenAIClient

MODES = {
    "eager": ["--enforce-eager"],
    "graph serial": ["--shared-expert", "serial"],
    "graph overlap": ["--shared-expert", "overlap"],
    "graph fused": ["--shared-expert", "fused"],
}
MOST_DRIFT = {False: 1.0, True: 1.5}
"""In shares of the eval's bounds, which are bf16's: the embedded model itself, and another form of it."""
MARGIN = 0.5
"""Nats within which 16-bit rounding, which depends on the batch, may turn a choice."""


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def serve(stack: str, mode: str, logs: Path, limit: int, model: list[str]) -> dict[str, Any]:
    name = f"{stack}-{mode}".replace(" ", "-")
    began = time.monotonic()
    options = [*model, *MODES[mode], "--stack", stack, "--device", "cuda", "--num-pages", "4000", "--max-num-seqs", "64"]
    server = ServerProcess(options, logs / f"serve-{name}.log", {"MINSERVE_MAX_MODEL_LEN": "2048"})
    row: dict[str, Any] = {"stack": stack, "mode": mode}
    try:
        url = f"http://127.0.0.1:{server.port}"
        wait_ready(url, server)
        row["ready after"] = round(time.monotonic() - began, 1)
        evaluation = subprocess.run(
            [sys.executable, "-m", "minserve", "eval", "arithmetic", "--base-url", url, "--limit", str(limit)],
            capture_output=True,
            text=True,
            timeout=200,
        )
        (logs / f"eval-{name}.log").write_text(evaluation.stdout + evaluation.stderr)
        row["exit"] = evaluation.returncode
        row["accuracy"] = (evaluation.stdout.strip().splitlines() or ["nothing"])[-1]
        # Generated tokens one and 16 at a time, prompts, right answers: how far from float32, as shares of their bounds.
        found = re.findall(r"drift (\S+), bound ([\d.]+)\)", evaluation.stdout)
        row["drifts"] = [round(float(drift) / float(bound), 2) for drift, bound in found]
        row["eval after"] = round(time.monotonic() - began, 1)
        if mode == "graph overlap":
            row["mixed"] = asyncio.run(mixed(url))
        info = get(url + "/server_info")
        (logs / f"info-{name}.json").write_text(json.dumps(info, indent=1))
        engine = find_engine(info)
        row["self check"] = engine.get("self_check")
        row["startup"] = engine.get("startup_seconds")
        row["stats"] = {key: engine.get("stats", {}).get(key) for key in ("eager_decode_steps", "graph_replays", "mixed_steps")}
        row["pages used"] = engine.get("pages", {}).get("used")
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:300]
        row["log"] = "\n".join(server.log.splitlines()[-25:])
    finally:
        server.process.terminate()
        try:
            server.process.wait(15)
        except subprocess.TimeoutExpired:
            server.process.kill()
    return row


def find_engine(info: Any) -> dict[str, Any]:
    """The engine's part of /server_info, wherever it lies."""
    if isinstance(info, dict):
        if "self_check" in info and "stats" in info:
            return info
        info = list(info.values())
    for part in info if isinstance(info, list) else ():
        found = find_engine(part)
        if found:
            return found
    return {}


def wait_ready(url: str, server: ServerProcess) -> None:
    end = time.monotonic() + 150
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with {server.process.returncode}")
        try:
            with urllib.request.urlopen(url + "/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError("not ready")


async def mixed(url: str, count: int = 200) -> str:
    """Each of 200 questions of mixed lengths, asked at once, is answered as it is alone wherever the choice is clear."""
    dice = random.Random(3)
    tokens_of, items = PromptTokens(), load_reference().items[:count]
    bodies = [
        {
            "prompt": tokens_of.of(item)[0],
            "max_tokens": dice.randint(1, 128),
            "temperature": 0,
            "logprobs": 2,
            "return_token_ids": True,
            "seed": index,
        }
        for index, item in enumerate(items)
    ]
    async with OpenAIClient(url) as client:
        model = await client.first_model()
        together = await asyncio.gather(*(client.post("/completions", body | {"model": model}) for body in bodies))
        alone = [await client.post("/completions", body | {"model": model}) for body in bodies]
    found = [margin_of_difference(one["choices"][0], other["choices"][0]) for one, other in zip(together, alone, strict=True)]
    close = sum(margin is not None and margin <= MARGIN for margin in found)
    beyond = [(index, round(margin, 3)) for index, margin in enumerate(found) if margin is not None and margin > MARGIN]
    return f"{found.count(None)} of {count} equal, {close} differ within {MARGIN} nats, beyond: {beyond}"


def margin_of_difference(one: dict[str, Any], other: dict[str, Any]) -> float | None:
    """How clear the second run's choice was at the first token that differs, in nats; None when all are equal.

    Ids are compared, since bytes of half a character look alike; log-probabilities are listed by text, so where the best
    two share theirs, the margin is at least the odds of the best.
    """
    first, second = one["token_ids"], other["token_ids"]
    for place, (token, its) in enumerate(zip(first, second, strict=False)):
        if token != its:
            chosen = other["logprobs"]["token_logprobs"][place]
            top = sorted(other["logprobs"]["top_logprobs"][place].values(), reverse=True)
            margin: float = top[0] - top[1] if len(top) > 1 else chosen - math.log(max(1e-9, -math.expm1(chosen)))
            return margin
    return None if len(first) == len(second) else float("inf")


def main() -> int:
    logs, limit = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 320
    model = sys.argv[3:4]
    logs.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(serve, stack, mode, logs, limit, model) for stack in ("hopper", "torch-gpu") for mode in MODES]
        rows = [job.result() for job in jobs]
    sound = True
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
        accuracy = re.fullmatch(r"accuracy (\d\.\d+)", str(row.get("accuracy")))
        sound &= "beyond: [(" not in row.get("mixed", "")
        sound &= accuracy is not None and float(accuracy[1]) >= 0.97 and row.get("pages used") == 0
        sound &= len(row.get("drifts", [])) == 4 and all(drift <= MOST_DRIFT[bool(model)] for drift in row["drifts"])
    for row in rows:
        sys.stdout.write(
            f"{row['stack']:10} {row['mode']:14} {row.get('accuracy')} drifts {row.get('drifts')} "
            f"pages {row.get('pages used')} {row.get('mixed', '')} {row.get('error', '')}\n"
        )
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
