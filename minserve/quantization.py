"""Reads a checkpoint's JSON files, and which storage format a config announces. Knows no tensors: these are believed instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from minserve.errors import CheckpointError

FP8_BLOCK = 128
"""Rows and columns of a block that shares one FP8 scale."""
INT4_GROUP = 32
"""Values along a row that share one INT4 scale."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The file's object; CheckpointError when it is absent, no JSON or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def read_config_json(model_dir: Path) -> dict[str, Any]:
    """config.json, with the quantisation section that hf_quant_config.json has where config.json has none."""
    config, elsewhere = read_json_object(model_dir / "config.json"), model_dir / "hf_quant_config.json"
    if elsewhere.exists() and not quantization_section(config):
        config["quantization_config"] = read_json_object(elsewhere).get("quantization")
    return config


def quantization_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a config.json, be it at its top or in its text_config; empty when there is none."""
    parts = (part for part in (config.get("text_config"), config) if isinstance(part, Mapping))
    sections = (part.get("quantization_config") for part in parts)
    return next((section for section in sections if isinstance(section, Mapping) and section), {})


def claimed_format(quantization: Mapping[str, Any]) -> Literal["fp8_block", "int4_group", "nvfp4"] | None:
    """The format that a section announces, None when it names none. CheckpointError for one that is not supported."""
    method, algorithm = quantization.get("quant_method"), quantization.get("quant_algo")
    if method == "fp8":
        size = quantization.get("weight_block_size")
        if size is not None and size != [FP8_BLOCK, FP8_BLOCK]:
            raise CheckpointError(
                f"quantization_config.weight_block_size {size!r} is not supported, only [{FP8_BLOCK}, {FP8_BLOCK}]"
            )
        return "fp8_block"
    if method == "compressed-tensors":
        _prove_int4_claim(quantization)
        return "int4_group"
    if algorithm == "NVFP4" and method in (None, "modelopt", "modelopt_fp4"):
        return "nvfp4"
    if method is None and algorithm is None:
        return None
    named = " ".join(str(part) for part in (method, algorithm) if part is not None)
    raise CheckpointError(
        f"quantization_config: {named!r:.100} is not supported; supported: fp8 in blocks of {FP8_BLOCK}, compressed-tensors "
        f"INT4 in groups of {INT4_GROUP}, modelopt NVFP4"
    )


def _prove_int4_claim(quantization: Mapping[str, Any]) -> None:
    layout, groups = quantization.get("format"), quantization.get("config_groups")
    schemes = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    expected = {"num_bits": 4, "type": "int", "group_size": INT4_GROUP, "symmetric": True}
    for scheme in schemes:
        for field, value in expected.items():
            said = scheme.get(field, value) if isinstance(scheme, dict) else None
            if said != value:
                raise CheckpointError(f"quantization_config: weights.{field} is {said!r}; supported: {value!r}")
    if layout != "pack-quantized" or not schemes:
        raise CheckpointError(f"quantization_config: format {layout!r} is not supported; supported: 'pack-quantized' INT4")
