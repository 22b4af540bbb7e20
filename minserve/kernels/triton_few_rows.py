"""Products of few rows, many blocks of the weight on their way at once: whole, or in parts of its columns (split-K) for a norm.

Plain rows meet plain weights, FP8 rows FP8 weights. Knows no layer; sizes and their limits are as measured on an H200.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, assignment"
# A tuple of blocks grows as the trace goes on.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.interface import Fp8Rows, LinearWeight, PartialSums
from minserve.kernels.launch import dependent_launch, follow, lead, next_power_of_2, num_processors
from minserve.kernels.triton_grouping import FP8_BLOCK

FEW_ROWS = 32
"""Most rows that these products take; torch and DeepGEMM are faster with more."""
_BLOCK_N = 64
"""Columns of the result in a program, the fewest of a warp group's matrix instruction."""
_HELD_BYTES = 64 << 10
"""Most bytes of the weight that a program fetches into shared memory while it waits for its rows."""
_MOST_PARTS = 8


@triton.jit(do_not_specialize=["m_size", "scale_stride"])
def _few_rows_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
    bias,
    out,
    m_size,
    n_size,
    scale_stride,
    scale_columns,
    k_size: tl.constexpr,
    parts: tl.constexpr,
    fp8: tl.constexpr,
    biased: tl.constexpr,
    held: tl.constexpr,
    dependent: tl.constexpr,
    stages: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """Some rows of the weight, and of its columns a part, times all rows of x. `held`: loaded before x is there."""
    lead(dependent)
    column, part = tl.program_id(0) * block_n, tl.program_id(1)
    blocks: tl.constexpr = k_size // block_k // parts
    m, n, k = tl.arange(0, block_m), tl.arange(0, block_n), tl.arange(0, block_k)
    # Rows that are not there are the last one again: loads without a mask are all asked for at once.
    row = tl.minimum(m, m_size - 1)
    tiles = weight + column.to(tl.int64) * k_size + part * blocks * block_k + (n[:, None] * k_size + k[None, :])
    inputs = x + part * blocks * block_k + (row[:, None] * k_size + k[None, :])
    # A scale is of block_k rows by block_k columns.
    tile_scales = weight_scales + column // block_k * scale_columns + part * blocks
    row_scales = x_scales + part * blocks * scale_stride + row
    acc = tl.zeros([block_n, block_m], tl.float32)
    if held:
        w, w_scales = (), ()
        for block in tl.static_range(blocks):
            w += (tl.load(tiles + block * block_k),)
            if fp8:
                w_scales += (tl.load(tile_scales + block),)
    if biased:
        offset = tl.load(bias + column + n).to(tl.float32)
    follow(dependent)
    if held:
        a = ()
        for block in tl.static_range(blocks):
            a += (tl.load(inputs + block * block_k),)
        for block in tl.static_range(blocks):
            if fp8:
                scale = tl.load(row_scales + block * scale_stride) * w_scales[block]
                acc += tl.dot(w[block], tl.trans(a[block])) * scale[None, :]
            else:
                acc = tl.dot(w[block], tl.trans(a[block]), acc)
    else:
        for block in tl.range(0, blocks, num_stages=stages):
            tile, rows = tl.load(tiles + block * block_k), tl.load(inputs + block * block_k)
            if fp8:
                scale = tl.load(row_scales + block * scale_stride) * tl.load(tile_scales + block)
                acc += tl.dot(tile, tl.trans(rows)) * scale[None, :]
            else:
                acc = tl.dot(tile, tl.trans(rows), acc)
    if biased:
        acc += offset[:, None]
    target = out + (m[None, :] * parts + part) * n_size + (column + n)[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(m < m_size)[None, :])


def _fits(rows: int, row_type: torch.dtype, weight: LinearWeight) -> bool:
    """Whether such rows can be multiplied with the weight here, and are few."""
    n_size, k_size = weight.weight.shape
    if not 0 < rows <= FEW_ROWS or n_size % _BLOCK_N or k_size % FP8_BLOCK:
        return False
    if weight.scale is not None:
        return row_type == torch.float8_e4m3fn == weight.weight.dtype
    return row_type.itemsize == 2 and row_type == weight.weight.dtype


def takes_whole(rows: int, row_type: torch.dtype, weight: LinearWeight) -> bool:
    """Whether `linear` is the fastest for so many rows of that type.

    Its programs have to keep many processors busy, but leave enough of them to what runs on the other stream: beside experts 88
    programs cost more than they were worth.
    """
    if not _fits(rows, row_type, weight):
        return False
    n_size, k_size = weight.weight.shape
    programs, processors = n_size // _BLOCK_N, num_processors(weight.weight.device)
    return processors // 3 <= programs <= processors * 5 // 8 and 1024 <= k_size <= 4096


def parts_of(rows: int, row_type: torch.dtype, weight: LinearWeight) -> int:
    """Into how many parts `linear_parts` cuts the columns; 0 where it does not take such rows, or would gain nothing by it."""
    if rows == 1 or not _fits(rows, row_type, weight):
        return 0  # a weight meets one row faster by vector loads
    n_size, k_size = weight.weight.shape
    # All programs of a launch run at once, so that all may hold their weights. Two of plain weights share a processor.
    room = num_processors(weight.weight.device) * row_type.itemsize // (n_size // _BLOCK_N)
    parts = _MOST_PARTS
    while parts > 1 and (parts > room or k_size % (parts * FP8_BLOCK)):
        parts //= 2
    held = _BLOCK_N * k_size // parts * row_type.itemsize
    return parts if parts > 1 and held <= _HELD_BYTES else 0


def linear(x: Tensor | Fp8Rows, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N], bf16 of FP8 rows. Only what `takes_whole` takes."""
    values, kind = (x.values, torch.bfloat16) if isinstance(x, Fp8Rows) else (x, x.dtype)
    out = values.new_empty(values.shape[0], weight.weight.shape[0], dtype=kind)
    _launch(x, weight, bias, out, 1)
    return out


def linear_parts(x: Tensor | Fp8Rows, weight: LinearWeight, parts: int) -> PartialSums:
    """x [T, K] times weight [N, K] transposed, in as many parts as `parts_of` says."""
    values = x.values if isinstance(x, Fp8Rows) else x
    out = values.new_empty(values.shape[0], parts, weight.weight.shape[0], dtype=torch.float32)
    _launch(x, weight, None, out, parts)
    return PartialSums(out)


def _launch(x: Tensor | Fp8Rows, weight: LinearWeight, bias: Tensor | None, out: Tensor, parts: int) -> None:
    """`out`: [T, parts, N]"""
    values, scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x.contiguous(), None)
    (n_size, k_size), rows = weight.weight.shape, values.shape[0]
    _few_rows_kernel[(n_size // _BLOCK_N, parts)](
        values,
        values if scales is None else scales,
        weight.weight,
        weight.weight if weight.scale is None else weight.scale,
        out if bias is None else bias,
        out,
        m_size=rows,
        n_size=n_size,
        scale_stride=0 if scales is None else scales.stride(1),
        scale_columns=0 if weight.scale is None else weight.scale.stride(0),
        k_size=k_size,
        parts=parts,
        fp8=scales is not None,
        biased=bias is not None,
        held=parts > 1,
        # As many blocks on their way as a processor's memory holds.
        stages=6 if scales is None else 12,
        block_m=max(16, next_power_of_2(rows)),
        block_n=_BLOCK_N,
        block_k=FP8_BLOCK,
        num_warps=4,
        **dependent_launch(values.device),
    )
