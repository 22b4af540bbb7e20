"""Tiny checkpoints in the exact form of published releases: names, types, index, quantisation sections, each with the plain
checkpoint of the values that it stands for. Packing is spelled out value by value, as the formats' pages do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_checkpoints import write_checkpoint as write_tiny
from torch import Tensor
from weights.toy_model import write_checkpoint

from tools.quantize_fp8 import quantize_checkpoint

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
INT4_CONFIG: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip
NVFP4_CONFIG: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.41.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": [
            "language_model.lm_head",
            *(f"language_model.layers.{layer}.self_attn*" for layer in range(3)),
            *(f"language_model.layers.{layer}.mlp.shared_experts*" for layer in range(1, 3)),
            "language_model.layers.0.mlp.*",
            "vision_tower*",
        ],
    },
}
VISION = {
    "vision_tower.encoder.blocks.0.mlp.fc0.weight": torch.ones(8, 4, dtype=torch.bfloat16),
    "mm_projector.proj.0.weight": torch.ones(4, 8, dtype=torch.bfloat16),
}
RELEASES = (
    "DeepSeek-V3", "Moonlight-16B-A3B", "Kimi-K2-Instruct", "Qwen3-30B-A3B", "Qwen3-30B-A3B-FP8", "Kimi-K2-Thinking",
    "Kimi-K2.5", "Kimi-K2.6", "Kimi-K2.5-NVFP4",
)  # fmt: skip


def pack_int4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The three tensors of compressed-tensors by suffix, and the matrix that they stand for (fp32)."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // 32, 32)
    scale = (groups.abs().amax(-1).clamp(min=1e-6) / 7).bfloat16()
    levels = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).to(torch.int64).view(rows, columns)
    packed = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for place in range(8):
        packed += (levels[:, place::8] + 8) << (4 * place)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    wide = torch.stack([levels[:, c].float() * scale[:, c // 32].float() for c in range(columns)], dim=1)
    return {"_packed": packed, "_scale": scale, "_shape": torch.tensor([rows, columns], dtype=torch.int32)}, wide


def pack_nvfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of modelopt by suffix, and the matrix that they stand for (fp32)."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // 16, 16)
    second = groups.abs().max() / (6 * 448)
    scale = (groups.abs().amax(-1) / 6 / second).to(torch.float8_e4m3fn)
    factor = scale.float() * second
    quotient = groups / factor.clamp(min=1e-12).unsqueeze(-1)
    table = torch.tensor(E2M1)
    code = (quotient.abs().unsqueeze(-1) - table).abs().argmin(-1)
    wide = (table[code] * quotient.sign() * factor.unsqueeze(-1)).view(rows, columns)
    code = torch.where(quotient < 0, code + 8, code).view(rows, columns)
    packed = (code[:, 0::2] + 16 * code[:, 1::2]).to(torch.uint8)
    return {"": packed, "_scale": scale, "_scale_2": second, "_input": torch.tensor(0.01)}, wide


def write_release(name: str, directory: Path, **overrides: Any) -> tuple[Path, Path]:
    """(the release, the plain checkpoint with the same values in fp32); `overrides`: fields of its config.json."""
    variant = {"D": "deepseek_v3_small", "M": "moonlight", "K": "kimi_k2", "Q": "qwen3_moe"}[name[0]]
    overrides |= {"num_nextn_predict_layers": 1} if name == "DeepSeek-V3" else {}
    plain = write_tiny(variant, directory / "plain", **overrides)
    if name in ("DeepSeek-V3", "Kimi-K2-Instruct", "Qwen3-30B-A3B-FP8"):
        quantize_checkpoint(plain, directory / "release")
        return directory / "release", _widened_fp8(directory / "release", directory / "wide")
    if name in ("Moonlight-16B-A3B", "Qwen3-30B-A3B"):
        return plain, plain
    pack = pack_nvfp4 if name.endswith("NVFP4") else pack_int4
    tensors, wide = _quantised_experts(load_file(plain / "model.safetensors"), pack)
    config = json.loads((plain / "config.json").read_text())
    quantization = {} if name.endswith("NVFP4") else {"quantization_config": INT4_CONFIG}
    if name == "Kimi-K2-Thinking":
        release = write_checkpoint(directory / "release", tensors, 3, {**config, **quantization})
    else:
        wrapper = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "vision_config": {"depth": 1}}
        inner = "language_model." if name.endswith("NVFP4") else "language_model.model."
        tensors = {_wrapped(key, inner): value for key, value in tensors.items()} | VISION
        release = write_checkpoint(directory / "release", tensors, 3, {**wrapper, "text_config": {**config, **quantization}})
    if name.endswith("NVFP4"):
        (release / "hf_quant_config.json").write_text(json.dumps(NVFP4_CONFIG))
    shutil.copytree(plain, directory / "wide")
    write_checkpoint(directory / "wide", wide, 0, config)
    return release, directory / "wide"


def _quantised_experts(
    tensors: Mapping[str, Tensor], pack: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    stored, wide = {}, {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            stored[name], wide[name] = tensor, tensor.float()
            continue
        parts, wide[name] = pack(tensor)
        for suffix, part in parts.items():
            stored[name.removesuffix("weight") + "input_scale" if suffix == "_input" else name + suffix] = part
    return stored, wide


def _wrapped(name: str, inner: str) -> str:
    return inner + name.removeprefix("model.") if name.startswith("model.") else f"language_model.{name}"


def _widened_fp8(release: Path, directory: Path) -> Path:
    tensors = load_file(release / "model.safetensors")
    wide = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        value = tensor.float()
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            rows, columns = (torch.arange(size) // 128 for size in tensor.shape)
            value *= scale[rows[:, None], columns[None, :]]
        wide[name] = value
    config = json.loads((release / "config.json").read_text())
    config.pop("quantization_config")
    return write_checkpoint(directory, wide, 0, config)
