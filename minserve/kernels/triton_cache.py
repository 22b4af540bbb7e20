"""Triton kernels between the projections and attention: norms of heads, rotary embedding, the cache's new entries, MLA's
per-head products; and the list of a step's pages. Negative slots write nothing.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.interface import AttentionShape, Fp8Rows, HeadNorms, RotaryTable
from minserve.kernels.launch import cdiv, dependent_launch, fetch_ahead, follow, lead, next_power_of_2
from minserve.kernels.triton_grouping import FP8_BLOCK, FP8_MAX, empty_fp8_rows, fp8_rows
from minserve.kernels.triton_values import fp8_columns, fp8_groups, rotation, turned


@triton.jit
def _gqa_inputs_kernel(
    qkv,
    q_gain,
    k_gain,
    cos_sin,
    positions,
    slot_mapping,
    q_out,
    cache,
    eps,
    q_heads,
    kv_heads,
    token_stride,
    page_size,
    page_stride,
    entry_stride,
    value_offset,
    normed: tl.constexpr,
    head_dim: tl.constexpr,
    rot: tl.constexpr,
    interleaved: tl.constexpr,
    dependent: tl.constexpr,
    block_heads: tl.constexpr,
    block_dim: tl.constexpr,
):
    """Some heads of one token, queries first, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    dims = tl.arange(0, block_dim)
    inside = (head < q_heads + 2 * kv_heads)[:, None] & (dims < head_dim)[None, :]
    turning = dims < rot
    angle, partner, sign = rotation(dims, rot, interleaved)
    query = head < q_heads
    value = head >= q_heads + kv_heads
    gain, partner_gain = 1.0, 1.0
    if normed:
        gain = tl.where(
            query[:, None],
            tl.load(q_gain + dims, mask=dims < head_dim, other=0.0)[None, :],
            tl.load(k_gain + dims, mask=dims < head_dim, other=0.0)[None, :],
        ).to(tl.float32)
        partner_gain = tl.where(
            query[:, None],
            tl.load(q_gain + partner, mask=turning, other=0.0)[None, :],
            tl.load(k_gain + partner, mask=turning, other=0.0)[None, :],
        ).to(tl.float32)
    row = cos_sin + tl.load(positions + token) * rot
    cos = tl.load(row + angle, mask=turning, other=1.0)
    sin = tl.load(row + rot // 2 + angle, mask=turning, other=0.0) * sign
    slot = tl.load(slot_mapping + token).to(tl.int32)
    lead(dependent)
    follow(dependent)
    source = qkv + token * token_stride + head[:, None] * head_dim
    own = tl.load(source + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + partner[None, :], mask=inside & turning[None, :], other=0.0).to(tl.float32)
    result = tl.where(value[:, None], own, turned(own, other, gain, partner_gain, cos, sin, eps, head_dim, normed))
    target = q_out + (token * q_heads + head[:, None]) * head_dim + dims[None, :]
    tl.store(target, result.to(q_out.dtype.element_ty), mask=inside & query[:, None])
    page = (slot // page_size).to(tl.int64)
    entry = cache + page * page_stride + (slot % page_size).to(tl.int64) * entry_stride
    # A sum, not a choice between two: the compiler sees that neighbours stay neighbours, and stores them together.
    offset = value.to(tl.int32) * (value_offset - kv_heads * head_dim) + (head - q_heads) * head_dim
    written = inside & (head >= q_heads)[:, None] & (slot >= 0)
    tl.store(entry + offset[:, None] + dims[None, :], result.to(cache.dtype.element_ty), mask=written)


def gqa_inputs(
    qkv: Tensor,
    norms: HeadNorms | None,
    rotary: RotaryTable,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    shape: AttentionShape,
    *,
    fixed: bool = False,
) -> Tensor:
    """qkv [T, (Hq + 2 Hkv) D]: keys and values to their cache slots, the queries returned [T, Hq, D]; one launch. `fixed`: cut in
    the same way for any number of tokens, since the order in which a norm adds up follows from the cut."""
    tokens, heads = qkv.shape[0], shape.num_heads + 2 * shape.num_kv_heads
    q = torch.empty(tokens, shape.num_heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    block_dim = next_power_of_2(shape.head_dim)
    values, num_warps = _FIXED_SHARES if fixed else _shares(tokens)
    block_heads = max(1, min(values // block_dim, next_power_of_2(heads)))
    _gqa_inputs_kernel[(tokens, cdiv(heads, block_heads))](
        qkv,
        qkv if norms is None else norms.q,
        qkv if norms is None else norms.k,
        rotary.cos_sin,
        positions,
        slot_mapping,
        q,
        cache,
        0.0 if norms is None else norms.eps,
        shape.num_heads,
        shape.num_kv_heads,
        qkv.stride(0),
        cache.shape[2],
        cache.stride(0),
        cache.stride(2),
        cache.stride(1),
        normed=norms is not None,
        head_dim=shape.head_dim,
        rot=rotary.cos_sin.shape[1],
        interleaved=rotary.interleaved,
        block_heads=block_heads,
        block_dim=block_dim,
        num_warps=num_warps,
        **dependent_launch(qkv.device),
    )
    return q


_FIXED_SHARES = (1024, 4)


def _shares(tokens: int) -> tuple[int, int]:
    """Values of a program that prepares heads, and its warps: the fastest on an H200."""
    return (2048, 8) if tokens <= 64 else (4096, 8) if tokens <= 256 else (1024, 1)


@triton.jit
def _turn(source, target, position, written, cos_sin, rope: tl.constexpr, interleaved: tl.constexpr, block_rope: tl.constexpr):
    """The row of `rope` dims at each source pointer, turned, to its target pointer."""
    dims = tl.arange(0, block_rope)
    turning = (dims < rope)[None, :]
    angle, partner, sign = rotation(dims, rope, interleaved)
    row = cos_sin + position[:, None] * rope + angle[None, :]
    cos = tl.load(row, mask=turning, other=1.0)
    sin = tl.load(row + rope // 2, mask=turning, other=0.0) * sign[None, :]
    inside = written[:, None] & turning
    own = tl.load(source[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source[:, None] + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(target[:, None] + dims[None, :], (own * cos + other * sin).to(target.dtype.element_ty), mask=inside)


@triton.jit
def _mla_inputs_kernel(
    q,
    kv,
    gain,
    w_uk,
    cos_sin,
    positions,
    slot_mapping,
    q_latent,
    q_rope,
    cache,
    eps,
    tokens,
    num_heads,
    q_stride,
    q_head_stride,
    kv_stride,
    w_head_stride,
    w_nope_stride,
    page_size,
    page_stride,
    entry_stride,
    nope: tl.constexpr,
    rank: tl.constexpr,
    rope: tl.constexpr,
    interleaved: tl.constexpr,
    dependent: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_nope: tl.constexpr,
    block_rank: tl.constexpr,
    block_rope: tl.constexpr,
    entry_rows: tl.constexpr,
):
    """One head's queries in part of the latent space, for a block of tokens; or, as one more head, their cache entries."""
    head = tl.program_id(1)
    first = tl.program_id(0) * block_m
    if head < num_heads:
        token = first + tl.arange(0, block_m)
        real = token < tokens
        k = tl.arange(0, block_nope)
        column = tl.program_id(2) * block_n + tl.arange(0, block_n)
        w = tl.load(
            w_uk + head.to(tl.int64) * w_head_stride + k[:, None] * w_nope_stride + column[None, :],
            mask=(k < nope)[:, None] & (column < rank)[None, :],
            other=0.0,
        )
        lead(dependent)
        follow(dependent)
        source = q + token.to(tl.int64) * q_stride + head * q_head_stride
        x = tl.load(source[:, None] + k[None, :], mask=real[:, None] & (k < nope)[None, :], other=0.0)
        flat = token.to(tl.int64) * num_heads + head
        product = tl.dot(x, w, input_precision="ieee").to(q_latent.dtype.element_ty)
        target = q_latent + flat[:, None] * rank + column[None, :]
        tl.store(target, product, mask=real[:, None] & (column < rank)[None, :])
        if tl.program_id(2) == 0:
            position = tl.load(positions + token, mask=real, other=0)
            _turn(source + nope, q_rope + flat * rope, position, real, cos_sin, rope, interleaved, block_rope)
    else:
        latent = tl.arange(0, block_rank)
        weight = tl.load(gain + latent, mask=latent < rank, other=0.0).to(tl.float32)
        lead(dependent)
        follow(dependent)
        # The entries are few: the programs of this head share them out.
        for start in range(tl.program_id(2) * entry_rows, block_m, tl.num_programs(2) * entry_rows):
            row = first + start + tl.arange(0, entry_rows)
            slot = tl.load(slot_mapping + row, mask=row < tokens, other=-1)
            entry = cache + (slot // page_size) * page_stride + (slot % page_size) * entry_stride
            origin = kv + row.to(tl.int64) * kv_stride
            written = slot >= 0
            inside = written[:, None] & (latent < rank)[None, :]
            values = tl.load(origin[:, None] + latent[None, :], mask=inside, other=0.0).to(tl.float32)
            factor = tl.rsqrt(tl.sum(values * values, axis=1) / rank + eps)
            normed = (values * factor[:, None] * weight[None, :]).to(cache.dtype.element_ty)
            tl.store(entry[:, None] + latent[None, :], normed, mask=inside)
            place = tl.load(positions + row, mask=row < tokens, other=0)
            _turn(origin + rank, entry + rank, place, written, cos_sin, rope, interleaved, block_rope)


def mla_inputs(
    q: Tensor,
    kv: Tensor,
    gain: Tensor,
    eps: float,
    w_uk: Tensor,
    rotary: RotaryTable,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    block_m: int | None = None,
) -> tuple[Tensor, Tensor]:
    """q view [T, Hq, N + P] and kv view [T, R + P]: normed latents and turned keys to their cache slots, and the queries
    against them, q_latent [T, Hq, R] = q's first part times w_uk view [Hq, N, R], and q_rope [T, Hq, P]; one launch. `block_m`:
    tokens of a tile, whatever their number."""
    tokens, heads, _ = q.shape
    _, nope, rank = w_uk.shape
    rope = rotary.cos_sin.shape[1]
    q_latent = torch.empty(tokens, heads, rank, dtype=q.dtype, device=q.device)
    q_rope = torch.empty(tokens, heads, rope, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return q_latent, q_rope
    block_m = block_m or (16 if tokens <= 256 else 64)
    block_n = min(128, max(16, next_power_of_2(rank)))
    _mla_inputs_kernel[(cdiv(tokens, block_m), heads + 1, cdiv(rank, block_n))](
        q,
        kv,
        gain,
        w_uk,
        rotary.cos_sin,
        positions,
        slot_mapping,
        q_latent,
        q_rope,
        cache,
        eps,
        tokens,
        heads,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        w_uk.stride(0),
        w_uk.stride(1),
        cache.shape[1],
        cache.stride(0),
        cache.stride(1),
        nope=nope,
        rank=rank,
        rope=rope,
        interleaved=rotary.interleaved,
        block_m=block_m,
        block_n=block_n,
        block_nope=max(16, next_power_of_2(nope)),
        block_rank=next_power_of_2(rank),
        block_rope=next_power_of_2(rope),
        entry_rows=4,
        num_warps=4,
        **dependent_launch(q.device),
    )
    return q_latent, q_rope


@triton.jit
def _heads_kernel(
    x,
    weight,
    out,
    scales,
    tokens,
    num_heads,
    w_head_stride,
    w_out_stride,
    scale_stride,
    width: tl.constexpr,
    out_width: tl.constexpr,
    quantize: tl.constexpr,
    fp8_max: tl.constexpr,
    fp8_block: tl.constexpr,
    dependent: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    lines: tl.constexpr,
):
    token = tl.program_id(0) * block_m + tl.arange(0, block_m)
    head = tl.program_id(1)
    column = tl.program_id(2) * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    rows = weight + head.to(tl.int64) * w_head_stride + column * w_out_stride
    line = tl.arange(0, lines) * (128 // weight.dtype.element_ty.primitive_bitwidth * 8)
    fetch_ahead(tl.where((column < out_width)[:, None] & (line < width)[None, :], rows[:, None] + line[None, :], weight))
    lead(dependent)
    follow(dependent)
    source = x + (token.to(tl.int64) * num_heads + head) * width
    acc = tl.zeros([block_m, block_n], tl.float32)
    for start in range(0, width, block_k):
        within = (start + k < width)[None, :]
        a = tl.load(source[:, None] + start + k[None, :], mask=(token < tokens)[:, None] & within, other=0.0)
        w = tl.load(rows[:, None] + start + k[None, :], mask=(column < out_width)[:, None] & within, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    flat = (token[:, None].to(tl.int64) * num_heads + head) * out_width + column[None, :]
    inside = (token < tokens)[:, None] & (column < out_width)[None, :]
    result = acc.to(x.dtype.element_ty)
    if quantize:
        values, scale = fp8_groups(result.to(tl.float32), fp8_max, fp8_block)
        group = tl.program_id(2) * (block_n // fp8_block) + tl.arange(0, block_n // fp8_block)
        spot = scales + (head * (out_width // fp8_block) + group)[None, :] * scale_stride + token[:, None]
        tl.store(spot, scale, mask=(token < tokens)[:, None] & (group < out_width // fp8_block)[None, :])
        flat = (token[:, None].to(tl.int64) * num_heads + head) * out_width + tl.program_id(2) * block_n
        tl.store(out + flat + fp8_columns(block_n)[None, :], values.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + flat, result, mask=inside)


FINE_TOKENS = 16
"""With so few tokens a head's columns are cut finer, since there are few programs."""


def heads_linear(x: Tensor, weight: Tensor, *, block_m: int | None = None) -> Tensor:
    """x [T, Hq, K] times each head's weight view [Hq, K, N], whose K is contiguous: [T, Hq, N]."""
    tokens, heads, _ = x.shape
    out = torch.empty(tokens, heads, weight.shape[2], dtype=x.dtype, device=x.device)
    block_n = 32 if tokens <= FINE_TOKENS and block_m is None else 128
    _launch_heads(x, weight, out, None, block_m, max(16, min(block_n, next_power_of_2(weight.shape[2]))))
    return out


def heads_linear_fp8(x: Tensor, weight: Tensor) -> Fp8Rows:
    """`heads_linear`, quantised: [T, Hq * N]; with few tokens, or an N that is no multiple of 128, by a launch of its own."""
    tokens, heads, _ = x.shape
    if tokens <= FINE_TOKENS or weight.shape[2] % FP8_BLOCK:
        return fp8_rows(heads_linear(x, weight).flatten(1))
    out = empty_fp8_rows(tokens, heads * weight.shape[2], x.device)
    _launch_heads(x, weight, out.values, out.scales, None, FP8_BLOCK)
    return out


def _launch_heads(x: Tensor, weight: Tensor, out: Tensor, scales: Tensor | None, block_m: int | None, block_n: int) -> None:
    """Into `out` [T, Hq, N], and `scales` where it is FP8."""
    tokens, heads, width = x.shape
    out_width = weight.shape[2]
    if tokens == 0:
        return
    block_m = block_m or (16 if tokens <= 64 else 64)
    _heads_kernel[(cdiv(tokens, block_m), heads, cdiv(out_width, block_n))](
        x,
        weight,
        out,
        out if scales is None else scales,
        tokens,
        heads,
        weight.stride(0),
        weight.stride(2),
        0 if scales is None else scales.stride(1),
        width=width,
        out_width=out_width,
        quantize=scales is not None,
        fp8_max=FP8_MAX,
        fp8_block=FP8_BLOCK,
        block_m=block_m,
        block_n=block_n,
        block_k=max(16, min(128, next_power_of_2(width))),
        lines=next_power_of_2(cdiv(width * x.element_size(), 128)),
        num_warps=4 if block_m == 16 else 8,
        **dependent_launch(x.device),
    )


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
    block_rows = next_power_of_2(rows)
    _list_pages_kernel[(rows,)](
        page_table, seq_lens, pages, rows, page_size, page_table.stride(0), block_rows=block_rows, block=128, num_warps=4
    )
