"""Triton kernels that treat each row alone: norms, SiLU-and-multiply.

They know no layer and no step. Statistics are in fp32, results are rounded once, and no caller's tensor is written.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# Triton kernels are traced from their source, not called: their parameters are pointers and integers of the trace.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.launch import dependent_launch, follow, lead
from minserve.kernels.triton_values import silu_and_gate


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    num_rows,
    inner_rows,
    width,
    outer_stride,
    inner_stride,
    eps,
    add: tl.constexpr,
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
    tl.store(out + flat, (wide * scale[:, None] * gain[None, :]).to(out.dtype.element_ty), mask=inside)


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
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    x, rows, inner_rows, outer_stride, inner_stride = _as_rows(x)
    if rows == 0:
        return out, total
    block_width = triton.next_power_of_2(width)
    block_rows = max(1, 2048 // block_width)
    _rms_norm_kernel[(triton.cdiv(rows, block_rows),)](
        x,
        x if residual is None else residual.contiguous(),
        weight,
        out,
        total,
        rows,
        inner_rows,
        width,
        outer_stride,
        inner_stride,
        eps,
        add=residual is not None,
        block_rows=block_rows,
        block_width=block_width,
        num_warps=8 if block_rows * block_width > 2048 else 4,
        **dependent_launch(x.device),
    )
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x view [..., H] over its root mean square, times weight [H]."""
    return _norm(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual), both new, in one pass; the sum is rounded before it is normed."""
    return _norm(x, residual, weight, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """[..., 2I] = gate | up -> [..., I] = silu(gate) * up."""
    inner = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], inner, dtype=x.dtype, device=x.device)
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    if rows.numel() == 0:
        return out
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    block = min(1024, triton.next_power_of_2(inner))
    _silu_and_mul_kernel[(rows.shape[0], triton.cdiv(inner, block))](
        rows, out, inner, rows.stride(0), block=block, num_warps=4, **dependent_launch(x.device)
    )
    return out
