"""Qwen2-MoE and Qwen3-MoE: grouped-query attention, softmax routing, in Qwen2 a shared expert behind a sigmoid gate."""

from __future__ import annotations

from pathlib import Path

from minserve.errors import CheckpointError
from minserve.kernels.interface import RouterConfig
from minserve.models.build_context import BuildContext
from minserve.models.config_reader import Fields, read_decoder, read_rope
from minserve.models.decoder import Decoder
from minserve.models.layers.attention import GroupedQueryAttention
from minserve.models.layers.rotary import Rotary
from minserve.models.model_config import GqaConfig, ModelConfig, MoeConfig

# ---- config


def parse_config(fields: Fields, architecture: str, model_dir: Path) -> ModelConfig:
    """Both families; absent fields take the values that the published config classes give them."""
    fields.must_be("use_sliding_window", (False,))
    kinds = fields.get("layer_types")
    if kinds is not None and set(kinds) != {"full_attention"}:
        raise fields.unsupported("layer_types", '"full_attention" in every layer')
    attention = _attention(fields, qwen3=architecture == "Qwen3MoeForCausalLM")
    rope = read_rope(fields, attention.head_dim, interleaved=False)
    moe = _moe(fields, shared=architecture == "Qwen2MoeForCausalLM")
    return read_decoder(fields, architecture, model_dir, rope, attention, moe)


def _attention(fields: Fields, *, qwen3: bool) -> GqaConfig:
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    head_dim = fields.integer("head_dim", default=fields.integer("hidden_size") // num_heads)
    if num_heads % num_kv_heads:
        raise fields.unsupported("num_key_value_heads", f"divisors of the {num_heads} attention heads")
    bias = fields.boolean("attention_bias", default=False) if qwen3 else fields.boolean("qkv_bias", default=True)
    return GqaConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv_bias=bias,
        output_bias=bias and qwen3,
        qk_norm=qwen3,
        scale=head_dim**-0.5,
    )


def _moe(fields: Fields, *, shared: bool) -> MoeConfig | None:
    num_experts = fields.integer("num_experts", "num_local_experts", minimum=0)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.integers("mlp_only_layers")
    layers = range(fields.integer("num_hidden_layers"))
    sparse = tuple(num_experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in layers)
    if not any(sparse):
        return None
    top_k = fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(f"{fields.where}: num_experts_per_tok is {top_k}; at most num_experts ({num_experts}) is expected")
    router = RouterConfig(top_k=top_k, scoring="softmax", normalize=fields.boolean("norm_topk_prob", default=False))
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=fields.integer("moe_intermediate_size"),
        router=router,
        correction_bias=False,
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size") if shared else 0,
        shared_gated=shared,
        sparse_layers=sparse,
    )


# ---- model; the names are the checkpoint's


def build(config: ModelConfig, build: BuildContext) -> Decoder:
    """The model, its parameters not yet loaded."""
    attention = config.attention
    assert isinstance(attention, GqaConfig)

    def attend(prefix: str, index: int, rotary: Rotary) -> GroupedQueryAttention:
        return GroupedQueryAttention(prefix, index, attention, config.hidden_size, config.rms_norm_eps, rotary, build)

    return Decoder(config, attend, "shared_expert", build)
