"""Triton kernels for tokens that travel between ranks in FP8: quantised before, moved with their scales after. They know no
transport and no product."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.launch import cdiv, next_power_of_2
from minserve.kernels.triton_grouping import FP8_BLOCK, FP8_MAX
from minserve.kernels.triton_values import fp8_scale


@triton.jit
def _quantize_kernel(x, values, scales, width, columns, fp8_max: tl.constexpr, blocks: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * blocks + tl.arange(0, blocks)
    places = index[:, None] * block + tl.arange(0, block)[None, :]
    inside = places < width
    loaded = tl.load(x + row * width + places, mask=inside, other=0.0).to(tl.float32)
    scale = fp8_scale(loaded, fp8_max)
    tl.store(scales + row * columns + index, scale, mask=index < columns)
    tl.store(values + row * width + places, (loaded / scale[:, None]).to(values.dtype.element_ty), mask=inside)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, H] as FP8 [T, H] and scales fp32 [T, ceil(H / 128)]; amax is at least 1e-4, scale = amax / 448."""
    x = x.contiguous()
    tokens, width = x.shape
    columns = cdiv(width, FP8_BLOCK)
    values = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tokens, columns, dtype=torch.float32, device=x.device)
    blocks = min(8, next_power_of_2(columns))
    if tokens:
        _quantize_kernel[(tokens, cdiv(columns, blocks))](
            x, values, scales, width, columns, fp8_max=FP8_MAX, blocks=blocks, block=FP8_BLOCK, num_warps=4
        )
    return values, scales


def dequantize_rows(values: Tensor, scales: Tensor) -> Tensor:
    """The other way, to bf16; for few rows."""
    wide = scales.repeat_interleave(FP8_BLOCK, dim=1)[:, : values.shape[1]]
    return (values.float() * wide).to(torch.bfloat16)


@triton.jit
def _scatter_kernel(
    values,
    scales,
    where,
    target,
    target_scales,
    width,
    columns,
    top_k,
    group_rows,
    scale_group_stride,
    scale_column_stride,
    blocks: tl.constexpr,
    block: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(where + pair).to(tl.int64)
    if row < 0:
        return
    token = pair // top_k
    index = tl.program_id(1) * blocks + tl.arange(0, blocks)
    places = index[:, None] * block + tl.arange(0, block)[None, :]
    inside = places < width
    tl.store(target + row * width + places, tl.load(values + token * width + places, mask=inside, other=0), mask=inside)
    place = target_scales + (row // group_rows) * scale_group_stride + index * scale_column_stride + row % group_rows
    tl.store(place, tl.load(scales + token * columns + index, mask=index < columns), mask=index < columns)


def scatter_quantized(
    values: Tensor, scales: Tensor, where: Tensor, num_rows: int, *, top_k: int, groups: int
) -> tuple[Tensor, Tensor]:
    """Row i // top_k of FP8 values [T, H] to row where[i] of a new [num_rows, H] for each pair int32 [T * k], -1 skipped, and
    scales fp32 [T, H / 128] to [groups, num_rows / groups, H / 128], rows fastest and padded to four, as DeepGEMM reads them."""
    width, columns, group_rows = values.shape[1], scales.shape[1], num_rows // groups
    padded_rows = cdiv(group_rows, 4) * 4
    target = torch.empty(num_rows, width, dtype=torch.uint8, device=values.device)
    target_scales = torch.empty(groups, columns, padded_rows, dtype=torch.float32, device=values.device)
    blocks = min(8, next_power_of_2(columns))
    _scatter_kernel[(where.numel(), cdiv(columns, blocks))](
        values.view(torch.uint8),
        scales,
        where,
        target,
        target_scales,
        width,
        columns,
        top_k,
        max(group_rows, 1),
        columns * padded_rows,
        padded_rows,
        blocks=blocks,
        block=FP8_BLOCK,
        num_warps=4,
    )
    return target.view(torch.float8_e4m3fn), target_scales.transpose(1, 2)[:, :group_rows]
