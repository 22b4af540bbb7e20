"""The arithmetic of plans against the models themselves, built at full size without memory."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from minserve.kernels import reference
from minserve.kernels.interface import Kernels, kv_page_shape
from minserve.models.checkpoint import read_quantization_config
from minserve.models.coverage import prove_coverage
from minserve.models.decoder import Decoder
from minserve.models.formats import LAYOUTS, Format, stored_names
from minserve.models.quantization_claim import formats_from_config
from minserve.models.registry import build_model, load_model_config
from minserve.models.tensor_names import canonical_name
from minserve.roofline import kv_bytes_per_token, parameters, shape_from_config, weight_bytes

SHAPES = Path(__file__).parent.parent.parent / "configs" / "shapes"
NAMES = sorted(path.name for path in SHAPES.iterdir() if path.is_dir())


@functools.cache
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


def published_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Every tensor that the release's index lists, spelled out (prediction layers and packed shapes apart)."""
    quantization = config.get("quantization_config", {}).get("quant_method")
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from (f"{prefix}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm"))
        if "kv_lora_rank" in config:
            query = ("q_a_proj", "q_b_proj") if config["q_lora_rank"] else ("q_proj",)
            matrices = [f"self_attn.{part}" for part in (*query, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
            norms = ["self_attn.kv_a_layernorm", *(["self_attn.q_a_layernorm"] if config["q_lora_rank"] else [])]
            dense = layer < config["first_k_dense_replace"]
        else:
            matrices = [f"self_attn.{part}_proj" for part in "qkvo"]
            norms, dense = ["self_attn.q_norm", "self_attn.k_norm"], False
        if config["model_type"] == "qwen2_moe":
            norms = []
            yield from (f"{prefix}.self_attn.{part}_proj.bias" for part in "qkv")
        yield from (f"{prefix}.{norm}.weight" for norm in norms)
        if dense:
            matrices += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
        else:
            yield f"{prefix}.mlp.gate.weight"
            if config.get("topk_method") == "noaux_tc":
                yield f"{prefix}.mlp.gate.e_score_correction_bias"
            if config["model_type"] == "qwen2_moe":
                yield f"{prefix}.mlp.shared_expert_gate.weight"
            shared = "shared_experts" if config.get("n_shared_experts") else "shared_expert"
            if config.get("n_shared_experts") or config["model_type"] == "qwen2_moe":
                matrices += [f"mlp.{shared}.{part}_proj" for part in ("gate", "up", "down")]
            for expert in range(config.get("n_routed_experts") or config["num_experts"]):
                for part in ("gate", "up", "down"):
                    module = f"{prefix}.mlp.experts.{expert}.{part}_proj"
                    if quantization == "compressed-tensors":
                        yield from (f"{module}.weight_packed", f"{module}.weight_scale")
                    else:
                        matrices.append(module.removeprefix(f"{prefix}."))
        for matrix in matrices:
            yield f"{prefix}.{matrix}.weight"
            if quantization == "fp8":
                yield f"{prefix}.{matrix}.weight_scale_inv"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("kimi-k2-instruct", "qwen3-235b-a22b")])
def test_models_ask_for_exactly_the_published_names(name: str) -> None:
    config = json.loads((SHAPES / name / "config.json").read_text())
    asked = [stored for d in built(name).destinations() for stored in stored_names(d.name, d.widen_from)]
    expected = list(published_names(config))
    assert len(set(asked)) == len(asked)
    assert set(asked) == set(expected)
    for prefix, inner in (("language_model.", "language_model.model."), ("", "model.language_model.")):
        wrapped = [inner + stored.removeprefix("model.") if stored.startswith("model.") else prefix + stored for stored in asked]
        assert [canonical_name(stored) for stored in wrapped] == asked
