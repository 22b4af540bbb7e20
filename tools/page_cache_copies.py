"""Measures ways out of the page cache: reads into pinned memory, and copies from mapped files, registered with CUDA or not.

`python -m tools.page_cache_copies DIRECTORY [--device cpu]` takes the directory's files as they are; read them once before, so
that they are cached. Each way runs in a process of its own, and may be refused: that is its row then. Last line JSON. Knows no
checkpoint and no loader.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import mmap
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MIB = 1 << 20
READ_THREADS, READ_BLOCKS = (8, 16, 32, 64), (4 * MIB, 16 * MIB, 64 * MIB)
COPY_THREADS, COPY_BLOCK = (1, 4, 8, 16, 32), 16 * MIB
REGISTER_THREADS = (1, 8)
RANGE_BYTES, MAPPED_BYTES = 1 << 30, 8 << 30
"""Files are registered range by range, and mapped until there is so much: some ways take as long as many reads."""
READ_ONLY = 0x08
"""cudaHostRegisterReadOnly: else the driver wants to write to the pages, which a mapping for reading refuses."""


class Row(NamedTuple):
    """One measurement: `act` gives seconds by what they were spent on, all of which count, and `bytes`."""

    name: str
    act: Callable[[], dict[str, float]]


def read_rows(files: Sequence[Path], device: torch.device, *, huge: bool) -> Iterator[Row]:
    """Positioned reads, no copy to the GPU: into memory that CUDA pinned, or into huge pages, which could be pinned as well."""
    size = max(READ_THREADS) * max(READ_BLOCKS)
    if huge:
        memory = mmap.mmap(-1, size)
        memory.madvise(mmap.MADV_HUGEPAGE)
        room = torch.frombuffer(memory, dtype=torch.uint8)
    else:
        room = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    room.fill_(1)
    for block in READ_BLOCKS:
        for threads in READ_THREADS:
            yield Row(f"{threads} threads, {_size(block)}", functools.partial(read, files, room, threads, block))


def read(files: Sequence[Path], room: Tensor, threads: int, block: int) -> dict[str, float]:
    """All files once, each thread into its own block of `room`, uint8 [threads * block at least]."""
    with contextlib.ExitStack() as opened:
        descriptors = [opened.enter_context(file.open("rb")).fileno() for file in files]
        places = [(fd, begin) for fd in descriptors for begin in range(0, os.fstat(fd).st_size, block)]

        def lane(number: int) -> int:
            buffer = room[number * block : (number + 1) * block].numpy().data
            return sum(os.preadv(fd, [buffer], begin) for fd, begin in places[number::threads])

        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            total = sum(pool.map(lane, range(threads)))
        return {"read": time.perf_counter() - began, "bytes": total}


def copy_rows(files: Sequence[Path], device: torch.device, *, populate: bool) -> Iterator[Row]:
    """Straight from mapped files, which CUDA does not know of: to the GPU, and by the CPU alone into pinned memory."""
    for to_gpu in (True, False) if device.type == "cuda" else (False,):
        for threads in COPY_THREADS:
            name = f"{threads} threads to {device.type if to_gpu else 'host memory'}"
            yield Row(name, functools.partial(_map_and_copy, files, device, threads, to_gpu=to_gpu, populate=populate))


def _map_and_copy(files: Sequence[Path], device: torch.device, threads: int, *, to_gpu: bool, populate: bool) -> dict[str, float]:
    targets = torch.empty(threads, COPY_BLOCK, dtype=torch.uint8, device=device if to_gpu else "cpu")
    targets = targets.pin_memory() if device.type == "cuda" and not to_gpu else targets.fill_(1)
    began = time.perf_counter()
    ranges = _ranges(files, populate=populate)
    made = time.perf_counter() - began
    return {"map": made, "copy": _copy(ranges, targets), "bytes": sum(part.nbytes for part in ranges)}


def register_rows(
    files: Sequence[Path], device: torch.device, *, flags: int, writable: bool = False, populate: bool = False
) -> Iterator[Row]:
    """From mapped files that CUDA pins where they are."""
    for threads in REGISTER_THREADS:
        act = functools.partial(_register_and_copy, files, device, threads, flags, writable=writable, populate=populate)
        yield Row(f"registered by {threads} threads", act)


def _register_and_copy(
    files: Sequence[Path], device: torch.device, threads: int, flags: int, *, writable: bool, populate: bool
) -> dict[str, float]:
    began = time.perf_counter()
    ranges = _ranges(files, populate=populate, writable=writable)
    seconds = {"map": time.perf_counter() - began}
    cuda: Any = torch.cuda.cudart()
    targets = torch.empty(1, COPY_BLOCK, dtype=torch.uint8, device=device)
    with contextlib.ExitStack() as registered:

        def register(part: Tensor) -> None:
            error = cuda.cudaHostRegister(part.data_ptr(), part.nbytes, flags)
            if int(error):
                raise OSError(f"refused: {cuda.cudaGetErrorString(error)}")
            registered.callback(cuda.cudaHostUnregister, part.data_ptr())

        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(register, ranges))
        seconds["register"] = time.perf_counter() - began
        seconds["copy"] = _copy(ranges, targets)
        began = time.perf_counter()
    seconds["unregister"] = time.perf_counter() - began
    return seconds | {"bytes": sum(part.nbytes for part in ranges)}


def _ranges(files: Sequence[Path], *, populate: bool, writable: bool = False) -> list[Tensor]:
    ranges: list[Tensor] = []
    for file in files:
        if sum(part.nbytes for part in ranges) < MAPPED_BYTES:
            ranges += mapped(file, populate=populate, writable=writable).split(RANGE_BYTES)
    return ranges


def mapped(file: Path, *, populate: bool, writable: bool = False) -> Tensor:
    """The file's bytes where the page cache has them, uint8 [size]; `populate` makes all of the page table's entries at once."""
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    with file.open("r+b" if writable else "rb") as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that nobody may write to it
        return torch.frombuffer(mmap.mmap(opened.fileno(), 0, flags=flags, prot=access), dtype=torch.uint8)


def _copy(sources: Sequence[Tensor], targets: Tensor) -> float:
    """Seconds for copies of all sources, piece by piece, each target [threads, COPY_BLOCK] on a thread and a stream of its own.

    RuntimeError when what arrived last is not what was sent.
    """
    threads, on_gpu = len(targets), targets.is_cuda
    pieces = [piece for source in sources for piece in source.split(COPY_BLOCK)]
    streams = [torch.cuda.Stream(targets.device) if on_gpu else None for _ in range(threads)]

    def lane(number: int) -> None:
        stream = streams[number]
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            for piece in pieces[number::threads]:
                target = targets[number][: len(piece)]
                if on_gpu:
                    target.copy_(piece, non_blocking=True)
                else:
                    np.copyto(target.numpy(), piece.numpy())  # memcpy: past the caches, which torch's own copy is not
        if stream is not None:
            stream.synchronize()

    if on_gpu:
        torch.cuda.synchronize(targets.device)
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lane, range(threads)))
    seconds = time.perf_counter() - began
    last = len(pieces) - 1
    if not torch.equal(targets[last % threads][: len(pieces[last])].cpu(), pieces[last]):
        raise RuntimeError("the bytes that arrived are not the file's")
    return seconds


WAYS: dict[str, Callable[[Sequence[Path], torch.device], Iterator[Row]]] = {
    "preadv into pinned": functools.partial(read_rows, huge=False),
    "preadv into huge pages": functools.partial(read_rows, huge=True),
    "mapping": functools.partial(copy_rows, populate=False),
    "populated mapping": functools.partial(copy_rows, populate=True),
    "registered, read-only": functools.partial(register_rows, flags=READ_ONLY),
    "registered, read-only, populated": functools.partial(register_rows, flags=READ_ONLY, populate=True),
    "registered, default": functools.partial(register_rows, flags=0),
    "registered, default, writable": functools.partial(register_rows, flags=0, writable=True),
}


def run(way: str, files: Sequence[Path], device: torch.device) -> list[dict[str, Any]]:
    """One row after the other; an error becomes its row's text."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.empty(1, device=device)
    results: list[dict[str, Any]] = []
    rows = iter(WAYS[way](files, device))
    while True:
        result: dict[str, Any] = {"way": way}
        try:
            row = next(rows, None)
            if row is None:
                return results
            result["row"] = row.name
            spent = row.act()
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        else:
            size = spent.pop("bytes") / 1e9
            result |= {"gb_per_second": size / sum(spent.values()), "gb": size, "seconds": spent}
        results.append(result)
        _say(describe(result))


def describe(result: dict[str, Any]) -> str:
    name = ", ".join(result[part] for part in ("way", "row") if part in result)
    if "error" in result:
        return f"{name:60} {result['error']}"
    parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in result["seconds"].items())
    return f"{name:60} {result['gb_per_second']:6.1f} GB/s ({result['gb']:.1f} GB: {parts})"


def measure(directory: Path, device: str) -> list[dict[str, Any]]:
    """All ways, each in a process of its own; rows are printed as they come."""
    results: list[dict[str, Any]] = []
    for way in WAYS:
        command = [sys.executable, "-m", "tools.page_cache_copies", str(directory), "--device", device, "--way", way]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            last = ""
            for line in child.stdout:
                if last:
                    _say(last)
                last = line.rstrip("\n")
        if child.returncode:
            results.append({"way": way, "error": f"its process ended with {child.returncode}"})
            _say("\n".join(filter(None, [last, describe(results[-1])])))
        else:
            results += json.loads(last)
    return results


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count} bytes"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.page_cache_copies", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--way", choices=WAYS, help="only this one, in this process")
    options = parser.parse_args()
    if options.way is None:
        results = measure(options.directory, options.device)
    else:
        files = sorted(options.directory.glob("*.safetensors"))
        results = run(options.way, files, torch.device(options.device))
    _say(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
