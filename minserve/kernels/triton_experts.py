"""Triton products of the routed experts by tiles, plain or FP8 weights, and the choice between them and other Triton paths.

Weights are the matrix units' row operand and a tile's few pairs its columns. FP8 weights meet unquantised activations: both
are halves in the units (FP8 fits exactly), and each 128x128 block's scale is applied to the fp32 partial sum. Sums run in a
fixed order; which path and which tiles depend on shapes alone, and a pair's result on no other pair. Of sorted pairs each tile
goes on by itself: its second product waits for its own first one, not for all tiles' first products.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.expert_choices import Choice, ExpertChoices, ExpertShape
from minserve.kernels.expert_tiles import OWN_TILES_TOKENS, Block, TileSizes, tile_sizes
from minserve.kernels.interface import ExpertRows, ExpertWeights
from minserve.kernels.launch import announce, cdiv, dependent_launch, follow, lead, outlast, wait_for
from minserve.kernels.triton_expert_rows import experts_vector, scale_operands
from minserve.kernels.triton_grouping import (
    FP8_BLOCK,
    Tiles,
    combine,
    own_tiles,
    tile_pairs,
    tiles_of_counts,
    tiles_of_pairs,
)
from minserve.kernels.triton_int4 import int4_product, turned, turned_width
from minserve.kernels.triton_values import as_half, silu_and_gate

HIDDEN_SCALE = 16.0
"""Activations between FP8 products are stored as halves, divided by this: up to a million, and exact to 5e-7 or 11 bits."""


@triton.jit
def _multiply(acc, w, a, scale, fp8: tl.constexpr):
    """acc + w a, in fp32; FP8 weights times their block's scale."""
    if fp8:
        acc += tl.dot(w.to(a.dtype), a, input_precision="ieee") * tl.load(scale)
    else:
        acc = tl.dot(w, a, acc, input_precision="ieee")
    return acc


@triton.jit
def _inputs(pointers, mask, halves: tl.constexpr):
    a = tl.load(pointers, mask=mask, other=0.0)
    if halves and a.dtype != tl.float16:
        a = as_half(a)
    return a


@triton.jit
def _weights(pointers, mask, whole: tl.constexpr):
    """A mask that hides nothing costs registers: two programs of FP8 tiles would fit a processor, not three."""
    if whole:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _store_rows(out, acc, up_acc, row, n, n_size, out_scale, gated: tl.constexpr, halves: tl.constexpr):
    """acc [n, row], or silu(acc) * up_acc, to out's rows that are not negative."""
    if gated:
        acc = silu_and_gate(acc, up_acc)
    acc *= out_scale
    result = as_half(acc) if halves and gated else acc.to(out.dtype.element_ty)
    tl.store(out + row[None, :] * n_size + n[:, None], result, mask=(row >= 0)[None, :] & (n < n_size)[:, None])


@triton.jit
def _sums(
    inputs,
    real,
    inputs_2,
    real_2,
    side,
    gated: tl.constexpr,
    fp8: tl.constexpr,
    halves: tl.constexpr,
    whole: tl.constexpr,
    two: tl.constexpr,
    together: tl.constexpr,
    stages: tl.constexpr,
):
    """Weights times inputs, and if `two` times inputs_2; if `gated` the weights n_size rows further, too: (acc, up_acc, acc_2,
    up_acc_2), each [block_n, columns]. `side`: what concerns the weights."""
    weights, inside, scales, up_scales, n_size, k_size = side
    block_k: tl.constexpr = weights.shape[1]
    k = tl.arange(0, block_k)
    acc = tl.zeros([weights.shape[0], inputs.shape[1]], tl.float32)
    up_acc, acc_2, up_acc_2 = acc, acc, acc
    for first in tl.range(0, k_size, block_k * together, num_stages=stages):
        for step in tl.static_range(together):
            start = first + step * block_k
            mask, mask_2, weight_mask = real, real_2, inside
            if not whole:
                mask = mask & (start + k < k_size)[:, None]
                mask_2 = mask_2 & (start + k < k_size)[:, None]
                weight_mask = weight_mask & (start + k < k_size)[None, :]
            a = _inputs(inputs + start, mask, halves)
            w = _weights(weights + start, weight_mask, whole)
            acc = _multiply(acc, w, a, scales + start // 128, fp8)
            if two:
                a_2 = _inputs(inputs_2 + start, mask_2, halves)
                acc_2 = _multiply(acc_2, w, a_2, scales + start // 128, fp8)
            if gated:
                w = _weights(weights + n_size * k_size + start, weight_mask, whole)
                up_acc = _multiply(up_acc, w, a, up_scales + start // 128, fp8)
                if two:
                    up_acc_2 = _multiply(up_acc_2, w, a_2, up_scales + start // 128, fp8)
    return acc, up_acc, acc_2, up_acc_2


@triton.jit
def _product_kernel(
    x,
    slot_ids,
    rows,
    tile_expert,
    tile_ready,
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
    announced,
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
    together: tl.constexpr,
    group_tiles: tl.constexpr,
    stages: tl.constexpr,
    by_tile: tl.constexpr,
    dependent: tl.constexpr,
):
    """out[row] = x[row // row_divisor] times an expert's weight [n_size, k_size]; gated: silu(first n_size rows) * (the next).

    by_tile: each program of the gated product announces its tile, and the other product waits until its tile was `announced` by
    all of them. Which pairs are in it was written by a kernel that the gated product followed.
    """
    waits: tl.constexpr = by_tile and not gated
    if not waits:
        follow(dependent)
    lead(dependent)
    program = tl.program_id(0)
    # Neighbouring programs share activations (same tile) and, in bands of tiles, weights (same columns) in L2.
    band = program // (group_tiles * n_blocks)
    in_band = tl.minimum(num_tiles - band * group_tiles, group_tiles)
    tile = band * group_tiles + program % (group_tiles * n_blocks) % in_band
    n_block = program % (group_tiles * n_blocks) // in_band
    # A product with eight columns is done without the instructions that read weights from shared memory, so that FP8 weights
    # are widened once, in registers, for both halves of sixteen.
    two: tl.constexpr = fp8 and block_rows == 16
    columns: tl.constexpr = 8 if two else block_rows
    expert, row = tile_pairs(slot_ids, rows, tile_expert, tile, pairs, top_k, direct, places, block_rows, columns)
    if two:
        row_2 = tl.load(rows + tile * block_rows + columns + tl.arange(0, columns)).to(tl.int64)
    if expert < 0:
        if waits:
            outlast(program, dependent)
        return
    if waits:
        wait_for(tile_ready + tile, announced)
    expert, row = expert.to(tl.int64), row.to(tl.int64)
    n = n_block * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    inside = n < n_size
    inputs = x + (row // row_divisor)[None, :] * x_stride + k[:, None]
    weights = weight + expert * weight_expert_stride + n[:, None].to(tl.int64) * k_size + k[None, :]
    # FP8 has block_n and block_k at most 128, so that one scale serves a whole tile of weights; several along a row are asked for
    # `together`, since memory is slower by 128 bytes of a row than by more of it.
    scales = scale + expert * scale_expert_stride + n_block * block_n // 128 * scale_columns
    up_scales = scale + expert * scale_expert_stride + (n_size + n_block * block_n) // 128 * scale_columns
    side, real = (weights, inside[:, None], scales, up_scales, n_size, k_size), (row >= 0)[None, :]
    if two:
        # At eight pairs an expert, half of the tiles of sixteen have no more than eight: these spare the others' time and power.
        if tl.max(row_2, axis=0) >= 0:
            inputs_2, real_2 = x + (row_2 // row_divisor)[None, :] * x_stride + k[:, None], (row_2 >= 0)[None, :]
            acc, up_acc, acc_2, up_acc_2 = _sums(
                inputs, real, inputs_2, real_2, side, gated, fp8, halves, whole, True, together, stages
            )
            _store_rows(out, acc_2, up_acc_2, row_2, n, n_size, out_scale, gated, halves)
        else:
            acc, up_acc, _, _ = _sums(inputs, real, inputs, real, side, gated, fp8, halves, whole, False, together, stages)
    else:
        acc, up_acc, _, _ = _sums(inputs, real, inputs, real, side, gated, fp8, halves, whole, False, together, stages)
    _store_rows(out, acc, up_acc, row, n, n_size, out_scale, gated, halves)
    if waits:
        outlast(program, dependent)
    elif by_tile:
        announce(tile_ready + tile)


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
    """Fills the rows of out that tiles list; row_divisor > 0: gate and up, of x's row `row // row_divisor`; 0: down, of `row`.

    Down is launched right behind gate and up of the same tiles.
    """
    gated = row_divisor > 0
    n_size, k_size = weight.shape[1] // (2 if gated else 1), weight.shape[2]
    assert not gated or scale is None or n_size % FP8_BLOCK == 0, "a block of scales would hold gate and up rows"
    halves, n_blocks = scale is not None and x.element_size() == 2, cdiv(n_size, block.n)
    block_k = block.k if scale is None else min(block.k, FP8_BLOCK)
    _product_kernel[(tiles.count * n_blocks,)](
        x,
        weight=weight,
        out=out,
        n_size=n_size,
        k_size=k_size,
        row_divisor=max(1, row_divisor),
        x_stride=x.stride(0),
        num_tiles=tiles.count,
        n_blocks=n_blocks,
        tile_ready=tiles.expert if tiles.ready is None else tiles.ready,
        announced=cdiv(k_size, sizes.up.n),
        weight_expert_stride=weight.stride(0),
        out_scale=(1 / HIDDEN_SCALE if gated else HIDDEN_SCALE) if halves else 1.0,
        **tiles.operands(),
        **scale_operands(weight, scale),
        gated=gated,
        halves=halves,
        whole=k_size % block_k == 0 and n_size % block.n == 0,
        block_n=block.n,
        block_k=block_k,
        together=block.k // block_k if k_size % block.k == 0 else 1,
        group_tiles=sizes.group_tiles,
        stages=block.stages,
        by_tile=tiles.ready is not None,
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
    if x.shape[0] == 0:
        return torch.empty_like(x)
    result = tiled_rows(x, slot_ids, weights, experts, sizes)
    return combine(result.rows, result.slots, weights, direct=True)


def tiled_rows(
    x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights, sizes: TileSizes | None = None
) -> ExpertRows:
    """The same without the sum, for one token or more."""
    num_experts, (tokens, top_k) = experts.w13.shape[0], slot_ids.shape
    x, slot_ids = x.contiguous(), slot_ids.contiguous()
    sizes = sizes or tile_sizes(tokens, cdiv(tokens * top_k, num_experts), experts.format)
    own = max(tokens, sizes.rows) <= OWN_TILES_TOKENS
    tiles = own_tiles(slot_ids) if own else tiles_of_pairs(slot_ids, num_experts, sizes.rows)
    return ExpertRows(_through_experts(x, tiles, experts, sizes, slot_ids.numel(), top_k), slot_ids, weights)


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

    def rows(self, x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor | ExpertRows:
        """The same, or what is left to be summed."""
        choice = self._choices.of(x.shape[0], shape_of(experts, slot_ids.shape[1]))
        return rows_by_choice(choice, x, slot_ids, weights, experts)


UNSUMMED_TOKENS = 256
"""Of more tokens, experts sum themselves: a launch less is little then, and rows that wait for the next layer take memory."""


def rows_by_choice(choice: Choice, x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor | ExpertRows:
    """`by_choice`, or what is left to be summed where tiles were chosen for a few tokens."""
    if choice.path == "vector" or not 0 < x.shape[0] <= UNSUMMED_TOKENS:
        return by_choice(choice, x, slot_ids, weights, experts)
    return tiled_rows(x, slot_ids, weights, experts, choice.sizes)


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
