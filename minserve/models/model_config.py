"""What a model is in numbers, once its config.json has been read and checked. Knows neither JSON nor torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from minserve.kernels.interface import RouterConfig

WeightDtype = Literal["bfloat16", "float16", "float32"]


@dataclasses.dataclass(frozen=True, slots=True)
class YarnConfig:
    """YaRN (arXiv 2309.00071): long wavelengths interpolated by `factor`, short ones left, a ramp between."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Round the ramp's ends outwards to whole dims."""
    attention_factor: float
    """Multiplies cos and sin."""


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of the first `rotary_dim` dims of a head."""

    theta: float
    rotary_dim: int
    interleaved: bool
    """Pairs (2i, 2i + 1) rather than (i, i + rotary_dim / 2)."""
    yarn: YarnConfig | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class GqaConfig:
    """Grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    """RMSNorm of each query and key head before the rotation."""
    scale: float
    """Softmax scale."""


@dataclasses.dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    num_heads: int
    q_lora_rank: int | None
    """None: queries come from one projection."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    """Softmax scale, YaRN's squared factor included."""


@dataclasses.dataclass(frozen=True, slots=True)
class MoeConfig:
    """The Mixture-of-Experts layers."""

    num_experts: int
    intermediate_size: int
    """Width of one routed expert."""
    router: RouterConfig
    correction_bias: bool
    """The router carries `e_score_correction_bias`."""
    shared_intermediate_size: int
    """Width of the shared expert; 0 where there is none."""
    shared_gated: bool
    """The shared expert's output is multiplied by sigmoid(gate(x))."""
    sparse_layers: tuple[bool, ...]
    """One per layer: True for experts, False for a dense MLP."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """One checkpoint's architecture."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    """Width of the dense MLPs."""
    rms_norm_eps: float
    max_position_embeddings: int
    """Longest context, YaRN's extension included."""
    rope: RopeConfig
    attention: GqaConfig | MlaConfig
    moe: MoeConfig | None
    tie_word_embeddings: bool
    num_nextn_predict_layers: int
    """Multi-token prediction layers that follow the last layer in the checkpoint; not used."""
    eos_token_ids: tuple[int, ...]
    """Of config.json, then those that only generation_config.json has."""
    dtype: WeightDtype
    """The type that the checkpoint says it is in; bfloat16 where it says nothing."""
    raw: Mapping[str, Any]
    """The whole config.json, a wrapper's text_config laid over it."""
