"""Makes tiny random checkpoints of every architecture with transformers, for all rooms' tests.

The values are exact in bf16, so that a bf16 file and the float32 reference are the same model. They are spread widely enough
(norms away from 1, biases away from 0, peaked routers) that each rule of an architecture shows in the logits.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 320
EOS_ID, BOS_ID = 257, 256

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
_MLA = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
}
_V3 = {
    **_MLA,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
_QWEN = {"num_key_value_heads": 2, "num_experts_per_tok": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One architecture in one dress."""

    architecture: str
    config: dict[str, Any]
    published: bool = False
    """config.json is written as the model's makers do (rope_scaling, torch_dtype) and not as transformers 5 does."""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the published config.json that transformers' class does not have."""


ALIGNED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "intermediate_size": 384,
        "q_lora_rank": 128,
        "num_nextn_predict_layers": 0,
    },
    "moonlight": {"hidden_size": 192, "moe_intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8},
    "qwen2_moe": {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "num_key_value_heads": 2,
    },
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 64},
}
"""Sizes for `write_checkpoint` with which FP8's blocks of 128 end where the matrices of one product do, so that they stay FP8."""

VARIANTS: dict[str, Variant] = {
    "qwen3_moe": Variant("Qwen3Moe", {**_QWEN, "num_experts": 8, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3_moe_tied": Variant(
        "Qwen3Moe",
        {**_QWEN, "num_experts": 8, "head_dim": 16, "norm_topk_prob": True, "tie_word_embeddings": True, "mlp_only_layers": [1]},
        published=True,
    ),
    "qwen3_moe_yarn": Variant(
        "Qwen3Moe", {**_QWEN, "num_experts": 8, "head_dim": 32, "norm_topk_prob": True, "rope_parameters": _YARN}, published=True
    ),
    "qwen2_moe": Variant("Qwen2Moe", {**_QWEN, "num_experts": 6, "shared_expert_intermediate_size": 48}, published=True),
    "qwen2_moe_sparse_step": Variant(
        "Qwen2Moe", {**_QWEN, "num_experts": 6, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2}
    ),
    "deepseek_v2": Variant(
        "DeepseekV2",
        {
            **_MLA,
            "q_lora_rank": 48,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 4.0,
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2_lite": Variant(
        "DeepseekV2",
        {
            **_MLA,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            # The latents' own norms are published with a fixed epsilon.
            "rms_norm_eps": 1e-2,
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        published=True,
        extra={"scoring_func": "softmax", "moe_layer_freq": 1, "seq_aux": True},
    ),
    "deepseek_v3": Variant(
        "DeepseekV3",
        {
            **_V3,
            # The published head sizes.
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "q_lora_rank": 48,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 1,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        published=True,
        extra={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1},
    ),
    "deepseek_v3_small": Variant(
        "DeepseekV3",
        {
            **_V3,
            "q_lora_rank": 48,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "moonlight": Variant(
        "DeepseekV3",
        {
            **_V3,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.446,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        },
        published=True,
        extra={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "kimi_k2": Variant(
        "DeepseekV3",
        {
            **_V3,
            "q_lora_rank": 48,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {**_YARN, "rope_theta": 50000.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        published=True,
        extra={"model_type": "kimi_k2", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "seq_aux": True},
    ),
}


@dataclasses.dataclass(frozen=True)
class TinyCheckpoint:
    """A variant on disk and in transformers."""

    name: str
    directory: Path
    reference: Any


def reference_model(name: str, seed: int = 0, **overrides: Any) -> Any:
    """transformers' model of a variant in float32, eager attention, random values exact in bf16 (correction biases in fp32)."""
    variant = VARIANTS[name]
    values = {**_COMMON, **variant.config, **overrides}
    config = getattr(transformers, f"{variant.architecture}Config")(**values)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{variant.architecture}ForCausalLM")(config).float().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        parameter.copy_(_random(parameter_name, parameter.shape, generator).bfloat16().float())
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            # Mostly below the negative of a sigmoid's range: a choice then scores under zero, where a wrong mask shows.
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3 - 1.0)
    return model


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 0.4 * values if name.endswith("bias") else 1.0 + 0.3 * values
    if "embed_tokens" in name:
        return values
    gain = 2.0 if name.endswith(("mlp.gate.weight", "q_proj.weight", "q_b_proj.weight")) else 1.3
    return values * gain / math.sqrt(shape[-1])


def write_checkpoint(
    name: str, directory: Path, *, seed: int = 0, tokenizer: bool = False, dtype: str = "bfloat16", **overrides: Any
) -> Path:
    """A variant's folder: config.json, generation_config.json, model.safetensors and, on demand, a byte-level tokenizer."""
    return save_checkpoint(name, reference_model(name, seed, **overrides), directory, tokenizer=tokenizer, dtype=dtype)


def save_checkpoint(name: str, model: Any, directory: Path, *, tokenizer: bool = False, dtype: str = "bfloat16") -> Path:
    """The same from a model that `reference_model` made; returns the folder."""
    variant = VARIANTS[name]
    copy.deepcopy(model).to(getattr(torch, dtype)).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    biases = {key: value for key, value in model.state_dict().items() if key.endswith("e_score_correction_bias")}
    tensors |= {key: value.clone() for key, value in biases.items()}
    config = json.loads((directory / "config.json").read_text())
    if variant.published:
        config = _as_published(config) | variant.extra
    if config.get("num_nextn_predict_layers"):
        tensors |= _prediction_layer(tensors, config["num_hidden_layers"])
    if name == "deepseek_v2":
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    if tokenizer:
        write_tokenizer(directory)
    return directory


def _as_published(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json of the time before transformers 5."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    for derived in ("qk_head_dim", "rope_interleave", "layer_types"):
        config.pop(derived, None)
    if "kv_lora_rank" in config:
        config.pop("head_dim")
    return config


def _prediction_layer(tensors: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    """A multi-token prediction layer after the last, as DeepSeek-V3 ships one."""
    last, own = f"model.layers.{index - 1}.", f"model.layers.{index}."
    layer = {own + key.removeprefix(last): value.clone() for key, value in tensors.items() if key.startswith(last)}
    hidden = tensors["model.norm.weight"].shape[0]
    layer[own + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    layer[own + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    layer[own + "eh_proj.weight"] = torch.zeros(hidden, 2 * hidden, dtype=torch.bfloat16)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"{own}{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return layer


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json: one token a byte, then <|bos|>, <|end|> and the roles."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
