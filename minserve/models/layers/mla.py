"""Multi-head latent attention in absorbed form: the cache holds one latent a token, heads meet it in latent space.

Prefill and decode run the same products: q_nope W_UK gives queries against the latent, and W_UV widens the mean latent.
Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from torch import Tensor, nn

from minserve.kernels.interface import AttentionShape, Fp8Rows, PartialSums
from minserve.models.build_context import BuildContext
from minserve.models.forward_context import ForwardContext
from minserve.models.layers.linear import Linear, OutputLinear, Part
from minserve.models.layers.norm import RMSNorm
from minserve.models.layers.rotary import Rotary
from minserve.models.model_config import MlaConfig

LATENT_NORM_EPS = 1e-6
"""The published models norm their latents with this, whatever rms_norm_eps says of the other norms (Moonlight: 1e-5)."""


class MultiHeadLatentAttention(nn.Module):
    """[T, H] -> [T, H], or parts that sum to it.

    A cache entry is the normed latent [kv_lora_rank], then the turned key part [qk_rope_head_dim].
    """

    w_uk: Tensor
    """[heads, qk_nope_head_dim, kv_lora_rank], a view of kv_b"""
    w_uv: Tensor
    """[heads, kv_lora_rank, v_head_dim], a view of kv_b"""

    def __init__(self, prefix: str, layer: int, config: MlaConfig, hidden_size: int, rotary: Rotary, build: BuildContext) -> None:
        super().__init__()
        self.layer = layer
        self.config = config
        self.shape = AttentionShape("mla", config.num_heads, 1, config.kv_lora_rank, config.qk_rope_head_dim, config.scale)
        self.kernels = build.kernels
        self.rotary = rotary
        q_rows = config.num_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        kv_a = Part(f"{prefix}.kv_a_proj_with_mqa", config.kv_lora_rank + config.qk_rope_head_dim)
        if config.q_lora_rank is None:
            # The query projection and the latent's read the same input: one product.
            self.down = Linear([Part(f"{prefix}.q_proj", q_rows), kv_a], hidden_size, build)
            self.q_a_norm = self.q_b = None
        else:
            self.down = Linear([Part(f"{prefix}.q_a_proj", config.q_lora_rank), kv_a], hidden_size, build)
            self.q_a_norm = RMSNorm(f"{prefix}.q_a_layernorm", config.q_lora_rank, LATENT_NORM_EPS, build)
            self.q_b = Linear([Part(f"{prefix}.q_b_proj", q_rows)], config.q_lora_rank, build)
        self.kv_a_norm = RMSNorm(f"{prefix}.kv_a_layernorm", config.kv_lora_rank, LATENT_NORM_EPS, build)
        kv_rows = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        # Its slices are batched by head, which block scales do not allow: plain in memory whatever the checkpoint has.
        self.kv_b = Linear([Part(f"{prefix}.kv_b_proj", kv_rows)], config.kv_lora_rank, build, widen=True)
        self.output = OutputLinear([Part(f"{prefix}.o_proj", hidden_size)], config.num_heads * config.v_head_dim, build)

    def finish_load(self) -> None:
        """Cuts the absorbed matrices out of kv_b; no copy, so that they follow its storage."""
        per_head = self.kv_b.weight.unflatten(0, (self.config.num_heads, -1))
        self.w_uk = per_head[:, : self.config.qk_nope_head_dim]
        self.w_uv = per_head[:, self.config.qk_nope_head_dim :].transpose(1, 2)

    @property
    def reader(self) -> Linear:
        """What alone reads the hidden rows."""
        return self.down

    def forward(self, hidden: Tensor | Fp8Rows, positions: Tensor, ctx: ForwardContext) -> Tensor | PartialSums:
        config = self.config
        q, kv = self.down.split(self.down(hidden))
        if self.q_a_norm is not None and self.q_b is not None:
            q = self.q_b(self.q_a_norm.read_by(self.q_b, q)[0])
        cache, norm = ctx.kv_cache[self.layer], self.kv_a_norm
        q_latent, q_rope = self.kernels.mla_inputs(
            q.unflatten(-1, (config.num_heads, -1)),
            kv,
            norm.weight,
            norm.eps,
            self.w_uk,
            self.rotary.table,
            positions,
            cache,
            ctx.attention.slot_mapping,
        )
        mean_latent = self.kernels.mla_attention(q_latent, q_rope, cache, ctx.attention, self.shape, ctx.attention_plan)
        fp8 = self.output.fp8_for(mean_latent)
        if fp8 is not None:
            return self.output.unsummed(fp8.heads_linear(mean_latent, self.w_uv))
        return self.output.unsummed(self.kernels.heads_linear(mean_latent, self.w_uv).flatten(1))
