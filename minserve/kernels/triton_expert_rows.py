"""Triton path of a token or two through the routed experts: every row of weights on its own, all loads in flight at once.

It reads an expert once for each pair. Weights are plain or FP8, activations as they are; sums run in a fixed order.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.interface import ExpertWeights
from minserve.kernels.launch import cdiv, dependent_launch, follow, lead, next_power_of_2
from minserve.kernels.triton_grouping import FP8_BLOCK


@triton.jit
def _gate_up_vector_kernel(
    x,
    slot_ids,
    w13,
    scale,
    hidden,
    inner,
    width,
    top_k,
    scale_expert_stride,
    scale_columns,
    fp8: tl.constexpr,
    block_n: tl.constexpr,
    blocks: tl.constexpr,
    dependent: tl.constexpr,
):
    """hidden[pair, n] = silu(gate row n . x) * (up row n . x). Whole rows at once: all loads are in flight together."""
    follow(dependent)
    lead(dependent)
    pair = tl.program_id(1)
    expert = tl.load(slot_ids + pair).to(tl.int64)
    if expert < 0:
        return
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    block = tl.arange(0, blocks)
    k = (block[:, None] * 128 + tl.arange(0, 128)[None, :])[None, :, :]
    mask = (n < inner)[:, None, None] & (k < width)
    gate_rows = w13 + expert * (2 * inner * width) + n[:, None, None] * width + k
    gate = tl.load(gate_rows, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    up = tl.load(gate_rows + inner * width, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    # Loaded in the weights' own shape, so that no thread waits for another to hand it over.
    values = tl.load(x + (pair // top_k).to(tl.int64) * width + k + n[:, None, None] * 0, mask=mask, other=0.0).to(tl.float32)
    gate_sums = tl.sum(gate * values, axis=2)
    up_sums = tl.sum(up * values, axis=2)
    if fp8:
        real = (n < inner)[:, None] & (block * 128 < width)[None, :]
        scales = scale + expert * scale_expert_stride + block[None, :]
        gate_sums *= tl.load(scales + (n // 128)[:, None] * scale_columns, mask=real, other=0.0)
        up_sums *= tl.load(scales + ((inner + n) // 128)[:, None] * scale_columns, mask=real, other=0.0)
    gate_sum = tl.sum(gate_sums, axis=1)
    result = gate_sum * tl.sigmoid(gate_sum) * tl.sum(up_sums, axis=1)
    tl.store(hidden + pair.to(tl.int64) * inner + n, result.to(hidden.dtype.element_ty), mask=n < inner)


@triton.jit
def _down_vector_kernel(
    hidden,
    slot_ids,
    weights,
    w2,
    scale,
    out,
    inner,
    width,
    top_k,
    scale_expert_stride,
    scale_columns,
    fp8: tl.constexpr,
    places: tl.constexpr,
    block_n: tl.constexpr,
    blocks: tl.constexpr,
    dependent: tl.constexpr,
):
    """out[token, n] = sum over places of weight * (row n of the place's expert . hidden[pair]), all places at once.

    The choice and the weights were written before the kernel that this one follows began to lead, so both are read early.
    """
    token = tl.program_id(1)
    first = tl.program_id(0) * block_n
    row = tl.arange(0, places * block_n)
    place = row // block_n
    n = first + row % block_n
    pair = token * top_k + place
    expert = tl.load(slot_ids + pair, mask=place < top_k, other=-1).to(tl.int64)
    chosen = (expert >= 0) & (n < width)
    block = tl.arange(0, blocks)
    k = (block[:, None] * 128 + tl.arange(0, 128)[None, :])[None, :, :]
    mask = chosen[:, None, None] & (k < inner)
    rows = w2 + (expert * width * inner + n * inner)[:, None, None]
    tile = tl.load(rows + k, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    follow(dependent)
    lead(dependent)
    values = tl.load(hidden + (pair.to(tl.int64) * inner)[:, None, None] + k, mask=mask, other=0.0).to(tl.float32)
    sums = tl.sum(tile * values, axis=2)
    if fp8:
        scales = scale + (expert * scale_expert_stride + n // 128 * scale_columns)[:, None] + block[None, :]
        sums *= tl.load(scales, mask=chosen[:, None] & (block * 128 < inner)[None, :], other=0.0)
    weight = tl.load(weights + pair, mask=chosen, other=0.0)
    result = tl.sum(tl.reshape(tl.sum(sums, axis=1) * weight, (places, block_n)), axis=0)
    columns = first + tl.arange(0, block_n)
    tl.store(out + token.to(tl.int64) * width + columns, result.to(out.dtype.element_ty), mask=columns < width)


def scale_operands(weight: Tensor, scale: Tensor | None) -> dict[str, Any]:
    """What a kernel is told of weights' block scales [E, ., .]; where there are none, the weights stand in for them."""
    if scale is None:
        return {"scale": weight, "scale_expert_stride": 0, "scale_columns": 0, "fp8": False}
    return {"scale": scale, "scale_expert_stride": scale.stride(0), "scale_columns": scale.stride(1), "fp8": True}


def experts_vector(x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
    """The path for very few tokens, two launches: each pair's expert row by row, then each token's weighted sum."""
    tokens, top_k = slot_ids.shape
    width, inner = experts.w2.shape[1:]
    hidden = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    x, slot_ids = x.contiguous(), slot_ids.contiguous()
    fp8 = experts.w13_scale is not None
    shape: dict[str, Any] = {"inner": inner, "width": width, "top_k": top_k} | dependent_launch(x.device)
    blocks = next_power_of_2(cdiv(width, FP8_BLOCK))
    block_n = _block_rows(blocks, 8192 if fp8 else 4096)
    _gate_up_vector_kernel[(cdiv(inner, block_n), tokens * top_k)](
        x,
        slot_ids,
        experts.w13,
        hidden=hidden,
        block_n=block_n,
        blocks=blocks,
        num_warps=4 if block_n > 1 else 8,
        **scale_operands(experts.w13, experts.w13_scale),
        **shape,
    )
    blocks, places = next_power_of_2(cdiv(inner, FP8_BLOCK)), next_power_of_2(top_k)
    block_n = _block_rows(blocks * places, 32768 if fp8 else 16384)
    _down_vector_kernel[(cdiv(width, block_n), tokens)](
        hidden,
        slot_ids,
        weights.contiguous(),
        experts.w2,
        out=out,
        places=places,
        block_n=block_n,
        blocks=blocks,
        num_warps=8,
        **scale_operands(experts.w2, experts.w2_scale),
        **shape,
    )
    return out


def _block_rows(blocks: int, elements: int) -> int:
    """Rows of `blocks` 128-wide blocks each that make about so many elements."""
    return max(1, elements // (blocks * FP8_BLOCK))
