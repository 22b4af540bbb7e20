"""Triton kernels over rows that came sorted by expert, of which only the counted ones are real. They know no transport.

A buffer has room for every token of every rank at each expert, and a decode step fills a few rows of it: programs walk an
expert's real rows, so that the room costs nothing.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.launch import cdiv, next_power_of_2
from minserve.kernels.triton_grouping import FP8_BLOCK, FP8_MAX
from minserve.kernels.triton_values import fp8_scale, silu_and_gate

_WALKERS = 8
"""Programs that share an expert's rows."""


@triton.jit
def _masked_rows_kernel(
    source,
    target,
    scales,
    counts,
    width,
    source_stride,
    target_stride,
    capacity,
    scale_group_stride,
    scale_column_stride,
    gated: tl.constexpr,
    quantize: tl.constexpr,
    fp8_max: tl.constexpr,
    walkers: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
):
    group = tl.program_id(0) // walkers
    count = tl.load(counts + group)
    index = tl.program_id(1) * blocks + tl.arange(0, blocks)
    columns = index[:, None] * block + tl.arange(0, block)[None, :]
    inside = columns < width
    for place in range(tl.program_id(0) % walkers, count, walkers):
        row = (group * capacity + place).to(tl.int64)
        values = tl.load(source + row * source_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if gated:
            up = tl.load(source + row * source_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
            values = silu_and_gate(values, up)
        if quantize:
            scale = fp8_scale(values, fp8_max)
            values = values / scale[:, None]
            places = scales + group.to(tl.int64) * scale_group_stride + index * scale_column_stride + place
            tl.store(places, scale, mask=index * block < width)
        tl.store(target + row * target_stride + columns, values.to(target.dtype.element_ty), mask=inside)


def masked_rows(
    source: Tensor,
    counts: Tensor,
    *,
    gated: bool = False,
    quantize: bool = False,
    columns: int | None = None,
    room: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The first counts[e] rows of each expert of source [E, M, W] in a new [E, M, room], other rows unspecified.

    `columns`: only so many of them (all); `room`: the new rows' length (`columns`), of which the rest is unspecified. gated:
    [E, M, 2W] through SiLU-and-multiply. With `quantize`, FP8 values, and as second result their fp32 scales [E, M, W / 128],
    rows fastest and padded to four, as DeepGEMM reads them; amax is at least 1e-4, scale = amax / 448.
    """
    num_experts, capacity, _ = source.shape
    width = columns or source.shape[2] // (2 if gated else 1)
    dtype = torch.float8_e4m3fn if quantize else source.dtype
    target = torch.empty(num_experts, capacity, room or width, dtype=dtype, device=source.device)
    scales, scale_columns = None, cdiv(width, FP8_BLOCK)
    padded_rows = cdiv(capacity, 4) * 4
    if quantize:
        scales = torch.empty(num_experts, scale_columns, padded_rows, dtype=torch.float32, device=source.device)
    blocks = min(8, next_power_of_2(scale_columns))
    _masked_rows_kernel[(num_experts * _WALKERS, cdiv(scale_columns, blocks))](
        source,
        target,
        target if scales is None else scales,
        counts,
        width,
        source.stride(1),
        target.stride(1),
        capacity,
        scale_columns * padded_rows,
        padded_rows,
        gated=gated,
        quantize=quantize,
        fp8_max=FP8_MAX,
        walkers=_WALKERS,
        blocks=blocks,
        block=FP8_BLOCK,
        num_warps=4,
    )
    return target, None if scales is None else scales.transpose(1, 2)[:, :capacity]
