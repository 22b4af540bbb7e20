"""Makes the FP8 twin of a bf16, fp16 or fp32 checkpoint, in the form in which DeepSeek and Qwen publish theirs.

    python tools/quantize_fp8.py SOURCE_DIR TARGET_DIR

Linear layers become float8_e4m3fn with one fp32 `weight_scale_inv` for each block of 128 x 128 (W = weight * scale); routers,
embeddings, norms, biases and the head stay as they are. config.json gains the quantization_config; all other files are copied.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from minserve.errors import CheckpointError
from minserve.models.checkpoint import INDEX_NAME, open_checkpoint
from minserve.models.formats import BLOCK, blocks, stored_names
from minserve.models.quantization_claim import formats_from_config
from minserve.models.tensor_names import canonical_name

FP8_MAX = 448.0
"""Largest finite value of e4m3."""

QUANTIZATION_CONFIG: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}


def quantize_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [N, K] as (float8_e4m3fn [N, K], fp32 scale [ceil(N/128), ceil(K/128)]); a block's largest value becomes 448."""
    rows, columns = weight.shape
    grid = blocks(rows), blocks(columns)
    padded = F.pad(weight.float(), (0, grid[1] * BLOCK - columns, 0, grid[0] * BLOCK - rows))
    tiles = padded.view(grid[0], BLOCK, grid[1], BLOCK)
    largest = tiles.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    # The quotient may round to just above the largest value, which the cast would turn into NaN.
    quotient = (tiles / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    return quotient.view_as(padded)[:rows, :columns].to(torch.float8_e4m3fn).contiguous(), scale


def quantize_checkpoint(source: Path, target: Path) -> tuple[int, int]:
    """Writes the twin; (tensors quantised, tensors kept). CheckpointError when the source is not whole or is FP8 already."""
    checkpoint = open_checkpoint(source)
    if checkpoint.formats.quantized:
        raise CheckpointError(f"{source} is quantised already")
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty")
    wanted = formats_from_config(QUANTIZATION_CONFIG)
    kept_apart = {tensor.name: tensor for tensors in checkpoint.set_aside.values() for tensor in tensors}
    weight_map: dict[str, str] = {}
    num_bytes = quantised = kept = 0
    for file in sorted({*checkpoint.files, *(tensor.file for tensor in kept_apart.values())}):
        written: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            if tensor.dim() == 2 and name not in kept_apart and wanted.of(canonical_name(name)) == "fp8_block":
                written |= zip(stored_names(name, "fp8_block"), quantize_block(tensor), strict=True)
                quantised += 1
            else:
                written[name] = tensor
                kept += 1
        save_file(written, target / file.name, metadata={"format": "pt"})
        (target / file.name).chmod(0o644)  # the library leaves it to its owner alone
        weight_map |= dict.fromkeys(written, file.name)
        num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in written.values())
    if (source / INDEX_NAME).exists():
        _write_json(target / INDEX_NAME, {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _write_json(target / "config.json", {**config, "quantization_config": QUANTIZATION_CONFIG})
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX_NAME, "config.json"):
            shutil.copyfile(file, target / file.name)
    return quantised, kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    try:
        quantised, kept = quantize_checkpoint(arguments.source, arguments.target)
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.exit_code)
    sys.stdout.write(f"{arguments.target}: {quantised:,} tensors quantised, {kept:,} kept\n")
    return 0


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
