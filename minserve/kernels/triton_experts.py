"""Triton products of the routed experts, plain or FP8 weights: one vector path for a token or two, one of tiles for the rest.

Weights are the matrix units' row operand and a tile's few pairs its columns. FP8 weights meet unquantised activations: both
are halves in the units (FP8 fits exactly), and each 128x128 block's scale is applied to the fp32 partial sum. Sums run in a
fixed order; which path and which tiles depend on shapes alone, and a pair's result on no other pair.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.expert_choices import Choice, ExpertChoices, ExpertShape
from minserve.kernels.expert_tiles import OWN_TILES_TOKENS, Block, TileSizes, tile_sizes
from minserve.kernels.interface import ExpertWeights
from minserve.kernels.launch import dependent_launch, follow, lead
from minserve.kernels.triton_grouping import (
    FP8_BLOCK,
    Tiles,
    combine,
    own_pairs,
    own_tiles,
    tiles_of_counts,
    tiles_of_pairs,
)
from minserve.kernels.triton_int4 import int4_product, turned, turned_width

HIDDEN_SCALE = 16.0
"""Activations between FP8 products are stored as halves, divided by this: up to a million, and exact to 5e-7 or 11 bits."""


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


@triton.jit
def _as_half(values):
    """fp16, held at its largest numbers; NaN stays NaN."""
    return tl.clamp(values.to(tl.float32), -65504.0, 65504.0, tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def _multiply(acc, w, a, scale, fp8: tl.constexpr):
    """acc + w a, in fp32; FP8 weights times their block's scale."""
    if fp8:
        acc += tl.dot(w.to(a.dtype), a, input_precision="ieee") * tl.load(scale)
    else:
        acc = tl.dot(w, a, acc, input_precision="ieee")
    return acc


@triton.jit
def _product_kernel(
    x,
    slot_ids,
    rows,
    tile_expert,
    weight,
    scale,
    out,
    n_size,
    k_size,
    top_k,
    row_divisor,
    x_stride,
    pairs,
    num_tiles,
    n_blocks,
    weight_expert_stride,
    scale_expert_stride,
    scale_columns,
    out_scale,
    gated: tl.constexpr,
    fp8: tl.constexpr,
    halves: tl.constexpr,
    direct: tl.constexpr,
    whole: tl.constexpr,
    places: tl.constexpr,
    block_rows: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group_tiles: tl.constexpr,
    stages: tl.constexpr,
    dependent: tl.constexpr,
):
    """out[row] = x[row // row_divisor] times an expert's weight [n_size, k_size]; gated: silu(first n_size rows) * (the next)."""
    follow(dependent)
    lead(dependent)
    program = tl.program_id(0)
    # Neighbouring programs share activations (same tile) and, in bands of tiles, weights (same columns) in L2.
    band = program // (group_tiles * n_blocks)
    in_band = tl.minimum(num_tiles - band * group_tiles, group_tiles)
    tile = band * group_tiles + program % (group_tiles * n_blocks) % in_band
    n_block = program % (group_tiles * n_blocks) // in_band
    if direct:
        expert, row = own_pairs(slot_ids, tile, pairs, top_k, places, block_rows)
    else:
        expert = tl.load(tile_expert + tile)
        row = tl.load(rows + tile * block_rows + tl.arange(0, block_rows))
    if expert < 0:
        return
    expert, row = expert.to(tl.int64), row.to(tl.int64)
    real = row >= 0
    n = n_block * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    inside = n < n_size
    inputs = x + (row // row_divisor)[None, :] * x_stride + k[:, None]
    weights = weight + expert * weight_expert_stride + n[:, None].to(tl.int64) * k_size + k[None, :]
    # FP8 has block_n and block_k at most 128, so that one scale serves a whole tile of weights.
    scales = scale + expert * scale_expert_stride + n_block * block_n // 128 * scale_columns
    up_scales = scale + expert * scale_expert_stride + (n_size + n_block * block_n) // 128 * scale_columns
    acc = tl.zeros([block_n, block_rows], tl.float32)
    up_acc = tl.zeros([block_n, block_rows], tl.float32)
    for start in tl.range(0, k_size, block_k, num_stages=stages):
        row_mask, weight_mask = real[None, :], inside[:, None]
        if not whole:
            columns = start + k < k_size
            row_mask, weight_mask = row_mask & columns[:, None], weight_mask & columns[None, :]
        a = tl.load(inputs + start, mask=row_mask, other=0.0)
        if halves and a.dtype != tl.float16:
            a = _as_half(a)
        w = tl.load(weights + start, mask=weight_mask, other=0.0, eviction_policy="evict_first")
        acc = _multiply(acc, w, a, scales + start // 128, fp8)
        if gated:
            w = tl.load(weights + n_size * k_size + start, mask=weight_mask, other=0.0, eviction_policy="evict_first")
            up_acc = _multiply(up_acc, w, a, up_scales + start // 128, fp8)
    if gated:
        acc = acc * tl.sigmoid(acc) * up_acc
    acc *= out_scale
    result = _as_half(acc) if halves and gated else acc.to(out.dtype.element_ty)
    tl.store(out + row[None, :] * n_size + n[:, None], result, mask=real[None, :] & inside[:, None])


def experts_vector(x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
    """The path for very few tokens, two launches: each pair's expert row by row, then each token's weighted sum."""
    tokens, top_k = slot_ids.shape
    width, inner = experts.w2.shape[1:]
    hidden = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    x, slot_ids = x.contiguous(), slot_ids.contiguous()
    s13, s2 = experts.w13_scale, experts.w2_scale
    blocks = triton.next_power_of_2(triton.cdiv(width, FP8_BLOCK))
    block_n = _block_rows(blocks, 4096 if s13 is None else 8192)
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
        **dependent_launch(x.device),
    )
    blocks, places = triton.next_power_of_2(triton.cdiv(inner, FP8_BLOCK)), triton.next_power_of_2(top_k)
    block_n = _block_rows(blocks * places, 16384 if s2 is None else 32768)
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
        **dependent_launch(x.device),
    )
    return out


def _block_rows(blocks: int, elements: int) -> int:
    """Rows of `blocks` 128-wide blocks each that make about so many elements."""
    return max(1, elements // (blocks * FP8_BLOCK))


def _product(
    x: Tensor,
    tiles: Tiles,
    weight: Tensor,
    scale: Tensor | None,
    out: Tensor,
    block: Block,
    sizes: TileSizes,
    *,
    row_divisor: int = 0,
) -> None:
    """Fills the rows of out that tiles list; row_divisor > 0: gate and up, of x's row `row // row_divisor`; 0: down, of `row`."""
    gated = row_divisor > 0
    n_size, k_size = weight.shape[1] // (2 if gated else 1), weight.shape[2]
    halves, n_blocks = scale is not None and x.element_size() == 2, triton.cdiv(n_size, block.n)
    _product_kernel[(tiles.count * n_blocks,)](
        x,
        tiles.expert,
        tiles.rows,
        tiles.expert,
        weight,
        weight if scale is None else scale,
        out,
        n_size,
        k_size,
        tiles.top_k,
        max(1, row_divisor),
        x.stride(0),
        tiles.count,
        tiles.count,
        n_blocks,
        weight.stride(0),
        0 if scale is None else scale.stride(0),
        0 if scale is None else scale.stride(1),
        (1 / HIDDEN_SCALE if gated else HIDDEN_SCALE) if halves else 1.0,
        gated=gated,
        fp8=scale is not None,
        halves=halves,
        direct=tiles.own,
        whole=k_size % block.k == 0 and n_size % block.n == 0,
        places=triton.next_power_of_2(tiles.top_k),
        block_rows=tiles.tile,
        block_n=block.n,
        block_k=block.k,
        group_tiles=sizes.group_tiles,
        stages=block.stages,
        num_warps=block.warps,
        **dependent_launch(x.device),
    )


def _through_experts(
    x: Tensor, tiles: Tiles, experts: ExpertWeights, sizes: TileSizes, num_rows: int, row_divisor: int
) -> Tensor:
    """[num_rows, H]: each row that tiles list, of x's row `row // row_divisor`, through its expert; the others as allocated."""
    width, inner = experts.w2.shape[1], experts.w13.shape[1] // 2
    y = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    s13, s2 = experts.w13_scale, experts.w2_scale
    if experts.format == "int4_group":
        assert s13 is not None and s2 is not None
        hidden = torch.empty(num_rows, turned_width(inner), dtype=x.dtype, device=x.device)
        int4_product(turned(x), tiles, experts.w13, s13, hidden, sizes.up, row_divisor=row_divisor)
        int4_product(hidden, tiles, experts.w2, s2, y, sizes.down)
        return y
    halves = s13 is not None and x.element_size() == 2
    hidden = torch.empty(num_rows, inner, dtype=torch.float16 if halves else x.dtype, device=x.device)
    _product(x, tiles, experts.w13, s13, hidden, sizes.up, sizes, row_divisor=row_divisor)
    _product(hidden, tiles, experts.w2, s2, y, sizes.down, sizes)
    return y


def experts_tiled(x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights, sizes: TileSizes | None = None) -> Tensor:
    """The path for any number of tokens: a sort unless they are few, two tiled products, weighted sum."""
    num_experts, (tokens, top_k) = experts.w13.shape[0], slot_ids.shape
    if tokens == 0:
        return torch.empty_like(x)
    x, slot_ids = x.contiguous(), slot_ids.contiguous()
    sizes = sizes or tile_sizes(tokens, triton.cdiv(tokens * top_k, num_experts), experts.format)
    own = max(tokens, sizes.rows) <= OWN_TILES_TOKENS
    tiles = own_tiles(slot_ids) if own else tiles_of_pairs(slot_ids, num_experts, sizes.rows)
    y = _through_experts(x, tiles, experts, sizes, slot_ids.numel(), top_k)
    return combine(y, slot_ids, weights, direct=True)


def shape_of(experts: ExpertWeights, top_k: int) -> ExpertShape:
    """What the choice of a path depends on."""
    return ExpertShape(experts.format, experts.w13.shape[0], experts.w2.shape[1], experts.w13.shape[1] // 2, top_k)


class TritonExperts:
    """The experts of a stack that has no other product."""

    def __init__(self, choices: ExpertChoices) -> None:
        self._choices = choices

    def flat(self, x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        """x [T, H] through its slots int32 [T, k] (-1: none), weighted by weights fp32 [T, k] and summed: [T, H]."""
        return by_choice(self._choices.of(x.shape[0], shape_of(experts, slot_ids.shape[1])), x, slot_ids, weights, experts)


def by_choice(choice: Choice, x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
    """The vector path where it was chosen, tiles for every other choice."""
    if choice.path == "vector" and x.shape[0]:
        return experts_vector(x, slot_ids, weights, experts)
    return experts_tiled(x, slot_ids, weights, experts, choice.sizes)


def experts_masked(x: Tensor, counts: Tensor, experts: ExpertWeights) -> Tensor:
    """x [E, M, H], of which the first counts[e] rows are real, through expert e: [E, M, H]; other rows stay as allocated."""
    num_experts, capacity, width = x.shape
    if x.numel() == 0:
        return torch.empty_like(x)
    flat = x.reshape(num_experts * capacity, width)
    sizes = tile_sizes(flat.shape[0], min(capacity, 32), experts.format)
    tiles = tiles_of_counts(counts, capacity, sizes.rows)
    return _through_experts(flat, tiles, experts, sizes, flat.shape[0], 1).view(x.shape)
