"""Triton products of the routed experts, plain or FP8 weights: one vector path for few tokens, one tiled path for the rest.

FP8 weights meet unquantised activations: a tile is widened in registers and its 128x128 block scale applied to the fp32
partial sum. Sums run in a fixed order; which path and which tiles depend on shapes alone.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.interface import ExpertWeights
from minserve.kernels.triton_grouping import FP8_BLOCK, Tiles, combine, tiles_of_counts, tiles_of_pairs

VECTOR_TOKENS = 4
"""Most tokens of the vector path, which reads an expert once for each pair; beyond, tiles read each expert once."""


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
):
    """hidden[pair, n] = silu(gate row n . x) * (up row n . x). Whole rows at once: all loads are in flight together."""
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
):
    """out[token, n] = sum over places of weight * (row n of the place's expert . hidden[pair]), all places at once."""
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
    values = tl.load(hidden + (pair.to(tl.int64) * inner)[:, None, None] + k, mask=mask, other=0.0).to(tl.float32)
    sums = tl.sum(tile * values, axis=2)
    if fp8:
        scales = scale + (expert * scale_expert_stride + n // 128 * scale_columns)[:, None] + block[None, :]
        sums *= tl.load(scales, mask=chosen[:, None] & (block * 128 < inner)[None, :], other=0.0)
    weight = tl.load(weights + pair, mask=chosen, other=0.0)
    result = tl.sum(tl.reshape(tl.sum(sums, axis=1) * weight, (places, block_n)), axis=0)
    columns = first + tl.arange(0, block_n)
    tl.store(out + token.to(tl.int64) * width + columns, result.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def _tiles_kernel(
    x,
    rows,
    tile_expert,
    weight,
    scale,
    out,
    n_size,
    k_size,
    top_k,
    x_stride,
    num_tiles,
    n_blocks,
    weight_expert_stride,
    scale_expert_stride,
    scale_columns,
    gated: tl.constexpr,
    fp8: tl.constexpr,
    whole_k: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group_tiles: tl.constexpr,
):
    """out[row] = x[row // top_k] times one expert's weight [n_size, k_size]; gated: silu(first n_size rows) * (the next)."""
    program = tl.program_id(0)
    # Neighbouring programs share weights (same columns) and activations (same tile) in L2.
    band = program // (group_tiles * n_blocks)
    first_tile = band * group_tiles
    in_band = tl.minimum(num_tiles - first_tile, group_tiles)
    tile = first_tile + program % (group_tiles * n_blocks) % in_band
    n_block = program % (group_tiles * n_blocks) // in_band
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(rows + tile * block_m + tl.arange(0, block_m)).to(tl.int64)
    real = row >= 0
    n = n_block * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    inside = n < n_size
    inputs = x + (row // top_k)[:, None] * x_stride + k[None, :]
    weights = weight + expert * weight_expert_stride + n[:, None].to(tl.int64) * k_size + k[None, :]
    scales = scale + expert * scale_expert_stride
    acc = tl.zeros([block_m, block_n], tl.float32)
    up_acc = tl.zeros([block_m, block_n], tl.float32)
    for start in range(0, k_size, block_k):
        columns = start + k < k_size
        if whole_k:
            columns = k < block_k
        a = tl.load(inputs + start, mask=real[:, None] & columns[None, :], other=0.0)
        w = tl.load(weights + start, mask=inside[:, None] & columns[None, :], other=0.0)
        if fp8:
            place = scales + start // 128
            row_scale = tl.load(place + n // 128 * scale_columns, mask=inside, other=0.0)
            acc += tl.dot(a, tl.trans(w.to(a.dtype)), input_precision="ieee") * row_scale[None, :]
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        if gated:
            w = tl.load(weights + n_size * k_size + start, mask=inside[:, None] & columns[None, :], other=0.0)
            if fp8:
                row_scale = tl.load(place + (n_size + n) // 128 * scale_columns, mask=inside, other=0.0)
                up_acc += tl.dot(a, tl.trans(w.to(a.dtype)), input_precision="ieee") * row_scale[None, :]
            else:
                up_acc = tl.dot(a, tl.trans(w), up_acc, input_precision="ieee")
    if gated:
        acc = acc * tl.sigmoid(acc) * up_acc
    tl.store(out + row[:, None] * n_size + n[None, :], acc.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@dataclasses.dataclass(frozen=True, slots=True)
class TileConfig:
    """Block sizes and launch options of the tiled product."""

    block_m: int
    block_n: int
    block_k: int
    group_tiles: int
    num_warps: int
    num_stages: int


def tile_config(rows_per_expert: int, fp8: bool) -> TileConfig:
    """By the mean number of rows an expert gets, rounded up: the tile wastes least where it is near that."""
    if rows_per_expert <= 16:
        return TileConfig(16, 32, 128, 1, 4, 4)
    if rows_per_expert <= 48:
        return TileConfig(32, 64, 128, 1, 4, 3)
    if rows_per_expert <= 96:
        return TileConfig(64, 64, 128 if fp8 else 64, 8, 4, 3)
    return TileConfig(128, 64, 128 if fp8 else 64, 8, 8, 3)


def _tiled(
    x: Tensor, tiles: Tiles, weight: Tensor, scale: Tensor | None, out_rows: int, config: TileConfig, *, gated: bool, top_k: int
) -> Tensor:
    """[out_rows, N]; rows that no tile lists stay as allocated."""
    n_size, k_size = weight.shape[1] // (2 if gated else 1), weight.shape[2]
    out = torch.empty(out_rows, n_size, dtype=x.dtype, device=x.device)
    num_tiles, n_blocks = tiles.expert.shape[0], triton.cdiv(n_size, config.block_n)
    if num_tiles == 0:
        return out
    block_k = FP8_BLOCK if scale is not None else config.block_k
    _tiles_kernel[(num_tiles * n_blocks,)](
        x,
        tiles.rows,
        tiles.expert,
        weight,
        weight if scale is None else scale,
        out,
        n_size,
        k_size,
        top_k,
        x.stride(0),
        num_tiles,
        n_blocks,
        weight.stride(0),
        0 if scale is None else scale.stride(0),
        0 if scale is None else scale.stride(1),
        gated=gated,
        fp8=scale is not None,
        whole_k=k_size % block_k == 0,
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=block_k,
        group_tiles=config.group_tiles,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def _block_rows(blocks: int, elements: int) -> int:
    """Rows of `blocks` 128-wide blocks each that make about so many elements."""
    return max(1, elements // (blocks * FP8_BLOCK))


def experts_vector(x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
    """The path for few tokens, two launches: each pair's expert row by row, then each token's weighted sum."""
    tokens, top_k = slot_ids.shape
    width, inner = experts.w2.shape[1:]
    hidden = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    x, slot_ids = x.contiguous(), slot_ids.contiguous()
    s13, s2 = experts.w13_scale, experts.w2_scale
    blocks = triton.next_power_of_2(triton.cdiv(width, FP8_BLOCK))
    block_n = _block_rows(blocks, 4096)
    _gate_up_vector_kernel[(triton.cdiv(inner, block_n), tokens * top_k)](
        x,
        slot_ids,
        experts.w13,
        experts.w13 if s13 is None else s13,
        hidden,
        inner,
        width,
        top_k,
        0 if s13 is None else s13.stride(0),
        0 if s13 is None else s13.stride(1),
        fp8=s13 is not None,
        block_n=block_n,
        blocks=blocks,
        num_warps=4 if block_n > 1 else 8,
    )
    blocks, places = triton.next_power_of_2(triton.cdiv(inner, FP8_BLOCK)), triton.next_power_of_2(top_k)
    block_n = _block_rows(blocks * places, 8192)
    _down_vector_kernel[(triton.cdiv(width, block_n), tokens)](
        hidden,
        slot_ids,
        weights.contiguous(),
        experts.w2,
        experts.w2 if s2 is None else s2,
        out,
        inner,
        width,
        top_k,
        0 if s2 is None else s2.stride(0),
        0 if s2 is None else s2.stride(1),
        fp8=s2 is not None,
        places=places,
        block_n=block_n,
        blocks=blocks,
        num_warps=8,
    )
    return out


def experts_tiled(
    x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights, *, config: TileConfig | None = None
) -> Tensor:
    """The path for any number of tokens: sort, two tiled products, weighted sum. `config`: None chooses by that number."""
    num_experts, (tokens, top_k) = experts.w13.shape[0], slot_ids.shape
    if tokens == 0:
        return torch.empty_like(x)
    config = config or tile_config(triton.cdiv(tokens * top_k, num_experts), experts.w13_scale is not None)
    tiles = tiles_of_pairs(slot_ids, num_experts, config.block_m)
    hidden = _tiled(x, tiles, experts.w13, experts.w13_scale, slot_ids.numel(), config, gated=True, top_k=top_k)
    y = _tiled(hidden, tiles, experts.w2, experts.w2_scale, slot_ids.numel(), config, gated=False, top_k=1)
    return combine(y, slot_ids.contiguous(), weights, direct=True)


def experts_flat(x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
    """x [T, H] through its slots int32 [T, k] (-1: none), weighted by weights fp32 [T, k] and summed: [T, H]."""
    if 0 < x.shape[0] <= VECTOR_TOKENS:
        return experts_vector(x, slot_ids, weights, experts)
    return experts_tiled(x.contiguous(), slot_ids, weights, experts)


def experts_masked(x: Tensor, counts: Tensor, experts: ExpertWeights) -> Tensor:
    """x [E, M, H], of which the first counts[e] rows are real, through expert e: [E, M, H]; other rows stay as allocated."""
    num_experts, capacity, width = x.shape
    config = tile_config(min(capacity, 32), experts.w13_scale is not None)
    tiles = tiles_of_counts(counts, capacity, config.block_m)
    flat = x.reshape(num_experts * capacity, width)
    hidden = _tiled(flat, tiles, experts.w13, experts.w13_scale, flat.shape[0], config, gated=True, top_k=1)
    return _tiled(hidden, tiles, experts.w2, experts.w2_scale, flat.shape[0], config, gated=False, top_k=1).view(x.shape)
