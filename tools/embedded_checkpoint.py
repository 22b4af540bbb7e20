"""The embedded model's files: DeepSeek-V3's own names and config, written from the trainer's model and read back into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools import embedded_tokenizer
from tools.embedded_model import Block, EmbeddedModel, ModelShape

_BLOCK_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q_a": "self_attn.q_a_proj.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "q_b": "self_attn.q_b_proj.weight",
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "kv_b": "self_attn.kv_b_proj.weight",
    "o": "self_attn.o_proj.weight",
}

_SHAPE = {
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "dense_width": "intermediate_size",
    "expert_width": "moe_intermediate_size",
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "groups": "n_group",
    "top_k_groups": "topk_group",
    "scale": "routed_scaling_factor",
    "epsilon": "rms_norm_eps",
    "rope_theta": "rope_theta",
}
"""ModelShape's fields as config.json calls them, and below as its rope_scaling does."""
_YARN = {
    "yarn_factor": "factor",
    "yarn_original": "original_max_position_embeddings",
    "yarn_fast": "beta_fast",
    "yarn_slow": "beta_slow",
    "yarn_mscale": "mscale",
}


def parameter_views(model: EmbeddedModel) -> dict[str, Tensor]:
    """Checkpoint name -> the view of the model's parameter that it fills."""
    views = {"model.embed_tokens.weight": model.embed.data, "model.norm.weight": model.norm.data}
    views["lm_head.weight"] = model.head.data
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        prefix = f"model.layers.{index}."
        views |= {prefix + name: getattr(block, field).data for field, name in _BLOCK_NAMES.items()}
        if block.dense:
            views |= _mlp_views(f"{prefix}mlp.", block.w13.data, block.w2.data)
            continue
        views[f"{prefix}mlp.gate.weight"] = block.router.data
        views[f"{prefix}mlp.gate.e_score_correction_bias"] = block.bias
        views |= _mlp_views(f"{prefix}mlp.shared_experts.", block.w13.data, block.w2.data)
        for expert in range(block.shape.experts):
            views |= _mlp_views(f"{prefix}mlp.experts.{expert}.", block.experts13.data[expert], block.experts2.data[expert])
    return views


def _mlp_views(prefix: str, w13: Tensor, w2: Tensor) -> dict[str, Tensor]:
    gate, up = w13.chunk(2, 0)
    return {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up, f"{prefix}down_proj.weight": w2}


def save_checkpoint(model: EmbeddedModel, directory: Path) -> None:
    """model.safetensors in bf16 (the correction bias in fp32, as published), config.json and generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: view.to("cpu", torch.float32 if name.endswith("bias") else torch.bfloat16).contiguous().clone()
        for name, view in parameter_views(model).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    ids = {"bos_token_id": embedded_tokenizer.BOS_ID, "eos_token_id": embedded_tokenizer.EOS_ID}
    _write_json(directory / "config.json", published_config(model.shape) | ids)
    _write_json(directory / "generation_config.json", ids | {"do_sample": False})


def load_checkpoint(directory: Path) -> EmbeddedModel:
    """The trainer's model with the checkpoint's (bf16-rounded) values; KeyError or RuntimeError on a foreign checkpoint."""
    model = EmbeddedModel(shape_from_config(json.loads((directory / "config.json").read_text(encoding="utf-8"))))
    tensors = load_file(directory / "model.safetensors")
    for name, view in parameter_views(model).items():
        view.copy_(tensors.pop(name))
    if tensors:
        raise KeyError(f"unknown tensors: {sorted(tensors)}")
    return model


def published_config(shape: ModelShape) -> dict[str, object]:
    """config.json with the fields and spelling of the published DeepSeek-V3 checkpoints."""
    yarn = {name: getattr(shape, field) for field, name in _YARN.items()}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": shape.max_positions,
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": shape.heads,
        "num_nextn_predict_layers": 0,
        "rope_scaling": yarn | {"mscale_all_dim": shape.yarn_mscale, "type": "yarn"},
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    } | {name: getattr(shape, field) for field, name in _SHAPE.items()}


def shape_from_config(config: dict[str, Any]) -> ModelShape:
    """The inverse of `published_config`."""
    sizes = {field: config[name] for field, name in _SHAPE.items()}
    return ModelShape(**sizes, **{field: config["rope_scaling"][name] for field, name in _YARN.items()})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
