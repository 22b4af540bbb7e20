"""DeepSeek-V2 and V3 and what shares their format (R1, V3.1, Moonlight, Kimi K2 to K2.6): latent attention, grouped routing,
a shared expert in every MoE layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from minserve.errors import CheckpointError
from minserve.kernels.interface import RouterConfig
from minserve.models.build_context import BuildContext
from minserve.models.config_reader import Fields, read_decoder, read_rope, yarn_mscale
from minserve.models.decoder import Decoder
from minserve.models.layers.mla import MultiHeadLatentAttention
from minserve.models.layers.rotary import Rotary
from minserve.models.model_config import MlaConfig, ModelConfig, MoeConfig, RopeConfig

# ---- config


def parse_config(fields: Fields, architecture: str, model_dir: Path) -> ModelConfig:
    """Both generations; absent fields take the values that the published config classes give them."""
    v3 = architecture != "DeepseekV2ForCausalLM"
    fields.must_be("attention_bias", (False,))
    fields.must_be("mlp_bias", (False,))
    rope_dim = fields.integer("qk_rope_head_dim")
    rope = read_rope(fields, rope_dim, interleaved=fields.boolean("rope_interleave", default=True))
    if rope.rotary_dim != rope_dim:
        raise CheckpointError(f"{fields.where}: partial_rotary_factor is {rope.rotary_dim / rope_dim:g}; supported: 1")
    config = read_decoder(fields, architecture, model_dir, rope, _attention(fields, rope), _moe(fields, v3=v3))
    return dataclasses.replace(config, num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", default=0, minimum=0))


def _attention(fields: Fields, rope: RopeConfig) -> MlaConfig:
    nope = fields.integer("qk_nope_head_dim")
    scale = (nope + rope.rotary_dim) ** -0.5
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling")
    if rope.yarn is not None and scaling is not None:
        # The temperature of scores is mscale_all_dim's, on queries and keys alike: squared.
        scale *= yarn_mscale(rope.yarn.factor, scaling.number("mscale_all_dim", default=0.0)) ** 2
    return MlaConfig(
        num_heads=fields.integer("num_attention_heads"),
        q_lora_rank=None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope.rotary_dim,
        v_head_dim=fields.integer("v_head_dim"),
        scale=scale,
    )


def _moe(fields: Fields, *, v3: bool) -> MoeConfig | None:
    first_dense = fields.integer("first_k_dense_replace", default=3 if v3 else 0, minimum=0)
    every = fields.integer("moe_layer_freq", default=1)
    layers = range(fields.integer("num_hidden_layers"))
    if fields.get("n_routed_experts", "num_local_experts", "num_experts") is None:
        sparse: tuple[bool, ...] = ()
    else:
        sparse = tuple(layer >= first_dense and layer % every == 0 for layer in layers)
    if not any(sparse):
        return None
    width = fields.integer("moe_intermediate_size")
    return MoeConfig(
        num_experts=fields.integer("n_routed_experts", "num_local_experts", "num_experts"),
        intermediate_size=width,
        router=_router(fields, v3=v3),
        correction_bias=v3,
        shared_intermediate_size=width * fields.integer("n_shared_experts", default=1 if v3 else 0, minimum=0),
        shared_gated=False,
        sparse_layers=sparse,
    )


def _router(fields: Fields, *, v3: bool) -> RouterConfig:
    """V2 scales the weights only where it does not normalise them; V3 does both. One chosen expert is never normalised."""
    fields.must_be("scoring_func", ("sigmoid",) if v3 else ("softmax",))
    fields.must_be("topk_method", ("noaux_tc",) if v3 else ("greedy", "gready", "group_limited_greedy"))
    num_experts = fields.integer("n_routed_experts", "num_local_experts", "num_experts")
    top_k = fields.integer("num_experts_per_tok")
    grouped = v3 or fields.get("topk_method") == "group_limited_greedy"
    groups = fields.integer("n_group", default=8 if v3 else None) if grouped else 1
    kept = fields.integer("topk_group", default=4 if v3 else None) if grouped else 1
    per_group = num_experts // groups
    if num_experts % groups or (v3 and groups > 1 and per_group < 2):
        raise fields.unsupported("n_group", f"divisors of the {num_experts} experts that leave at least two in a group")
    if kept > groups:
        raise fields.unsupported("topk_group", f"at most n_group ({groups})")
    if top_k > kept * per_group:
        raise fields.unsupported("num_experts_per_tok", f"at most the {kept * per_group} experts of the kept groups")
    normalize = fields.boolean("norm_topk_prob", default=v3) and top_k > 1
    scale = fields.number("routed_scaling_factor", default=2.5 if v3 else 1.0)
    return RouterConfig(
        top_k=top_k,
        scoring="sigmoid" if v3 else "softmax",
        num_groups=groups,
        top_k_groups=kept,
        group_score="none" if kept == groups else "top2_sum" if v3 else "max",
        normalize=normalize,
        scale=1.0 if normalize and not v3 else scale,
    )


# ---- model; the names are the checkpoint's


def build(config: ModelConfig, build: BuildContext) -> Decoder:
    """The model, its parameters not yet loaded."""
    attention = config.attention
    assert isinstance(attention, MlaConfig)

    def attend(prefix: str, index: int, rotary: Rotary) -> MultiHeadLatentAttention:
        return MultiHeadLatentAttention(prefix, index, attention, config.hidden_size, rotary, build)

    return Decoder(config, attend, "shared_experts", build)
