"""All that is proven and measured on GPUs, as jobs spread over the GPUs there are; a later call goes on where one was cut.

`python -m tools.measure FOLDER [--parts tests modes decode ...] [--seconds N]` keeps a log of each job in the folder, and what
ended well there is not run again. Ends with the jobs' tables. Timed jobs have a GPU for themselves; tests share one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

ROOT = Path(__file__).parent.parent
PYTEST = ["-m", "pytest", "-p", "no:cacheprovider", "--confcutdir=tests/gpu", "--tb=short", "-vv"]
STEP = ["-m", "minserve", "bench", "step", "--modes", "graph", "--verbose"]
MODELS = ("qwen3-30b-a3b", "qwen3-30b-a3b-fp8", "moonlight-16b-a3b")
SLOW_TESTS = {"test_decode_tokens": 500, "test_whole_server": 400}
SHOWN_LINES = 60


class Job(NamedTuple):
    name: str
    part: str
    words: list[str]
    """After the name of the interpreter; `{folder}` stands for the job's own folder."""
    gpus: float = 1.0
    """A fraction: of a GPU that it shares."""
    seconds: int = 300
    environment: Mapping[str, str] = {}


def jobs() -> list[Job]:
    """In the order in which they are started, as GPUs become free."""
    return [*_proofs(), *_one_gpu(), *_several_gpus()]


def _proofs() -> list[Job]:
    tests = [
        Job(path.stem, "tests", [*PYTEST, str(path.relative_to(ROOT)), "-n", "2"], 0.2, SLOW_TESTS.get(path.stem, 300))
        for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
        if path.stem != "test_expert_parallel"
    ]
    # With fewer GPUs than ranks, these share one under MPS.
    ranks = [
        Job(
            f"{ranks}-ranks-{gpus}-gpus-{name}",
            "ranks",
            [*PYTEST, "-rP", "tests/gpu/test_expert_parallel.py", "-k", name],
            gpus,
            300,
            {"MINSERVE_TEST_RANKS": str(ranks)},
        )
        for ranks, gpus in ((2, 2), (4, 4), (2, 1), (4, 1))
        for name in ("layers", "replays", "auto", "eager", "torch", "low", "fp8")
    ]
    twin = "import sys, runpy; from pathlib import Path; from minserve.config import EMBEDDED_DIRECTORY; \
from tools.quantize_fp8 import quantize_checkpoint; quantize_checkpoint(EMBEDDED_DIRECTORY, Path(sys.argv[1]) / 'twin'); \
sys.argv[1:] = [sys.argv[1], '120', sys.argv[1] + '/twin']; runpy.run_path('tests/gpu/serve_modes.py', run_name='__main__')"
    modes = [
        Job("modes", "modes", ["tests/gpu/serve_modes.py", "{folder}", "120"], 1.0, 400),
        Job("modes-fp8", "modes", ["-c", twin, "{folder}"], 1.0, 400),
    ]
    return tests + modes + ranks


def _one_gpu() -> list[Job]:
    def step(name: str, model: str, *words: str, part: str = "decode") -> Job:
        return Job(name, part, [*STEP, f"configs/shapes/{model}", *words])

    def batches(*sizes: int) -> list[str]:
        return ["--batch", *map(str, sizes)]

    decode = [step(f"{model}-1k", model, *batches(1, 2, 4, 8, 16, 32, 64, 128, 256)) for model in MODELS]
    decode += [step(f"{model}-8k", model, *batches(1, 8, 32), "--context", "8192") for model in MODELS]
    decode += [step(f"{model}-32k", model, *batches(1, 8), "--context", "32768") for model in MODELS[:2]]  # Moonlight ends at 8k
    decode += [step("deterministic", MODELS[0], *batches(1, 8, 32, 128), "--stack", "deterministic")]
    traces = [step(f"{model}-trace", model, *batches(1, 8, 32, 128), "--trace", "{folder}", part="traces") for model in MODELS]
    plans = ["--shared-expert", "serial", "overlap"]
    layers = [
        step("deepseek-v3-layers", "deepseek-v3", "--layers", "8", *batches(1, 8, 32, 128), *plans, part="layers"),
        step(
            "deepseek-v3-fused",
            "deepseek-v3",
            "--layers",
            "8",
            *batches(1, 8, 32, 128),
            "--shared-expert",
            "fused",
            part="layers",
        ),
        step("qwen2-57b-layers", "qwen2-57b-a14b", "--layers", "10", *batches(1, 8, 32, 128), *plans, part="layers"),
    ]
    # What answers of 256 tokens after 1,024 find on average, for the time between two tokens through HTTP.
    beside_http = [step(f"{model}-1152", model, *batches(1, 8, 32, 128), "--context", "1152", part="http") for model in MODELS]
    http = [Job(f"{model}-http", "http", ["-m", "tools.http_table", f"configs/shapes/{model}"], 1.0, 400) for model in MODELS]
    others = [
        Job("load", "load", ["-m", "tools.load_throughput", "--gb", "20"], 1.0, 580),
        Job("kernels", "kernels", ["-m", "minserve.kernels.bench"], 1.0, 300),
    ]
    return decode + layers + beside_http + http + others + traces


def _several_gpus() -> list[Job]:
    found = []
    # As many of DeepSeek-V3's 61 layers as fit beside a KV cache.
    for ranks, layers in ((2, 19), (4, 40), (8, 61)):
        size = ["--ep-size", str(ranks)]
        batches = ["--batch", "1", "32", "128"]
        large = [*STEP, "configs/shapes/deepseek-v3", *size, *batches, "--layers", str(layers), "--shared-expert"]
        skewed = [*large, "overlap", "--skew", "0.05"]
        # Qwen2's layer with the experts of Qwen3.5-397B-A17B.
        gated = [*STEP, "configs/shapes/qwen3.5-397b-a17b-experts", *size, *batches, "--shared-expert"]
        load = f"{{folder}}/../ep{ranks}-load.json"
        commands = {
            "exchange": ["tools/bench_exchange.py", *size],
            "deepseek-v3": [*large, "serial", "overlap"],
            "deepseek-v3-nccl": [*large, "overlap", "--moe-dispatcher", "torch"],
            "deepseek-v3-skew": [*skewed, "--record-load", load],
            "deepseek-v3-copies": [*skewed, "--redundant-experts", "32", "--expert-load", load],
            "qwen3.5-397b": [*gated, "serial", "overlap"],
        }
        if ranks > 2:
            commands["qwen3-235b"] = [*STEP, "configs/shapes/qwen3-235b-a22b-fp8", *size, *batches]
        found += [Job(f"ep{ranks}-{name}", "ep", words, ranks, 500) for name, words in commands.items()]
    return found


class Running(NamedTuple):
    job: Job
    process: subprocess.Popen[bytes]
    devices: list[str]
    began: float


class Machine:
    """GPUs and what runs on them."""

    def __init__(self, devices: list[str], folder: Path, console: Console) -> None:
        self._free = dict.fromkeys(devices, 1.0)
        self._folder = folder
        self._console = console
        self.running: list[Running] = []
        self.failed: list[Job] = []

    def start(self, job: Job) -> bool:
        """False when there is no room for it now."""
        share = min(job.gpus, 1.0)
        devices = [name for name, free in self._free.items() if free >= share - 1e-6][: max(1, round(job.gpus))]
        if len(devices) < job.gpus:
            return False
        for name in devices:
            self._free[name] -= share
        own = self._folder / job.name
        own.mkdir(exist_ok=True)
        words = [sys.executable, *(word.replace("{folder}", str(own)) for word in job.words)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1", **job.environment}
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        # Scripts in other folders find the package, be it installed or not.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with (self._folder / f"{job.name}.log").open("wb") as log:
            process = subprocess.Popen(
                words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self.running.append(Running(job, process, devices, time.monotonic()))
        self._console.print(f"{job.name} starts on GPU {', '.join(devices)}")
        return True

    def reap(self) -> None:
        """Takes note of what has ended; ends what has run for too long."""
        for one in list(self.running):
            seconds = time.monotonic() - one.began
            code = one.process.poll()
            if code is None and seconds < one.job.seconds:
                continue
            self._end(one)
            told = f"{one.job.name} {'was cut' if code is None else f'ended with {code}'} after {seconds:.0f} s"
            if code == 0:
                (self._folder / f"{one.job.name}.done").write_text(told + "\n")
            else:
                self.failed.append(one.job)
            self._console.print(told)

    def end_all(self) -> None:
        for one in list(self.running):
            self._end(one)
            self.failed.append(one.job)
            self._console.print(f"{one.job.name} was cut")

    def _end(self, one: Running) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
        self.running.remove(one)
        for name in one.devices:
            self._free[name] += min(one.job.gpus, 1.0)


def gpus() -> list[str]:
    """Those of CUDA_VISIBLE_DEVICES, or all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(index) for index in range(torch.cuda.device_count())]


def run(waiting: list[Job], machine: Machine, seconds: float) -> None:
    """Whatever ends it ends the jobs: a terminal's Ctrl-C does not reach them."""
    end = time.monotonic() + seconds
    try:
        while (waiting or machine.running) and time.monotonic() < end:
            machine.reap()
            started = next((job for job in waiting if machine.start(job)), None)
            if started is not None:
                waiting.remove(started)
            else:
                time.sleep(0.2)
    finally:
        machine.end_all()


def tables(log: Path) -> str:
    """The end of what a job said, but for lines of JSON and progress."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if not re.match(r"\[?\{|\s*$", line)]
    return "\n".join(lines[-SHOWN_LINES:])


def main(arguments: list[str] | None = None) -> int:
    every = jobs()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", nargs="+", choices=sorted({job.part for job in every}), help="default: all")
    parser.add_argument("--only", nargs="+", choices=[job.name for job in every], metavar="JOB", help="these jobs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="cut what still runs after so long")
    parser.add_argument("--list", action="store_true", help="list the jobs and end")
    options = parser.parse_args(arguments)
    chosen = [job for job in every if job.part in (options.parts or job.part) and job.name in (options.only or job.name)]
    console = Console(highlight=False, soft_wrap=True)
    if options.list:
        for part, ours in itertools.groupby(chosen, lambda job: job.part):
            console.print(part + ": " + ", ".join(job.name for job in ours))
        return 0
    devices = gpus()
    if not devices:
        console.print("torch sees no GPU, or CUDA_VISIBLE_DEVICES is empty")
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    todo = [job for job in chosen if not (options.folder / f"{job.name}.done").exists()]
    for job in [job for job in todo if job.gpus > len(devices)]:
        console.print(f"{job.name} is left out: it needs {job.gpus:.0f} GPUs, and {len(devices)} are visible")
        todo.remove(job)
    machine = Machine(devices, options.folder, console)
    run(list(todo), machine, options.seconds)
    for job in chosen:
        log = options.folder / f"{job.name}.log"
        if log.exists():
            console.print(f"\n== {job.name}\n{tables(log)}")
    left = [job.name for job in chosen if not (options.folder / f"{job.name}.done").exists()]
    console.print(f"\n{len(chosen) - len(left)} of {len(chosen)} jobs are done; left: {', '.join(left) or 'none'}")
    return 1 if left else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
