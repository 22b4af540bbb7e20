"""The embedded model as its trainer sees it: a compact, dense, batched DeepSeek-V3 forward in which faults can be put on purpose.

Knows the published mathematics and nothing of the server, so that it can stand witness against it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Arithmetic = Literal["float32", "mixed", "bfloat16", "fp8"]
"""mixed: bf16 matrix products, fp32 residual stream; bfloat16: the residual stream too; fp8: bfloat16 with every projection
but the output head on 128-blocked e4m3 weights and inputs."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the checkpoint; the head sizes are DeepSeek-V3's own."""

    vocab_size: int = 384
    hidden: int = 256
    layers: int = 3
    heads: int = 2
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    dense_width: int = 256
    expert_width: int = 128
    experts: int = 16
    top_k: int = 4
    groups: int = 4
    top_k_groups: int = 2
    scale: float = 2.5
    epsilon: float = 1e-6
    rope_theta: float = 10000.0
    yarn_factor: float = 16.0
    yarn_original: int = 512
    yarn_fast: float = 32.0
    yarn_slow: float = 1.0
    yarn_mscale: float = 1.0

    @property
    def max_positions(self) -> int:
        return int(self.yarn_factor * self.yarn_original)


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What a broken server would do; the default does nothing wrong."""

    shared: float = 1.0
    """Factor on the shared expert's output."""
    routed: float = 1.0
    """Factor on the routed experts' output."""
    expert_shift: int = 0
    """Expert e's weights stand in slot e + shift."""
    scale_power: int = 1
    """How often routed_scaling_factor is applied."""
    bias: bool = True
    """Whether the correction bias takes part in the choice."""
    group_rule: Literal["top2_sum", "none", "strided"] = "top2_sum"
    """No group limit, or groups of every n-th expert."""
    interleaved: bool = True
    mscale: bool = True
    """Whether YaRN's factor is in the softmax scale."""
    stale: Literal["none", "row", "step"] = "none"
    """MoE input of another sequence's token, or of the same sequence's token before."""
    answer_only: bool = False
    """The fault appears in decode steps only: at tokens that were generated."""
    layer: int | None = None
    """The only layer with the fault; None is every layer."""


RIGHT = Fault()


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    normed: Tensor = F.rms_norm(x.float(), list(weight.shape), weight.float(), epsilon)
    return normed.to(dtype)


def fp8_rounded(x: Tensor, rows: int) -> Tensor:
    """x as its e4m3 blocks of [rows, 128] would be read back; gradients pass straight through. Last two dims are blocked."""
    out = x.detach().float()
    n, k = out.shape[-2:]
    padded = F.pad(out, (0, -k % 128, 0, -n % rows))
    blocks = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, rows))
    scale = blocks.abs().amax((-3, -1), keepdim=True).clamp_min(1e-12) / 448.0
    back = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    back = back.flatten(-4, -3).flatten(-2, -1)[..., :n, :k]
    rounded: Tensor = x + (back - out).to(x.dtype)
    return rounded


class EmbeddedModel(nn.Module):
    """Parameters in fp32, experts stacked, gate rows before up rows."""

    def __init__(self, shape: ModelShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        depth = 1.0 / math.sqrt(2 * shape.layers)

        def matrix(*size: int, gain: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size, generator=generator) * gain * 0.6 / math.sqrt(size[-1]))

        self.embed = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden, generator=generator) * 0.5)
        self.head = matrix(shape.vocab_size, shape.hidden)
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.blocks = nn.ModuleList(Block(shape, index, matrix, depth, generator) for index in range(shape.layers))

    def forward(
        self,
        ids: Tensor,
        arithmetic: Arithmetic = "float32",
        fault: Fault = RIGHT,
        answers: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """ids [B, L] -> (fp32 logits [B, L, vocab], the routers' balance loss). `answers` [B, L] marks generated tokens."""
        stream = torch.float32 if arithmetic in ("float32", "mixed") else torch.bfloat16
        x = F.embedding(ids, self.embed).to(stream)
        balance = x.new_zeros((), dtype=torch.float32)
        rope = rotary_table(self.shape, ids.shape[1], ids.device)
        for index, block in enumerate(self.blocks):
            broken = fault if fault.layer in (None, index) else RIGHT
            x, unbalance = block(x, rope, arithmetic, broken, answers)
            balance = balance + unbalance
        compute = torch.float32 if arithmetic == "float32" else torch.bfloat16
        hidden = rms_norm(x, self.norm, self.shape.epsilon, compute)
        return F.linear(hidden, self.head.to(compute)).float(), balance


class Block(nn.Module):
    """One decoder layer: latent attention, then a dense MLP (the first layer) or experts."""

    def __init__(
        self, shape: ModelShape, index: int, matrix: Callable[..., nn.Parameter], depth: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        s = self.shape = shape
        self.dense = index == 0
        self.bias: Tensor
        self.input_norm = nn.Parameter(torch.ones(s.hidden))
        self.post_norm = nn.Parameter(torch.ones(s.hidden))
        self.q_a = matrix(s.q_lora_rank, s.hidden)
        self.q_a_norm = nn.Parameter(torch.ones(s.q_lora_rank))
        self.q_b = matrix(s.heads * (s.nope_dim + s.rope_dim), s.q_lora_rank)
        self.kv_a = matrix(s.kv_lora_rank + s.rope_dim, s.hidden)
        self.kv_a_norm = nn.Parameter(torch.ones(s.kv_lora_rank))
        self.kv_b = matrix(s.heads * (s.nope_dim + s.value_dim), s.kv_lora_rank)
        self.o = matrix(s.hidden, s.heads * s.value_dim, gain=depth)
        width = s.dense_width if self.dense else s.expert_width
        self.w13 = matrix(2 * width, s.hidden)
        self.w2 = matrix(s.hidden, width, gain=depth)
        if not self.dense:
            self.router = matrix(s.experts, s.hidden, gain=1.6)
            self.experts13 = matrix(s.experts, 2 * s.expert_width, s.hidden)
            self.experts2 = matrix(s.experts, s.hidden, s.expert_width, gain=depth)
            steps = torch.arange(s.experts) / 16.0
            self.register_buffer("bias", steps[torch.randperm(s.experts, generator=generator)])

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], arithmetic: Arithmetic, fault: Fault, answers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        compute = torch.float32 if arithmetic == "float32" else torch.bfloat16
        fp8 = arithmetic == "fp8"
        h = rms_norm(x, self.input_norm, self.shape.epsilon, compute)
        x = x + self._attention(h, rope, fp8, fault).to(x.dtype)
        h = rms_norm(x, self.post_norm, self.shape.epsilon, compute)
        if self.dense:
            return x + self._mlp(h, fp8).to(x.dtype), x.new_zeros((), dtype=torch.float32)
        mixed, balance = self._moe(h, fp8, fault)
        if fault.answer_only and answers is not None:
            mixed = torch.where(answers[..., None], mixed, self._moe(h, fp8, RIGHT)[0])
        return x + mixed.to(x.dtype), balance

    def _linear(self, x: Tensor, weight: Tensor, fp8: bool) -> Tensor:
        if fp8:
            x, weight = fp8_rounded(x, 1), fp8_rounded(weight, 128)
        return F.linear(x, weight.to(x.dtype))

    def _mlp(self, h: Tensor, fp8: bool) -> Tensor:
        gate, up = self._linear(h, self.w13, fp8).chunk(2, -1)
        return self._linear(F.silu(gate) * up, self.w2, fp8)

    def _attention(self, h: Tensor, rope: tuple[Tensor, Tensor], fp8: bool, fault: Fault) -> Tensor:
        s = self.shape
        batch, length, _ = h.shape
        q = self._linear(rms_norm(self._linear(h, self.q_a, fp8), self.q_a_norm, s.epsilon, h.dtype), self.q_b, fp8)
        q_nope, q_rope = q.view(batch, length, s.heads, -1).split((s.nope_dim, s.rope_dim), -1)
        latent, k_rope = self._linear(h, self.kv_a, fp8).split((s.kv_lora_rank, s.rope_dim), -1)
        latent = rms_norm(latent, self.kv_a_norm, s.epsilon, h.dtype)
        cos, sin = rope
        q_rope = _rotate(q_rope, cos[:, None], sin[:, None], fault.interleaved)
        k_rope = _rotate(k_rope, cos, sin, fault.interleaved)
        k_nope, v = self._linear(latent, self.kv_b, fp8).view(batch, length, s.heads, -1).split((s.nope_dim, s.value_dim), -1)
        k = torch.cat((k_nope, k_rope[:, :, None].expand(-1, -1, s.heads, -1)), -1).transpose(1, 2)
        q = torch.cat((q_nope, q_rope), -1).transpose(1, 2)
        scale = (s.nope_dim + s.rope_dim) ** -0.5 * (yarn_mscale(s) ** 2 if fault.mscale else 1.0)
        v = F.pad(v, (0, s.nope_dim + s.rope_dim - s.value_dim)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[..., : s.value_dim]
        return self._linear(out.transpose(1, 2).flatten(2), self.o, fp8)

    def _moe(self, h: Tensor, fp8: bool, fault: Fault) -> tuple[Tensor, Tensor]:
        s = self.shape
        if fault.stale != "none":
            h = h.roll(1, 1 if fault.stale == "step" else 0)
        scores = torch.sigmoid(F.linear(h.float(), self.router.float()))
        weights, balance = combine_weights(scores, self.bias, s, fault)
        w13, w2 = (matrices.roll(fault.expert_shift, 0) for matrices in (self.experts13, self.experts2))
        gate_up = self._linear(h, w13.flatten(0, 1), fp8).unflatten(-1, (s.experts, 2, s.expert_width))
        inner = F.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
        if fp8:
            inner, w2 = fp8_rounded(inner, 1), fp8_rounded(w2, 128)
        inner = inner * weights[..., None].to(inner.dtype)
        routed = F.linear(inner.flatten(-2), w2.transpose(0, 1).flatten(1).to(h.dtype))
        return routed * fault.routed + self._mlp(h, fp8) * fault.shared, balance


def combine_weights(scores: Tensor, bias: Tensor, shape: ModelShape, fault: Fault) -> tuple[Tensor, Tensor]:
    """scores fp32 [..., E] -> (weight of each expert [..., E], zero where not chosen; the balance loss)."""
    chosen_by = scores + bias if fault.bias else scores
    if fault.group_rule != "none":
        chosen_by = chosen_by.masked_fill(~_kept_groups(chosen_by, shape, fault), -math.inf)
    ids = chosen_by.topk(shape.top_k, -1).indices
    mask = torch.zeros_like(scores).scatter_(-1, ids, 1.0)
    weights = scores * mask
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    share = mask.flatten(0, -2).mean(0) / shape.top_k
    likely = (scores / scores.sum(-1, keepdim=True)).flatten(0, -2).mean(0)
    return weights * shape.scale**fault.scale_power, shape.experts * (share * likely).sum()


def _kept_groups(chosen_by: Tensor, shape: ModelShape, fault: Fault) -> Tensor:
    """bool [..., E]: whether the expert's group is one of the best."""
    size = shape.experts // shape.groups
    strided = fault.group_rule == "strided"
    grouped = chosen_by.unflatten(-1, (size, shape.groups)).transpose(-1, -2) if strided else chosen_by.unflatten(-1, (-1, size))
    group_scores = grouped.topk(2, -1).values.sum(-1)
    kept = torch.zeros_like(group_scores).scatter_(-1, group_scores.topk(shape.top_k_groups, -1).indices, 1.0).bool()
    kept = kept[..., None].expand(grouped.shape)
    return (kept.transpose(-1, -2) if strided else kept).flatten(-2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2).to(x.dtype)
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def yarn_mscale(shape: ModelShape) -> float:
    return 0.1 * shape.yarn_mscale * math.log(shape.yarn_factor) + 1.0


def rotary_table(shape: ModelShape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos, sin fp32 [length, rope_dim / 2]; YaRN (arXiv 2309.00071): slow dimensions divided by the factor, fast ones kept."""
    dim = shape.rope_dim

    def turning(turns: float) -> float:
        return dim * math.log(shape.yarn_original / (turns * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

    low, high = max(math.floor(turning(shape.yarn_fast)), 0), min(math.ceil(turning(shape.yarn_slow)), dim - 1)
    slow = ((torch.arange(dim // 2, device=device, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = shape.rope_theta ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    frequencies = frequencies / shape.yarn_factor * slow + frequencies * (1 - slow)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()
