"""Measures how fast a checkpoint of Qwen3-MoE's form gets from the page cache into a model, and what host memory that takes.

Beside it, on the same files: `safetensors.torch.load_file` per shard, a plain copy from pinned memory, plain reads, and the other
ways of page_cache_copies.py. Every measurement runs in a process of its own. Last line JSON. Run it on a GPU machine:
`python -m tools.load_throughput`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from minserve.kernels import reference, stacks
from minserve.models.registry import build_model, load_model_config
from minserve.models.weights import formats_from_config, load_weights, open_checkpoint
from tools import page_cache_copies

SHAPE = Path(__file__).parent.parent / "configs" / "shapes" / "qwen3-30b-a3b" / "config.json"
PERIOD = 33_554_467
"""Random values that the files repeat: a prime, so that no two matrices are alike and a mix-up shows."""
SHARD_BYTES = 4e9
READ_BYTES = 16 << 20
READ_THREADS = 8


def write_checkpoint(directory: Path, num_bytes: float) -> int:
    """A checkpoint of at least this size, of random values; its size."""
    directory.mkdir(parents=True, exist_ok=True)
    config, total, shapes = json.loads(SHAPE.read_text()), 0, {}
    config["num_hidden_layers"] = 0
    while total < num_bytes:
        config["num_hidden_layers"] += 1
        (directory / "config.json").write_text(json.dumps(config))
        shapes = tensor_shapes(directory)
        total = sum(map(_num_bytes, shapes.values()))
    shards: list[dict[str, torch.Size]] = [{}]
    for name, shape in shapes.items():
        if sum(map(_num_bytes, shards[-1].values())) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    values = torch.randn(PERIOD, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16().view(torch.uint8).numpy().data
    with ThreadPoolExecutor(len(shards)) as pool:
        list(pool.map(lambda name, shard: _write_shard(directory / name, shard, memoryview(values)), names, shards))
    index = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    body = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(body))
    return total


def tensor_shapes(directory: Path) -> dict[str, torch.Size]:
    """Of the model that a config.json describes."""
    config, plain = load_model_config(directory), formats_from_config(None)
    model = build_model(config, plain, reference.cpu(), torch.bfloat16, torch.device("meta"))
    return {destination.name: destination.target.shape for destination in model.destinations()}


def _num_bytes(shape: torch.Size) -> int:
    return 2 * shape.numel()


def _write_shard(path: Path, shapes: dict[str, torch.Size], values: memoryview) -> None:
    header, end = {}, 0
    for name in sorted(shapes):
        begin, end = end, end + _num_bytes(shapes[name])
        header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        place = int(path.name[6:11]) * 7_000_002 % len(values)
        while end:
            written = file.write(values[place : min(place + end, len(values))])
            place, end = (place + written) % len(values), end - written


class HostMemory:
    """Follows the anonymous memory of this process in a thread; pinned memory is asked of its allocator."""

    def __init__(self) -> None:
        self.peak = self.start = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, anonymous_bytes())

    def end(self, device: torch.device) -> dict[str, float]:
        """GB above the start: anonymous at the peak, pinned at the peak."""
        self._stop.set()
        self._thread.join()
        pinned = torch.cuda.host_memory_stats()["allocated_bytes.peak"] if device.type == "cuda" else 0
        return {"anonymous_gb": (max(self.peak, anonymous_bytes()) - self.start) / 1e9, "pinned_gb": pinned / 1e9}


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


def time_minserve(directory: Path, device: torch.device, threads: int | None) -> dict[str, float]:
    """From the first look at the directory to the last byte's arrival, proofs included; the values are compared afterwards."""
    memory = HostMemory()
    config = load_model_config(directory)
    kernels = stacks.build("torch-gpu" if device.type == "cuda" else "cpu", device)
    model = build_model(config, open_checkpoint(directory).formats, kernels, torch.bfloat16, device)
    _synchronize(device)
    began = time.perf_counter()
    checkpoint = open_checkpoint(directory)
    opened = time.perf_counter() - began
    report = load_weights(model, checkpoint, threads=threads)
    _synchronize(device)
    seconds = time.perf_counter() - began
    result = {"seconds": seconds, "open_seconds": opened, "bytes": report.bytes_read, **memory.end(device)}
    targets = {destination.name: destination.target for destination in model.destinations()}
    for file in checkpoint.files:
        for name, stored in load_file(file, device=str(device)).items():
            if not torch.equal(targets.pop(name), stored):
                raise RuntimeError(f"{name} is not what the file says")
    if targets:
        raise RuntimeError(f"{len(targets)} tensors are in no file")
    return result


def time_load_file(directory: Path, device: torch.device, _threads: int | None) -> dict[str, float]:
    memory, total = HostMemory(), 0
    torch.empty(1, device=device)
    _synchronize(device)
    began = time.perf_counter()
    for file in sorted(directory.glob("*.safetensors")):
        total += sum(tensor.nbytes for tensor in load_file(file, device=str(device)).values())
        _synchronize(device)
    return {"seconds": time.perf_counter() - began, "bytes": total, **memory.end(device)}


def time_pinned_copy(_directory: Path, device: torch.device, _threads: int | None) -> dict[str, float]:
    size, rounds = 1 << 30, 8
    source = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda").random_()
    target = torch.empty(size, dtype=torch.uint8, device=device)
    target.copy_(source)
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(rounds):
        target.copy_(source, non_blocking=True)
    _synchronize(device)
    return {"seconds": time.perf_counter() - began, "bytes": size * rounds}


KINDS: dict[str, Callable[[Path, torch.device, int | None], dict[str, float]]] = {
    "minserve": time_minserve, "pinned copy": time_pinned_copy, "load_file": time_load_file,
}  # fmt: skip


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_child(kind: str, directory: Path, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "tools.load_throughput", "--directory", str(directory), "--device", options.device]
    command += ["--one", kind, *(["--threads", str(options.threads)] if options.threads else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result | {"gb_per_second": result["bytes"] / 1e9 / result["seconds"]}


def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    files = sorted(directory.glob("*.safetensors"))
    room = torch.empty(READ_THREADS * READ_BYTES, dtype=torch.uint8)
    reads = [
        page_cache_copies.read(files, room, READ_THREADS, READ_BYTES) for _ in range(1 + options.repeat)
    ]  # the first one caches
    results: dict[str, Any] = {"plain reads": [{"gb_per_second": spent["bytes"] / 1e9 / spent["read"]} for spent in reads[1:]]}
    say = sys.stdout.write
    for kind in [*KINDS] * options.repeat:
        results.setdefault(kind, []).append(in_child(kind, directory, options))
        say(f"{kind}: {results[kind][-1]['gb_per_second']:.1f} GB/s\n")
        sys.stdout.flush()
    say(f"{'':14}{'GB/s, median':>14}{'all':>22}{'anonymous':>12}{'pinned, GB':>12}\n")
    for kind, runs in results.items():
        speeds = [run["gb_per_second"] for run in runs]
        memory = [max(run.get(part, 0.0) for run in runs) for part in ("anonymous_gb", "pinned_gb")]
        spread = " ".join(f"{speed:.1f}" for speed in speeds)
        say(f"{kind:14}{statistics.median(speeds):14.1f}{spread:>22}{memory[0]:12.2f}{memory[1]:12.2f}\n")
    return results | {"other ways": page_cache_copies.measure(directory, options.device)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.load_throughput", description=__doc__)
    parser.add_argument("--gb", type=float, default=20.0, help="size of the checkpoint that is made")
    parser.add_argument("--directory", type=Path, help="where to make it and leave it; an existing one is used as it is")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="of minserve's reader; default: as it chooses itself")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        result = KINDS[options.one](options.directory, torch.device(options.device), options.threads)
        sys.stdout.write(json.dumps(result))
        return 0
    directory = options.directory or Path(tempfile.mkdtemp(prefix="minserve-load-"))
    try:
        if not (directory / "config.json").exists():
            began = time.perf_counter()
            total = write_checkpoint(directory, options.gb * 1e9)
            sys.stdout.write(f"{total / 1e9:.1f} GB written to {directory} in {time.perf_counter() - began:.1f} s\n")
        results = measure(directory, options)
    finally:
        if options.directory is None:
            shutil.rmtree(directory)
    sys.stdout.write(json.dumps(results | {"cores": os.cpu_count(), "torch": torch.__version__}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
