"""Compiles the FlashInfer modules that the stacks use, ahead of any start and without a GPU, for `minserve prebuild`.

Takes minutes a module: the compiler's own time. Knows no model.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_BF16, _INT32 = torch.bfloat16, torch.int32
HEAD_DIMS = (128, 256)
LATENT, ROPE = 512, 64


def main(words: list[str]) -> int:
    """0 when every module is compiled; a failing compiler's last lines are printed and end it with 1."""
    parser = argparse.ArgumentParser(prog="minserve prebuild", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", default="9.0a", help="architectures to compile for, as FLASHINFER_CUDA_ARCH_LIST has them")
    parser.add_argument("--only", default="", help="modules whose name holds this word")
    options = parser.parse_args(words)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = options.arch.replace(",", " ")
    specs = [spec for spec in _specs() if options.only in spec.name and not spec.is_aot]
    console = Console(stderr=True)
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        for spec in specs:
            task = progress.add_task(spec.name, total=1)
            started = time.monotonic()
            try:
                spec.build()
            except Exception as error:  # whatever ninja and nvcc died of
                console.print(f"{spec.name} does not compile:\n" + "\n".join(str(error).splitlines()[-15:]), markup=False)
                return 1
            progress.update(task, completed=1)
            place = _ship(spec)
            sys.stdout.write(f"{spec.name}: {time.monotonic() - started:.0f} s, {place.stat().st_size / 1e6:.1f} MB, {place}\n")
    return 0


def _specs() -> list[Any]:
    """FlashInfer's build rules for what flashinfer_attention.py calls."""
    from flashinfer.jit.attention import gen_batch_mla_module, gen_batch_prefill_module  # reads the architectures at import

    prefills = [
        gen_batch_prefill_module("fa3", _BF16, _BF16, _BF16, _INT32, size, size, 0, False, False, False) for size in HEAD_DIMS
    ]
    return [gen_batch_mla_module("fa3", _BF16, _BF16, _BF16, _INT32, LATENT, ROPE, False), *prefills]


def _ship(spec: Any) -> Path:
    """Moves the compiled module to where FlashInfer takes finished ones from without asking its compiler again."""
    finished: Path = spec.aot_path
    if not finished.exists():
        try:
            finished.parent.mkdir(parents=True, exist_ok=True)
            finished.write_bytes(spec.jit_library_path.read_bytes())
        except OSError:
            return Path(spec.jit_library_path)  # a package folder that is not ours: the cache folder serves as well
    return finished


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
