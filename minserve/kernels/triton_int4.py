"""Triton product of routed experts whose weights are INT4 in groups of 32: widened in registers, multiplied as bf16.

A word holds eight neighbours along K. The kernel multiplies each of a word's eight places by the inputs that belong to it, so
that no word is taken apart across threads: inputs come with each block of K turned from [words, 8] to [8, words]. Widened
weights equal `widen_int4`'s bit for bit. Knows no path and no sort.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.expert_tiles import Block
from minserve.kernels.launch import cdiv, dependent_launch, follow, keyed, lead
from minserve.kernels.triton_grouping import Tiles, tile_pairs
from minserve.kernels.triton_values import silu_and_gate

BLOCK_K = 256
"""Values of K that are turned together: the inputs' layout, so one for all sizes."""
INT4_GROUP = 32

# Places s and s + 4 of two words at once: 0x4300 | q is the bf16 128 + q, and q is stored with 8 added.
_TWO_PLACES = """{{
.reg .b32 a, b, bias;
mov.b32 bias, 0x43084308;
shr.b32 a, $2, {shift};
shr.b32 b, $3, {shift};
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
sub.rn.bf16x2 a, a, bias;
sub.rn.bf16x2 b, b, bias;
prmt.b32 $0, a, b, 0x5410;
prmt.b32 $1, a, b, 0x7632;
}}"""
_AT_0, _AT_4, _AT_8, _AT_12 = (tl.constexpr(_TWO_PLACES.format(shift=shift)) for shift in (0, 4, 8, 12))


@triton.jit
def _two_places(words, code: tl.constexpr):
    return tl.inline_asm_elementwise(code, "=r,=r,r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)


@triton.jit
def _place(words, place: tl.constexpr, scale, dtype: tl.constexpr):
    return ((((words >> (4 * place)) & 15) - 8).to(tl.float32) * scale.to(tl.float32)).to(dtype)


@keyed
@triton.jit
def _multiply(acc, words, scale, a0, a1, a2, a3, a4, a5, a6, a7, fast: tl.constexpr):
    """acc plus the widened words times the inputs of each of their eight places."""
    if fast:
        w0, w4 = _two_places(words, _AT_0)
        w1, w5 = _two_places(words, _AT_4)
        w2, w6 = _two_places(words, _AT_8)
        w3, w7 = _two_places(words, _AT_12)
        w0, w1, w2, w3, w4, w5, w6, w7 = (
            w0 * scale,
            w1 * scale,
            w2 * scale,
            w3 * scale,
            w4 * scale,
            w5 * scale,
            w6 * scale,
            w7 * scale,
        )
    else:
        w0, w1 = _place(words, 0, scale, a0.dtype), _place(words, 1, scale, a0.dtype)
        w2, w3 = _place(words, 2, scale, a0.dtype), _place(words, 3, scale, a0.dtype)
        w4, w5 = _place(words, 4, scale, a0.dtype), _place(words, 5, scale, a0.dtype)
        w6, w7 = _place(words, 6, scale, a0.dtype), _place(words, 7, scale, a0.dtype)
    acc = tl.dot(w0, a0, acc, input_precision="ieee")
    acc = tl.dot(w1, a1, acc, input_precision="ieee")
    acc = tl.dot(w2, a2, acc, input_precision="ieee")
    acc = tl.dot(w3, a3, acc, input_precision="ieee")
    acc = tl.dot(w4, a4, acc, input_precision="ieee")
    acc = tl.dot(w5, a5, acc, input_precision="ieee")
    acc = tl.dot(w6, a6, acc, input_precision="ieee")
    return tl.dot(w7, a7, acc, input_precision="ieee")


@triton.jit
def _group_scales(pointers, mask, rows: tl.constexpr, block_k: tl.constexpr, group: tl.constexpr):
    """[rows, words]: each group's scale for its words."""
    scale = tl.load(pointers, mask=mask, other=0.0)
    wide = tl.broadcast_to(scale[:, :, None], (rows, block_k // group, group // 8))
    return tl.reshape(wide, (rows, block_k // 8))


@triton.jit
def _int4_kernel(
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
    out_stride,
    pairs,
    n_blocks,
    weight_expert_stride,
    scale_expert_stride,
    gated: tl.constexpr,
    fast: tl.constexpr,
    direct: tl.constexpr,
    places: tl.constexpr,
    block_rows: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group: tl.constexpr,
    stages: tl.constexpr,
    dependent: tl.constexpr,
):
    """out[row] = x[row // row_divisor] (turned) times an expert's weight; gated: silu(first n_size rows) * (the next), turned."""
    follow(dependent)
    lead(dependent)
    tile = tl.program_id(0) // n_blocks
    n_block = tl.program_id(0) % n_blocks
    expert, row = tile_pairs(slot_ids, rows, tile_expert, tile, pairs, top_k, direct, places, block_rows, block_rows)
    if expert < 0:
        return
    expert, row = expert.to(tl.int64), row.to(tl.int64)
    n = n_block * block_n + tl.arange(0, block_n)
    words: tl.constexpr = block_k // 8
    word, part = tl.arange(0, words), tl.arange(0, block_k // group)
    all_words, all_groups = k_size // 8, k_size // group
    real, inside = (row >= 0)[None, :], (n < n_size)[:, None]
    inputs = x + (row // row_divisor)[None, :] * x_stride + word[:, None]
    weights = weight + expert * weight_expert_stride + n[:, None].to(tl.int64) * all_words + word[None, :]
    scales = scale + expert * scale_expert_stride + n[:, None].to(tl.int64) * all_groups + part[None, :]
    acc = tl.zeros([block_n, block_rows], tl.float32)
    up_acc = tl.zeros([block_n, block_rows], tl.float32)
    for start in tl.range(0, k_size, block_k, num_stages=stages):
        here = start // 8 + word < all_words
        mask = real & here[:, None]
        a0 = tl.load(inputs + start, mask=mask, other=0.0)
        a1 = tl.load(inputs + start + words, mask=mask, other=0.0)
        a2 = tl.load(inputs + start + 2 * words, mask=mask, other=0.0)
        a3 = tl.load(inputs + start + 3 * words, mask=mask, other=0.0)
        a4 = tl.load(inputs + start + 4 * words, mask=mask, other=0.0)
        a5 = tl.load(inputs + start + 5 * words, mask=mask, other=0.0)
        a6 = tl.load(inputs + start + 6 * words, mask=mask, other=0.0)
        a7 = tl.load(inputs + start + 7 * words, mask=mask, other=0.0)
        mask = inside & here[None, :]
        scale_mask = inside & (start // group + part < all_groups)[None, :]
        w = tl.load(weights + start // 8, mask=mask, other=0, eviction_policy="evict_first")
        s = _group_scales(scales + start // group, scale_mask, block_n, block_k, group)
        acc = _multiply(acc, w, s, a0, a1, a2, a3, a4, a5, a6, a7, fast)
        if gated:
            w = tl.load(weights + n_size * all_words + start // 8, mask=mask, other=0, eviction_policy="evict_first")
            s = _group_scales(scales + n_size * all_groups + start // group, scale_mask, block_n, block_k, group)
            up_acc = _multiply(up_acc, w, s, a0, a1, a2, a3, a4, a5, a6, a7, fast)
    column = n
    if gated:
        acc = silu_and_gate(acc, up_acc)
        column = n // block_k * block_k + n % 8 * words + n % block_k // 8
    tl.store(out + row[None, :] * out_stride + column[:, None], acc.to(out.dtype.element_ty), mask=real & inside)


def turned_width(k_size: int) -> int:
    """Columns of a turned row of k_size values: whole blocks."""
    return -(-k_size // BLOCK_K) * BLOCK_K


def turned(x: Tensor) -> Tensor:
    """x [T, K] as the kernel reads it: [T, turned_width(K)], K a multiple of 8."""
    padded = torch.nn.functional.pad(x, (0, turned_width(x.shape[1]) - x.shape[1]))
    return padded.view(x.shape[0], -1, BLOCK_K // 8, 8).transpose(2, 3).reshape(x.shape[0], -1)


def int4_product(
    x: Tensor, tiles: Tiles, weight: Tensor, scale: Tensor, out: Tensor, block: Block, *, row_divisor: int = 0
) -> None:
    """Fills the rows of out that tiles list, with x turned; row_divisor > 0: gate and up, of x's row `row // row_divisor`, into
    an out that is turned, too; 0: down, of x's row `row`. weight int32 [E, N, K / 8], scale [E, N, K / 32] in x's type."""
    gated = row_divisor > 0
    n_size, k_size = weight.shape[1] // (2 if gated else 1), weight.shape[2] * 8
    n_blocks, launch = cdiv(n_size, block.n), dependent_launch(x.device)
    _int4_kernel[(tiles.count * n_blocks,)](
        x,
        weight=weight,
        scale=scale,
        out=out,
        n_size=n_size,
        k_size=k_size,
        row_divisor=max(1, row_divisor),
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        n_blocks=n_blocks,
        weight_expert_stride=weight.stride(0),
        scale_expert_stride=scale.stride(0),
        **tiles.operands(),
        gated=gated,
        fast=launch["dependent"] and x.dtype == scale.dtype == torch.bfloat16,
        block_n=block.n,
        block_k=BLOCK_K,
        group=INT4_GROUP,
        stages=block.stages,
        num_warps=block.warps,
        **launch,
    )
