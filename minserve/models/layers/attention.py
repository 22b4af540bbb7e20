"""Grouped-query attention over the paged cache."""

from __future__ import annotations

from torch import Tensor, nn

from minserve.kernels.interface import AttentionShape, Fp8Rows, HeadNorms, PartialSums
from minserve.models.build_context import BuildContext
from minserve.models.forward_context import ForwardContext
from minserve.models.layers.linear import Linear, OutputLinear, Part
from minserve.models.layers.norm import RMSNorm
from minserve.models.layers.rotary import Rotary
from minserve.models.model_config import GqaConfig


class GroupedQueryAttention(nn.Module):
    """[T, H] -> [T, H], or parts that sum to it; writes the step's keys and values to the layer's cache first."""

    def __init__(
        self, prefix: str, layer: int, config: GqaConfig, hidden_size: int, norm_eps: float, rotary: Rotary, build: BuildContext
    ) -> None:
        super().__init__()
        self.layer = layer
        self.config = config
        self.shape = AttentionShape("gqa", config.num_heads, config.num_kv_heads, config.head_dim, 0, config.scale)
        self.kernels = build.kernels
        self.rotary = rotary
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = [Part(f"{prefix}.q_proj", q_rows), Part(f"{prefix}.k_proj", kv_rows), Part(f"{prefix}.v_proj", kv_rows)]
        self.qkv = Linear(parts, hidden_size, build, bias=config.qkv_bias)
        self.q_norm = RMSNorm(f"{prefix}.q_norm", config.head_dim, norm_eps, build) if config.qk_norm else None
        self.k_norm = RMSNorm(f"{prefix}.k_norm", config.head_dim, norm_eps, build) if config.qk_norm else None
        self.output = OutputLinear([Part(f"{prefix}.o_proj", hidden_size)], q_rows, build, bias=config.output_bias)

    @property
    def reader(self) -> Linear:
        """What alone reads the hidden rows."""
        return self.qkv

    def forward(self, hidden: Tensor | Fp8Rows, positions: Tensor, ctx: ForwardContext) -> Tensor | PartialSums:
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        cache, step, plan, table = ctx.kv_cache[self.layer], ctx.attention, ctx.attention_plan, self.rotary.table
        qkv = self.qkv(hidden)
        kernels = self.output.fp8_for(qkv) or self.kernels
        if kernels.gqa_decode is not None and step.one_token_each:
            result = kernels.gqa_decode(qkv, norms, table, positions, cache, step, self.shape, plan)
        else:
            q = self.kernels.gqa_inputs(qkv, norms, table, positions, cache, step.slot_mapping, self.shape)
            result = kernels.gqa_attention(q, cache, step, self.shape, plan)
        return self.output.unsummed(result if isinstance(result, Fp8Rows) else result.flatten(1))
