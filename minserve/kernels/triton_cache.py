"""Triton kernels that write a step's keys and values into the paged cache (negative slots are skipped) and list its pages."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_pair_kernel(
    first,
    second,
    cache,
    slot_mapping,
    page_size,
    page_stride,
    token_stride,
    second_offset,
    first_width,
    second_width,
    first_inner,
    second_inner,
    first_token_stride,
    first_inner_stride,
    second_token_stride,
    second_inner_stride,
    block_first: tl.constexpr,
    block_second: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    target = cache + (slot // page_size) * page_stride + (slot % page_size) * token_stride
    i = tl.arange(0, block_first)
    source = first + token * first_token_stride + (i // first_inner) * first_inner_stride + i % first_inner
    tl.store(target + i, tl.load(source, mask=i < first_width).to(cache.dtype.element_ty), mask=i < first_width)
    j = tl.arange(0, block_second)
    source = second + token * second_token_stride + (j // second_inner) * second_inner_stride + j % second_inner
    values = tl.load(source, mask=j < second_width).to(cache.dtype.element_ty)
    tl.store(target + second_offset + j, values, mask=j < second_width)


def _write(
    first: Tensor, second: Tensor, cache: Tensor, slot_mapping: Tensor, page_size: int, token_stride: int, second_offset: int
) -> None:
    """Both tensors as [T, inner blocks, inner]; the last dim contiguous."""
    if first.shape[0] == 0:
        return
    first_width, second_width = first.shape[1] * first.shape[2], second.shape[1] * second.shape[2]
    _write_pair_kernel[(first.shape[0],)](
        first,
        second,
        cache,
        slot_mapping,
        page_size,
        cache.stride(0),
        token_stride,
        second_offset,
        first_width,
        second_width,
        first.shape[2],
        second.shape[2],
        first.stride(0),
        first.stride(1),
        second.stride(0),
        second.stride(1),
        block_first=triton.next_power_of_2(first_width),
        block_second=triton.next_power_of_2(second_width),
        num_warps=4,
    )


def write_gqa(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """k and v views [T, Hkv, D] into cache [pages, 2, page_size, Hkv, D] at slot_mapping int64 [T]."""
    _write(k, v, cache, slot_mapping, cache.shape[2], cache.stride(2), cache.stride(1))


def write_mla(latent: Tensor, k_rope: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """latent view [T, R] and k_rope view [T, P] into cache [pages, page_size, R + P] at slot_mapping int64 [T]."""
    rope = k_rope.unsqueeze(1)
    _write(latent.unsqueeze(1), rope, cache, slot_mapping, cache.shape[1], cache.stride(1), latent.shape[1])


@triton.jit
def _list_pages_kernel(
    page_table, seq_lens, pages, num_rows, page_size, table_stride, block_rows: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0)
    rows = tl.arange(0, block_rows)
    counts = (tl.load(seq_lens + rows, mask=rows < num_rows, other=0) + page_size - 1) // page_size
    start = tl.sum(tl.where(rows < row, counts, 0), axis=0)
    count = tl.sum(tl.where(rows == row, counts, 0), axis=0)
    for first in range(0, count, block):
        place = first + tl.arange(0, block)
        values = tl.load(page_table + row.to(tl.int64) * table_stride + place, mask=place < count)
        tl.store(pages + start + place, values, mask=place < count)


def list_pages(page_table: Tensor, seq_lens: Tensor, page_size: int, pages: Tensor) -> None:
    """The pages of all rows one after the other into int32 `pages`, which must hold as many as the rows use."""
    rows = page_table.shape[0]
    block_rows = triton.next_power_of_2(rows)
    _list_pages_kernel[(rows,)](
        page_table, seq_lens, pages, rows, page_size, page_table.stride(0), block_rows=block_rows, block=128, num_warps=4
    )
