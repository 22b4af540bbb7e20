"""Triton kernels that treat each row alone: norms, also of what experts and products leave unsummed, SiLU-and-multiply.

They know no layer and no step. Statistics are in fp32, results are rounded once, and no caller's tensor is written.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# Triton kernels are traced from their source, not called: their parameters are pointers and integers of the trace.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.interface import ExpertRows, Fp8Rows, PartialSums, Unsummed
from minserve.kernels.launch import cdiv, dependent_launch, follow, lead, next_power_of_2
from minserve.kernels.triton_grouping import FP8_BLOCK, FP8_MAX, empty_fp8_rows
from minserve.kernels.triton_values import fp8_columns, fp8_groups, fp8_scale, silu_and_gate


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    scales,
    total,
    num_rows,
    inner_rows,
    width,
    outer_stride,
    inner_stride,
    scale_stride,
    eps,
    add: tl.constexpr,
    quantize: tl.constexpr,
    fp8_max: tl.constexpr,
    fp8_block: tl.constexpr,
    dependent: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    columns = tl.arange(0, block_width)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    start = (rows // inner_rows) * outer_stride + (rows % inner_rows) * inner_stride
    gain = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    lead(dependent)
    follow(dependent)
    wide = tl.load(x + start[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    flat = rows[:, None] * width + columns[None, :]
    if add:
        rounded = (wide + tl.load(residual + flat, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + flat, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)
    normed = (wide * scale[:, None] * gain[None, :]).to(x.dtype.element_ty)
    if quantize:
        values, scale = fp8_groups(normed.to(tl.float32), fp8_max, fp8_block)
        group = tl.arange(0, block_width // fp8_block)
        spot = scales + group[None, :] * scale_stride + rows[:, None]
        tl.store(spot, scale, mask=(rows < num_rows)[:, None] & (group * fp8_block < width)[None, :])
        target = out + rows[:, None] * width + fp8_columns(block_width)[None, :]
        tl.store(target, values.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + flat, normed, mask=inside)


@triton.jit
def _sum_norm_kernel(
    x,
    slots,
    weights,
    added,
    residual,
    gain,
    out,
    scales,
    total,
    width,
    scale_stride,
    eps,
    num_parts: tl.constexpr,
    weighted: tl.constexpr,
    add: tl.constexpr,
    quantize: tl.constexpr,
    fp8_max: tl.constexpr,
    fp8_block: tl.constexpr,
    dependent: tl.constexpr,
    block: tl.constexpr,
):
    """A token's rows of x, added up in order, weighted or as they are, plus its row of `added` and its residual, normed.

    Each sum is rounded, as if each had a kernel of its own.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    gains = tl.load(gain + columns, mask=inside, other=0.0).to(tl.float32)
    lead(dependent)
    follow(dependent)
    flat = token * width + columns
    before = tl.load(residual + flat, mask=inside, other=0.0).to(tl.float32)
    if add:
        beside = tl.load(added + flat, mask=inside, other=0.0).to(tl.float32)
    acc = tl.zeros([block], tl.float32)
    for place in tl.static_range(num_parts):
        pair = token * num_parts + place
        if weighted:
            chosen = tl.load(slots + pair) >= 0
            weight = tl.load(weights + pair, mask=chosen, other=0.0)
            acc += weight * tl.load(x + pair * width + columns, mask=inside & chosen, other=0.0).to(tl.float32)
        else:
            acc += tl.load(x + pair * width + columns, mask=inside, other=0.0)
    summed = acc.to(total.dtype.element_ty).to(tl.float32)
    if add:
        summed = (summed + beside).to(total.dtype.element_ty).to(tl.float32)
    rounded = (summed + before).to(total.dtype.element_ty)
    tl.store(total + flat, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps) * gains).to(total.dtype.element_ty)
    if quantize:
        groups = tl.reshape(normed.to(tl.float32), [block // fp8_block, fp8_block])
        scale = fp8_scale(groups, fp8_max)
        values = tl.reshape(groups / scale[:, None], [block])
        group = tl.arange(0, block // fp8_block)
        tl.store(scales + group * scale_stride + token, scale, mask=group * fp8_block < width)
        tl.store(out + token * width + fp8_columns(block), values.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + flat, normed, mask=inside)


@triton.jit
def _silu_and_mul_kernel(x, out, inner, x_stride, dependent: tl.constexpr, block: tl.constexpr):
    lead(dependent)
    follow(dependent)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < inner
    gate = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + inner + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * inner + columns, silu_and_gate(gate, up).to(out.dtype.element_ty), mask=inside)


def _as_rows(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """(x, rows, rows of the inner dimension, outer stride, inner stride) of a view of up to three dimensions."""
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous().flatten(0, -2)
    if x.dim() == 3:
        return x, x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)
    rows = x.shape[0] if x.dim() == 2 else 1
    return x, rows, max(rows, 1), 0, x.stride(0) if x.dim() == 2 else 0


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    _launch_norm(x, residual, weight, eps, out, None, total)
    return out, total


def _norm_fp8(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Fp8Rows, Tensor]:
    out = empty_fp8_rows(x.shape[0], x.shape[1], x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, residual, weight, eps, out.values, out.scales, total)
    return out, total


def _launch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None, total: Tensor
) -> None:
    """`total` is written where there is a residual, `scales` where there are any."""
    width = x.shape[-1]
    x, rows, inner_rows, outer_stride, inner_stride = _as_rows(x)
    if rows == 0:
        return
    block_width = next_power_of_2(width)
    block_rows = max(1, 2048 // block_width)
    _rms_norm_kernel[(cdiv(rows, block_rows),)](
        x,
        x if residual is None else residual.contiguous(),
        weight,
        out,
        out if scales is None else scales,
        total,
        rows,
        inner_rows,
        width,
        outer_stride,
        inner_stride,
        0 if scales is None else scales.stride(1),
        eps,
        add=residual is not None,
        quantize=scales is not None,
        fp8_max=FP8_MAX,
        fp8_block=FP8_BLOCK,
        block_rows=block_rows,
        block_width=block_width,
        num_warps=8 if block_rows * block_width > 2048 else 4,
        **dependent_launch(x.device),
    )


def _launch_sum_norm(
    x: Unsummed, residual: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None, total: Tensor
) -> None:
    """`scales` is written where there are any."""
    tokens, width = residual.shape
    if tokens == 0:
        return
    if isinstance(x, PartialSums):
        rows, slots, weights, added, num_parts = x.parts, x.parts, x.parts, None, x.parts.shape[1]
    else:
        rows, slots, weights, added, num_parts = x.rows, x.slots, x.weights, x.added, x.weights.shape[1]
    _sum_norm_kernel[(tokens,)](
        rows,
        slots.contiguous(),
        weights.contiguous(),
        residual if added is None else added.contiguous(),
        residual.contiguous(),
        weight,
        out,
        out if scales is None else scales,
        total,
        width,
        0 if scales is None else scales.stride(1),
        eps,
        num_parts=num_parts,
        weighted=isinstance(x, ExpertRows),
        add=added is not None,
        quantize=scales is not None,
        fp8_max=FP8_MAX,
        fp8_block=FP8_BLOCK,
        block=next_power_of_2(width),
        num_warps=16,
        **dependent_launch(residual.device),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x view [..., H] over its root mean square, times weight [H]."""
    return _norm(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor | Unsummed, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual), both new, in one pass; the sum is rounded before it is normed, that of experts' rows
    or a product's parts before anything is added to it."""
    if isinstance(x, Tensor):
        return _norm(x, residual, weight, eps)
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch_sum_norm(x, residual, weight, eps, out, None, total)
    return out, total


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """`rms_norm` of x view [T, K], K a multiple of 128, quantised."""
    return _norm_fp8(x, None, weight, eps)[0]


def add_rms_norm_fp8(x: Tensor | Unsummed, residual: Tensor, weight: Tensor, eps: float) -> tuple[Fp8Rows, Tensor]:
    """`add_rms_norm` of x and residual [T, K], K a multiple of 128, the norm quantised."""
    if isinstance(x, Tensor):
        return _norm_fp8(x, residual, weight, eps)
    out, total = empty_fp8_rows(residual.shape[0], residual.shape[1], residual.device), torch.empty_like(residual)
    _launch_sum_norm(x, residual, weight, eps, out.values, out.scales, total)
    return out, total


def silu_and_mul(x: Tensor) -> Tensor:
    """[..., 2I] = gate | up -> [..., I] = silu(gate) * up."""
    inner = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], inner, dtype=x.dtype, device=x.device)
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    if rows.numel() == 0:
        return out
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    block = min(1024, next_power_of_2(inner))
    _silu_and_mul_kernel[(rows.shape[0], cdiv(inner, block))](
        rows, out, inner, rows.stride(0), block=block, num_warps=4, **dependent_launch(x.device)
    )
    return out
