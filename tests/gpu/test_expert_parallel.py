"""Experts over several ranks, one GPU each where there are as many, else side by side on one under an MPS daemon of our own.

Compiles much: give it kernel caches to keep.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import ServerProcess, serving

from minserve.config import EMBEDDED_DIRECTORY
from minserve.kernels import deep_ep_limits
from tools.quantize_fp8 import quantize_checkpoint

HERE = Path(__file__).parent
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}


@pytest.fixture(params=[int(word) for word in os.environ.get("MINSERVE_TEST_RANKS", "2 4").split()])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """How many, and the environment that they need."""
    count: int = request.param
    if torch.cuda.device_count() >= count:
        yield count, MULTICAST_OFF
        return
    folders = {f"CUDA_MPS_{kind}_DIRECTORY": str(tmp_path / kind) for kind in ("PIPE", "LOG")}
    for folder in folders.values():
        Path(folder).mkdir()
    daemon = {**os.environ, **folders}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=daemon, check=True)
    # The daemon shows its GPUs renumbered from 0.
    yield count, {**MULTICAST_OFF, **folders, "CUDA_VISIBLE_DEVICES": "0"}
    subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=daemon, check=True, timeout=60)


@pytest.mark.parametrize("part", ["layers", "replays"])
def test_ranks_compute_what_one_does(ranks: tuple[int, dict[str, str]], part: str, tmp_path: Path) -> None:
    count, environment = ranks
    quantize_checkpoint(EMBEDDED_DIRECTORY, tmp_path / "fp8")
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = str(chosen.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    logs = [tmp_path / f"rank{rank}" for rank in range(count)]
    program = [sys.executable, str(HERE / "expert_ranks.py")]
    processes = [
        subprocess.Popen(
            [*program, str(rank), str(count), port, str(tmp_path), part],
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env=environment,
        )
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + 150
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.returncode for process in processes):
                deadline = min(deadline, time.monotonic() + 5)  # the others wait for it, and would for minutes
            time.sleep(0.1)
    finally:
        for process in processes:
            process.send_signal(signal.SIGABRT)  # one that hangs tells where
        codes = [process.wait(20) for process in processes]
        told = "\n".join(line for log in logs for line in shown(log.read_text(errors="replace").splitlines()))
        sys.stdout.write(told)
    assert codes == [0] * count, told
    assert all(f"rank {rank}: {part} passed" in told for rank in range(count))


def shown(lines: list[str]) -> list[str]:
    """What a rank says of itself, and its end."""
    return [line for line in lines[:-40] if line.startswith("rank")] + lines[-40:]


FLAGS = {
    "auto": [],
    "eager": ["--enforce-eager"],
    "torch": ["--moe-dispatcher", "torch"],
    "low": ["--deepep-mode", "low_latency"],
    "fp8": [],
}


@pytest.mark.parametrize("kind", FLAGS)
def test_a_server_of_several_ranks(ranks: tuple[int, dict[str, str]], kind: str, tmp_path: Path) -> None:
    """Right answers, every rank proven, and the death of a rank is the end of all, with its name."""
    (count, environment), flags = ranks, FLAGS[kind]
    if kind == "fp8":
        quantize_checkpoint(EMBEDDED_DIRECTORY, tmp_path / "fp8")
        flags = [str(tmp_path / "fp8")]
    shared = "CUDA_MPS_PIPE_DIRECTORY" in environment
    rows = deep_ep_limits.capacity(64, count if shared else 1)
    sizes = ["--max-num-seqs", str(min(64, rows)), "--num-pages", "1000", "--max-model-len", "2048"]
    words = [*flags, "--ep-size", str(count), "--device", "cuda", *sizes]
    with serving(*words, log=tmp_path / "log", environment=environment) as server:
        url = server.base_url
        asked = [sys.executable, "-m", "minserve", "eval", "arithmetic", "--base-url", url, "--limit", "120"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=150)
        accuracy = re.search(r"accuracy (\d\.\d+)\s*$", done.stdout)
        assert accuracy and float(accuracy[1]) >= 0.97, done.stdout + done.stderr + server.log
        shown = server.request("GET", "/server_info")[1]["ranks"]
        sys.stdout.write(json.dumps([proof(rank) for rank in shown]))
        check(shown, graphs="--enforce-eager" not in flags and not (shared and "torch" in flags))
        end_by_a_ranks_death(server, shown)


def proof(rank: dict[str, Any]) -> dict[str, Any]:
    stats = rank["now"]["stats"]
    names = ("steps", "dummy_steps", "mixed_steps", "eager_decode_steps", "graph_replays")
    kept = {name: stats[name] for name in names}
    return kept | {"check": rank["info"]["self_check"], "experts": rank["info"]["effective"]["experts"]}


def check(shown: list[dict[str, Any]], *, graphs: bool) -> None:
    for rank in shown:
        told = proof(rank)
        assert told["check"]["verdict"].startswith("passed")
        if graphs:
            assert told["graph_replays"] and told["check"]["streams_at_replay"]
            assert max(told["check"]["streams_at_replay"].values()) <= 4


def end_by_a_ranks_death(server: ServerProcess, shown: list[dict[str, Any]]) -> None:
    pids = [rank["info"]["pid"] for rank in shown]
    body = {"prompt": "What is 12 + 5?", "max_tokens": 1900, "ignore_eos": True}
    threading.Thread(target=lambda: server.request("POST", "/v1/completions", body), daemon=True).start()
    time.sleep(0.5)
    os.kill(pids[-1], signal.SIGKILL)
    assert server.process.wait(10) == 6, server.log
    assert f"engine {len(pids) - 1} (pid {pids[-1]}) was killed by SIGKILL" in server.log
    time.sleep(1.0)
    assert not [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()]
