"""Linear layers of the torch-gpu stack: few rows by Triton kernels, more by torch, or a Triton kernel for FP8 weights.

FP8 weights meet unquantised activations, as in triton_experts.py.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from minserve.kernels import triton_few_rows
from minserve.kernels.interface import Fp8Rows, LinearWeight, PartialSums
from minserve.kernels.launch import cdiv, dependent_launch, follow, lead, next_power_of_2
from minserve.kernels.triton_grouping import FP8_BLOCK
from minserve.kernels.triton_values import as_half

VECTOR_ROWS = 2
"""Up to so many rows, a plain weight is read fastest by vector loads."""
SKINNY_ROWS = 8
"""Up to so many rows, an FP8 weight (beyond one row) and a small plain one are read fastest as the 16-row operand."""


@triton.jit
def _vector_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    n_size,
    k_size,
    x_stride,
    scale_columns,
    num_rows: tl.constexpr,
    fp8: tl.constexpr,
    biased: tl.constexpr,
    dependent: tl.constexpr,
    block_n: tl.constexpr,
    blocks: tl.constexpr,
):
    """Some whole rows of the weight, in registers before the kernel before this one has ended, times each row of x."""
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    block = tl.arange(0, blocks)
    k = (block[:, None] * 128 + tl.arange(0, 128)[None, :])[None, :, :]
    in_n = n < n_size
    mask = in_n[:, None, None] & (k < k_size)
    tile = tl.load(weight + n[:, None, None].to(tl.int64) * k_size + k, mask=mask, other=0.0, eviction_policy="evict_first")
    if fp8:
        scales = tl.load(
            scale + (n // 128)[:, None] * scale_columns + block[None, :],
            mask=in_n[:, None] & (block * 128 < k_size)[None, :],
            other=0.0,
        )
    if biased:
        offset = tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)
    lead(dependent)
    follow(dependent)
    wide = tile.to(tl.float32)
    for row in tl.static_range(num_rows):
        # Loaded in the weights' own shape, so that no thread waits for another to hand it over.
        values = tl.load(x + row * x_stride + k + n[:, None, None] * 0, mask=mask, other=0.0)
        sums = tl.sum(wide * values.to(tl.float32), axis=2)
        if fp8:
            sums *= scales
        result = tl.sum(sums, axis=1)
        if biased:
            result += offset
        tl.store(out + row * n_size + n, result.to(out.dtype.element_ty), mask=in_n)


@triton.jit
def _skinny_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    m_size,
    n_size,
    k_size,
    x_stride,
    scale_columns,
    fp8: tl.constexpr,
    biased: tl.constexpr,
    dependent: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    groups: tl.constexpr,
):
    """Some whole rows of the weight times all of x by matrix instructions, each warp a part of the columns."""
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    m = tl.arange(0, block_m)
    group = tl.arange(0, groups)
    k = tl.arange(0, 128)
    in_n = n < n_size
    column = (group[:, None] * 128 + k[None, :])[:, None, :]
    mask = in_n[None, :, None] & (column < k_size)
    rows = weight + n[None, :, None].to(tl.int64) * k_size
    w = tl.load(rows + column, mask=mask, other=0.0, eviction_policy="evict_first")
    if fp8:
        real = in_n[None, :] & (group * 128 < k_size)[:, None]
        scales = tl.load(scale + (n // 128)[None, :] * scale_columns + group[:, None], mask=real, other=0.0)
    lead(dependent)
    follow(dependent)
    column = (group[:, None] * 128 + k[None, :])[:, :, None]
    a = tl.load(x + m[None, None, :] * x_stride + column, mask=(m < m_size)[None, None, :] & (column < k_size), other=0.0)
    if fp8:
        # Every FP8 number is an fp16 one, at a fraction of what widening to bf16 costs. Inputs are held at fp16's largest.
        a = as_half(a)
        sums = tl.dot(w.to(tl.float16), a) * scales[:, :, None]
    else:
        sums = tl.dot(w, a)
    result = tl.sum(sums, axis=0)
    if biased:
        result += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    target = out + m[None, :] * n_size + n[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=in_n[:, None] & (m < m_size)[None, :])


@triton.jit
def _tile_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    m_size,
    n_size,
    k_size,
    x_stride,
    scale_columns,
    m_blocks,
    fp8: tl.constexpr,
    biased: tl.constexpr,
    dependent: tl.constexpr,
    whole_k: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    program = tl.program_id(0)
    m = program % m_blocks * block_m + tl.arange(0, block_m)
    n = program // m_blocks * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    in_m, in_n = m < m_size, n < n_size
    inputs = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
    weights = weight + n[:, None].to(tl.int64) * k_size + k[None, :]
    scales = scale + n // 128 * scale_columns
    acc = tl.zeros([block_m, block_n], tl.float32)
    lead(dependent)
    follow(dependent)
    for start in range(0, k_size, block_k):
        columns = start + k < k_size
        if whole_k:
            columns = k < block_k
        a = tl.load(inputs + start, mask=in_m[:, None] & columns[None, :], other=0.0)
        w = tl.load(weights + start, mask=in_n[:, None] & columns[None, :], other=0.0)
        if fp8:
            row_scale = tl.load(scales + start // 128, mask=in_n, other=0.0)
            acc += tl.dot(a, tl.trans(w.to(a.dtype)), input_precision="ieee") * row_scale[None, :]
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    if biased:
        acc += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    flat = m[:, None].to(tl.int64) * n_size + n[None, :]
    tl.store(out + flat, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def _launch(
    kernel: Any, row_blocks: int, rows: Tensor, weight: LinearWeight, bias: Tensor | None, out: Tensor, block_n: int, **own: int
) -> None:
    """`own`: what this kernel alone has, options of its launch included. A scale or bias that is not there is stood in for."""
    (n_size, k_size), scale = weight.weight.shape, weight.scale
    kernel[(row_blocks * cdiv(n_size, block_n),)](
        rows,
        weight.weight,
        weight.weight if scale is None else scale,
        rows if bias is None else bias,
        out,
        n_size=n_size,
        k_size=k_size,
        x_stride=rows.stride(0),
        scale_columns=0 if scale is None else scale.stride(0),
        fp8=scale is not None,
        biased=bias is not None,
        block_n=block_n,
        **own,
        **dependent_launch(rows.device),
    )


def _vector(rows: Tensor, weight: LinearWeight, bias: Tensor | None, out: Tensor) -> None:
    blocks = next_power_of_2(cdiv(rows.shape[1], FP8_BLOCK))
    block_n = max(1, (4096 if weight.scale is None else 8192) // (blocks * FP8_BLOCK))
    num_warps = max(4, min(16, block_n * blocks * FP8_BLOCK // 2048))
    _launch(_vector_kernel, 1, rows, weight, bias, out, block_n, num_rows=rows.shape[0], blocks=blocks, num_warps=num_warps)


def _skinny(rows: Tensor, weight: LinearWeight, bias: Tensor | None, out: Tensor) -> None:
    groups = next_power_of_2(cdiv(rows.shape[1], FP8_BLOCK))
    block_n, num_warps = 32 if groups > 16 else 16, 8 if groups > 16 or weight.scale is None else 4
    sizes = {"m_size": rows.shape[0], "block_m": 8, "groups": groups, "num_warps": num_warps}
    _launch(_skinny_kernel, 1, rows, weight, bias, out, block_n, **sizes)


def path_of(count: int, row_type: torch.dtype, weight: LinearWeight) -> Literal["vector", "skinny", "few", "tiles"]:
    """The fastest kernel by the sizes alone, as measured on an H200; "tiles" for many rows, which are torch's if unscaled."""
    n_size, k_size = weight.weight.shape
    if row_type.itemsize != 2:
        return "tiles"
    if weight.scale is None:
        small = k_size <= 2048 and n_size <= 4096
        if count == 1 or (count <= VECTOR_ROWS and small):
            return "vector"
        if count <= SKINNY_ROWS and small:
            return "skinny"
        if triton_few_rows.takes_whole(count, row_type, weight):
            return "few"
        return "vector" if count <= VECTOR_ROWS else "tiles"
    if count == 1:
        return "vector"
    # Beyond 4,096 columns its tile would not fit.
    return "skinny" if count <= SKINNY_ROWS and k_size <= 4096 else "tiles"


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]."""
    n_size, k_size = weight.weight.shape
    rows = x.reshape(-1, k_size)
    m_size, path = rows.shape[0], path_of(rows.shape[0], x.dtype, weight)
    if m_size == 0 or (path == "tiles" and weight.scale is None):
        return F.linear(x, weight.weight, bias) if weight.scale is None else x.new_empty(*x.shape[:-1], n_size)
    if path == "few":
        return triton_few_rows.linear(rows, weight, bias).view(*x.shape[:-1], n_size)
    out = torch.empty(*x.shape[:-1], n_size, dtype=x.dtype, device=x.device)
    if path != "tiles":
        (_vector if path == "vector" else _skinny)(rows, weight, bias, out)
        return out
    block_m = 16 if m_size <= 16 else 32 if m_size <= 32 else 64 if m_size <= 256 else 128
    block_n = (16 if n_size <= 4096 else 32) if block_m <= 32 else 64
    _tiles(rows, weight, bias, out, block_m, block_n)
    return out


def linear_parts(x: Tensor | Fp8Rows, weight: LinearWeight) -> Tensor | PartialSums:
    """`linear` of plain rows [T, K] without a bias, in parts where that is faster."""
    assert isinstance(x, Tensor)
    parts = triton_few_rows.parts_of(x.shape[0], x.dtype, weight)
    return triton_few_rows.linear_parts(x, weight, parts) if parts else linear(x, weight, None)


def fixed_linear(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """The same product, cut in the same way for any number of rows: a row's result depends on nothing but the row."""
    out = torch.empty(*x.shape[:-1], weight.weight.shape[0], dtype=x.dtype, device=x.device)
    if out.numel():
        _tiles(x.reshape(-1, x.shape[-1]), weight, bias, out, 64, 64)
    return out


def _tiles(rows: Tensor, weight: LinearWeight, bias: Tensor | None, out: Tensor, block_m: int, block_n: int) -> None:
    m_size, m_blocks = rows.shape[0], cdiv(rows.shape[0], block_m)
    sizes = {"m_size": m_size, "m_blocks": m_blocks, "block_m": block_m, "whole_k": rows.shape[1] % FP8_BLOCK == 0}
    sizes["block_k"] = FP8_BLOCK if rows.element_size() == 2 else 32
    launch = {"num_warps": 8 if block_m == 128 else 4, "num_stages": 4 if block_m <= 32 else 3}
    _launch(_tile_kernel, m_blocks, rows, weight, bias, out, block_n, **sizes, **launch)
