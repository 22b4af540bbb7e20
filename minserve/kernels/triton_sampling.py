"""Triton kernels behind the head: logits to each row's likeliest token, and tokens to where the next step reads them.

They know buffers of one entry a slot, and no request. What they compute is exact, whatever the number of rows and parts.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# Triton kernels are traced from their source, not called: their parameters are pointers and integers of the trace.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.launch import cdiv, dependent_launch, follow, lead, next_power_of_2

_FEW_ROWS = 16
"""Up to so many rows smaller parts keep more multiprocessors busy."""


def _block(rows: int) -> int:
    """Logits of one program."""
    return 2048 if rows <= _FEW_ROWS else 4096


@triton.jit
def _finite_or_infinite(values):
    """Infinity for NaN: no order of comparisons loses it, and a row of either has no token."""
    return tl.where(values != values, float("inf"), values)


@triton.jit
def _part_maxima_kernel(logits, values, ids, vocab_size, row_stride, parts, block: tl.constexpr, dependent: tl.constexpr):
    lead(dependent)
    follow(dependent)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * block + tl.arange(0, block)
    found = tl.load(logits + row * row_stride + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
    found = _finite_or_infinite(found)
    best = tl.max(found, axis=0)
    tl.store(values + row * parts + part, best)
    # Behind the row's end lies minus infinity too, but its ids are higher than any.
    tl.store(ids + row * parts + part, tl.min(tl.where(found == best, columns, 2147483647), axis=0).to(tl.int64))


@triton.jit
def _record_tokens_kernel(
    values,
    ids,
    slots,
    tokens,
    last_tokens,
    output_index,
    broken_rows,
    token_counts,
    parts,
    vocab_size,
    block: tl.constexpr,
    dependent: tl.constexpr,
):
    lead(dependent)
    follow(dependent)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, block)
    inside = part < parts
    found = tl.load(values + row * parts + part, mask=inside, other=-float("inf"))
    token_ids = tl.load(ids + row * parts + part, mask=inside, other=9223372036854775807)
    slot = tl.load(slots + row)
    found = _finite_or_infinite(found)
    best = tl.max(found, axis=0)
    broken = tl.abs(best) == float("inf")
    token = tl.where(broken, 0, tl.min(tl.where(found == best, token_ids, 9223372036854775807), axis=0))
    tl.store(tokens + row, token)
    tl.store(last_tokens + slot, token)
    # Rows of padding share a slot.
    tl.atomic_add(output_index + slot, 1, sem="relaxed")
    tl.atomic_add(broken_rows + slot, broken.to(tl.int32), sem="relaxed")
    tl.atomic_add(token_counts + slot * vocab_size + token, 1, sem="relaxed")


def part_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [N, V] -> (fp32 [N, S], int64 [N, S]): the largest of each of a row's parts, infinite where one is NaN, and the
    lowest id that has it, in one pass; parts are in the order of ids."""
    rows, vocab_size = logits.shape
    block = _block(rows)
    parts = cdiv(vocab_size, block)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    if rows:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        _part_maxima_kernel[(rows, parts)](
            logits,
            values,
            ids,
            vocab_size,
            logits.stride(0),
            parts,
            block=block,
            num_warps=4,
            **dependent_launch(logits.device),
        )
    return values, ids


def record_tokens(
    values: Tensor,
    ids: Tensor,
    slots: Tensor,
    last_tokens: Tensor,
    output_index: Tensor,
    broken_rows: Tensor,
    token_counts: Tensor,
) -> Tensor:
    """The id of each row's largest of values fp32 [N, S], 0 where that is not finite: int64 [N]; noted in the slots' entries."""
    rows, parts = values.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=values.device)
    if rows:
        _record_tokens_kernel[(rows,)](
            values.contiguous(),
            ids.contiguous(),
            slots.contiguous(),
            tokens,
            last_tokens,
            output_index,
            broken_rows,
            token_counts,
            parts,
            token_counts.shape[1],
            block=next_power_of_2(parts),
            num_warps=1,
            **dependent_launch(values.device),
        )
    return tokens
