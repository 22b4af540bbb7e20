"""The arithmetic of plans against the models themselves, built at full size without memory."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from minserve.kernels import reference
from minserve.kernels.interface import Kernels, kv_page_shape
from minserve.models.checkpoint import read_quantization_config
from minserve.models.coverage import prove_coverage
from minserve.models.decoder import Decoder
from minserve.models.formats import LAYOUTS, Format
from minserve.models.model_config import load_model_config
from minserve.models.quantization_claim import formats_from_config
from minserve.models.registry import build_model
from minserve.roofline import kv_bytes_per_token, parameters, shape_from_config, weight_bytes

SHAPES = Path(__file__).parent.parent.parent / "configs" / "shapes"
NAMES = sorted(path.name for path in SHAPES.iterdir() if path.is_dir())


def built(name: str) -> Decoder:
    kernels: Kernels = dataclasses.replace(reference.cpu(), name="keeping", keeps_fp8=True)
    formats = formats_from_config(read_quantization_config(SHAPES / name))
    return build_model(load_model_config(SHAPES / name), formats, kernels, torch.bfloat16, torch.device("meta"))


def count_by_part(model: Decoder) -> Mapping[str, int]:
    """Parameters as the destinations declare them, without scales, under the parts' names in a plan."""
    counts: dict[str, int] = {}
    for destination in model.destinations():
        *module, leaf = destination.name.split(".")
        if leaf.startswith("weight_scale"):
            continue
        packed = LAYOUTS[kind_of(leaf)].packed
        counts[part_of(module)] = counts.get(part_of(module), 0) + destination.target.numel() * packed
    return counts


def kind_of(leaf: str) -> Format:
    return "int4_group" if leaf == "weight_packed" else "plain"


def part_of(module: list[str]) -> str:
    if module[-1] in ("embed_tokens", "lm_head"):
        return {"embed_tokens": "embedding"}.get(module[-1], module[-1])
    if "self_attn" in module:
        return "attention"
    if module[-1].endswith("norm"):
        return "norms"
    if "experts" in module:
        return "routed_experts"
    if {"shared_experts", "shared_expert", "shared_expert_gate"} & set(module):
        return "shared_expert"
    return "router" if module[-1] == "gate" else "dense_mlp"


@pytest.mark.parametrize("name", NAMES)
def test_plans_count_what_the_models_hold(name: str) -> None:
    shape = shape_from_config(json.loads((SHAPES / name / "config.json").read_text()))
    model = built(name)
    expected = {part: count for part, count in parameters(shape).items() if count}
    assert count_by_part(model) == expected
    memory = sum(value.nbytes for value in model.state_dict().values())
    assert memory == pytest.approx(sum(weight_bytes(shape).values()), rel=2e-4)
    assert prove_coverage(model.state_dict(), list(model.destinations())) == memory
    entries = math.prod(kv_page_shape(model.attention_shape, page_size=1))
    assert kv_bytes_per_token(shape) == model.num_layers * entries * 2
