"""The programs of our Triton attention: one over a part of a row's cache, one that merges a row's parts. Knows no plan."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from minserve.kernels.launch import fetch_ahead, follow, lead
from minserve.kernels.triton_values import fp8_columns, fp8_groups, fp8_scale, rotation, turned


@triton.jit
def _part_length(seq_len, wanted, num_splits, least_part, long_part, block_n):
    """Tokens of each part of a row: `wanted` parts that are neither too short nor too long, and no more than there can be."""
    each = tl.minimum(tl.maximum(tl.cdiv(seq_len, wanted), least_part), long_part)
    return tl.cdiv(tl.maximum(each, tl.cdiv(seq_len, num_splits)), block_n) * block_n


@triton.jit
def _page_of(table, first, stop, page_size: tl.constexpr, block_n: tl.constexpr):
    """The page of the block of a row's cache that begins at `first`, or of each of its places; 0 where none is left."""
    place = first
    if page_size % block_n != 0:
        place = first + tl.arange(0, block_n)
    return tl.load(table + place // page_size, mask=place < stop, other=0).to(tl.int64)


@triton.jit
def attention_kernel(
    q,
    q_tail,
    cache,
    page_table,
    seq_lens,
    query_start,
    out,
    out_scales,
    partial,
    partial_lse,
    q_gain,
    k_gain,
    cos_sin,
    positions,
    slot_mapping,
    scale,
    eps,
    num_rows,
    blocks_per_row,
    num_splits,
    wanted,
    num_heads,
    group,
    q_token_stride,
    q_head_stride,
    tail_token_stride,
    tail_head_stride,
    page_stride,
    table_stride,
    scale_stride,
    token_stride: tl.constexpr,
    head_stride: tl.constexpr,
    value_offset: tl.constexpr,
    head_dim: tl.constexpr,
    tail_dim: tl.constexpr,
    page_size: tl.constexpr,
    decode: tl.constexpr,
    split: tl.constexpr,
    latent: tl.constexpr,
    raw: tl.constexpr,
    normed: tl.constexpr,
    rot: tl.constexpr,
    interleaved: tl.constexpr,
    quantize: tl.constexpr,
    fp8_max: tl.constexpr,
    fp8_block: tl.constexpr,
    dependent: tl.constexpr,
    early: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    block_tail: tl.constexpr,
    alone: tl.constexpr,
    lines: tl.constexpr,
    least_part: tl.constexpr,
    long_part: tl.constexpr,
):
    """One block of (query token, head) pairs of one row and key-value head, over one part of the row's cache.

    Pairs of a row and key-value head are numbered token * group + head. `latent`: the value is the key's first part (MLA).
    `raw`: rows of one token each, whose queries, keys and values lie in q as a projection left them; the part that holds the
    token takes its key and value from there, and writes them to the cache.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    if early:
        lead(dependent)
    if decode:
        row = block // blocks_per_row
        begin = row
        length = 1
        first = (block % blocks_per_row) * block_m
    else:
        # Row r owns blocks from query_start[r] * group // block_m + r: enough for its pairs, and growing with r.
        low = 0
        high = num_rows - 1
        while low < high:
            middle = (low + high + 1) // 2
            if tl.load(query_start + middle) * group // block_m + middle <= block:
                low = middle
            else:
                high = middle - 1
        row = low
        begin = tl.load(query_start + row)
        length = tl.load(query_start + row + 1) - begin
        first = (block - begin * group // block_m - row) * block_m
        if first >= length * group:
            follow(dependent)
            return
    seq_len = tl.load(seq_lens + row)
    pair = first + tl.arange(0, block_m)
    real = pair < length * group
    token = begin.to(tl.int64) + pair // group
    head = kv_head * group + pair % group
    last_visible = seq_len - length + pair // group
    dims = tl.arange(0, block_d)
    in_dims = dims < head_dim
    stop = tl.minimum(seq_len, seq_len - length + (tl.minimum(first + block_m, length * group) - 1) // group + 1)
    start = 0
    if split:
        each = _part_length(seq_len, wanted, num_splits, least_part, long_part, block_n)
        start = part * each
        if (part > 0) & (start >= seq_len):
            # Not a token, and nothing touched. It need not `follow`: the row's first part does, so the kernel ends no sooner.
            return
        stop = tl.minimum(stop, start + each)
    table = page_table + row.to(tl.int64) * table_stride
    if raw:
        turning = dims < rot
        angle, partner, sign = rotation(dims, rot, interleaved)
        angles = cos_sin + tl.load(positions + row) * rot
        cos = tl.load(angles + angle, mask=turning, other=1.0)
        sin = tl.load(angles + rot // 2 + angle, mask=turning, other=0.0) * sign
        slot = tl.load(slot_mapping + row)
        q_gains, q_partners, k_gains, k_partners = cos, cos, cos, cos
        if normed:
            q_gains = tl.load(q_gain + dims, mask=in_dims, other=0.0).to(tl.float32)
            k_gains = tl.load(k_gain + dims, mask=in_dims, other=0.0).to(tl.float32)
            q_partners = tl.load(q_gain + partner, mask=turning, other=0.0).to(tl.float32)
            k_partners = tl.load(k_gain + partner, mask=turning, other=0.0).to(tl.float32)
    if early:
        # What lies in the cache from earlier steps can be fetched while the kernel before still runs.
        soon = start + tl.arange(0, block_n)
        soon_page = tl.load(table + soon // page_size, mask=soon < stop, other=0).to(tl.int64)
        keys_at = cache + soon_page * page_stride + (soon % page_size) * token_stride + kv_head * head_stride
        line = tl.arange(0, lines) * (1024 // cache.dtype.element_ty.primitive_bitwidth)
        fetch_ahead(keys_at[:, None] + tl.minimum(line, head_dim + tail_dim - 1)[None, :])
        if not latent:
            fetch_ahead(keys_at[:, None] + value_offset + tl.minimum(line, head_dim - 1)[None, :])
    follow(dependent)
    q_tile = tl.load(
        q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dims[None, :],
        mask=real[:, None] & in_dims[None, :],
        other=0.0,
    )
    if tail_dim > 0:
        tails = tl.arange(0, block_tail)
        q_tail_tile = tl.load(
            q_tail + token[:, None] * tail_token_stride + head[:, None] * tail_head_stride + tails[None, :],
            mask=real[:, None] & (tails < tail_dim)[None, :],
            other=0.0,
        )
    top = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, block_d], tl.float32)
    cached = stop
    if raw:
        other = tl.load(
            q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + partner[None, :],
            mask=real[:, None] & turning[None, :],
            other=0.0,
        ).to(tl.float32)
        wide = q_tile.to(tl.float32)
        wide = turned(wide, other, q_gains[None, :], q_partners[None, :], cos, sin, eps, head_dim, normed)
        q_tile = wide.to(q_tile.dtype)
        cached = tl.minimum(stop, seq_len - 1)
        if (start < stop) & (stop == seq_len):
            new = q + row.to(tl.int64) * q_token_stride + (num_heads + kv_head) * q_head_stride + tl.arange(0, 1)[:, None]
            own = tl.load(new + dims[None, :], mask=in_dims[None, :], other=0.0).to(tl.float32)
            beside = tl.load(new + partner[None, :], mask=turning[None, :], other=0.0).to(tl.float32)
            value = tl.load(new + num_heads // group * head_dim + dims[None, :], mask=in_dims[None, :], other=0.0)
            key = turned(own, beside, k_gains[None, :], k_partners[None, :], cos, sin, eps, head_dim, normed)
            key, value = key.to(cache.dtype.element_ty), value.to(cache.dtype.element_ty)
            spot = cache + slot // page_size * page_stride + slot % page_size * token_stride + kv_head * head_stride
            spot += tl.arange(0, 1)[:, None] + dims[None, :]
            written = in_dims[None, :] & (slot >= 0) & (first == 0)
            tl.store(spot, key, mask=written)
            tl.store(spot + value_offset, value, mask=written)
            top = tl.sum(q_tile.to(tl.float32) * key.to(q_tile.dtype).to(tl.float32), axis=1) * scale
            total += 1.0
            acc += value.to(tl.float32)
    if alone:
        # Added up across the warps once, at the end: nothing else runs while they wait for each other.
        sums = tl.zeros([block_m, block_n], tl.float32)
    page = _page_of(table, start, cached, page_size, block_n)
    for n in range(start, cached, block_n):
        place = n + tl.arange(0, block_n)
        visible = place < cached
        # A block that lies in one page is found by one address, and its tokens at distances that the compiler knows.
        entry = page * page_stride + kv_head * head_stride
        if page_size % block_n == 0:
            entry = entry + n % page_size * token_stride
            tokens = tl.arange(0, block_n) * token_stride
        else:
            tokens = entry + place % page_size * token_stride
            entry = 0
        # Looked up a block early: the compiler asks for blocks ahead only if it need not load their addresses first.
        page = _page_of(table, n + block_n, cached, page_size, block_n)
        # Loads are masked, not their products: unused places of a page may hold NaN, and 0 * NaN is NaN.
        readable = visible[:, None]
        if head_dim != block_d:
            readable = readable & in_dims[None, :]
        keys = tl.load(cache + entry + (tokens[:, None] + dims[None, :]), mask=readable, other=0.0)
        scores = tl.dot(q_tile, tl.trans(keys).to(q_tile.dtype), input_precision="ieee")
        if tail_dim > 0:
            tail_keys = tl.load(
                cache + entry + (tokens[:, None] + head_dim + tails[None, :]),
                mask=visible[:, None] & (tails < tail_dim)[None, :],
                other=0.0,
            )
            scores += tl.dot(q_tail_tile, tl.trans(tail_keys).to(q_tile.dtype), input_precision="ieee")
        seen = visible[None, :]
        if not decode:
            seen = seen & (place[None, :] <= last_visible[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        probabilities = tl.exp2(scores * scale - shift[:, None])
        shrink = tl.exp2(top - shift)
        total *= shrink
        if alone:
            sums = sums * shrink[:, None] + probabilities
        else:
            total += tl.sum(probabilities, axis=1)
        values = keys
        if not latent:
            values = tl.load(cache + entry + value_offset + (tokens[:, None] + dims[None, :]), mask=readable, other=0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(probabilities.to(q_tile.dtype), values.to(q_tile.dtype), acc, input_precision="ieee")
        top = new_top
    if not early:
        lead(dependent)
    if alone:
        total += tl.sum(sums, axis=1)
    # Only a part without tokens sums to 0. Asked the other way round (> 0), a NaN would be taken for one and vanish.
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    flat = token * num_heads + head
    in_one_part = True
    if split:
        in_one_part = each >= seq_len
    if in_one_part:
        result = acc.to(q_tile.dtype)
        if quantize:
            quantized, scales = fp8_groups(result.to(tl.float32), fp8_max, fp8_block)
            target = out + flat[:, None] * head_dim + fp8_columns(block_d)[None, :]
            tl.store(target, quantized.to(out.dtype.element_ty), mask=real[:, None] & in_dims[None, :])
            in_head = tl.arange(0, block_d // fp8_block)
            spot = out_scales + (head[:, None] * (head_dim // fp8_block) + in_head[None, :]) * scale_stride + token[:, None]
            tl.store(spot, scales, mask=real[:, None] & (in_head < head_dim // fp8_block)[None, :])
        else:
            tl.store(out + flat[:, None] * head_dim + dims[None, :], result, mask=real[:, None] & in_dims[None, :])
    else:
        lse = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
        flat = flat * num_splits + part
        tl.store(partial_lse + flat, lse, mask=real)
        tl.store(partial + flat[:, None] * head_dim + dims[None, :], acc, mask=real[:, None] & in_dims[None, :])


@triton.jit
def merge_kernel(
    partial,
    partial_lse,
    out,
    out_scales,
    seq_lens,
    num_splits,
    wanted,
    num_heads,
    scale_stride,
    head_dim: tl.constexpr,
    quantize: tl.constexpr,
    fp8_max: tl.constexpr,
    dependent: tl.constexpr,
    block_splits: tl.constexpr,
    block_d: tl.constexpr,
    block_n: tl.constexpr,
    least_part: tl.constexpr,
    long_part: tl.constexpr,
):
    """Parts of some heads of one token, weighted by their share of the softmax's sum, added in order."""
    token = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens + token)
    lead(dependent)
    follow(dependent)
    each = _part_length(seq_len, wanted, num_splits, least_part, long_part, block_n)
    if each >= seq_len:
        return
    dims = tl.program_id(2) * block_d + tl.arange(0, block_d)
    parts = tl.arange(0, block_splits)
    filled = parts * each < seq_len  # the others have written nothing
    for head in range(tl.program_id(1), num_heads, tl.num_programs(1)):
        flat = token * num_heads + head
        lse = tl.load(partial_lse + flat * num_splits + parts, mask=filled, other=float("-inf"))
        top = tl.max(lse, axis=0)
        weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
        inside = filled[:, None] & (dims < head_dim)[None, :]
        values = tl.load(partial + (flat * num_splits + parts[:, None]) * head_dim + dims[None, :], mask=inside, other=0.0)
        whole = tl.sum(weights, axis=0)
        result = tl.sum(values * weights[:, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)
        if quantize:
            # A program's dims are one group.
            wide = result.to(tl.bfloat16).to(tl.float32)
            scale = tl.max(fp8_scale(wide[None, :], fp8_max), axis=0)
            group = head * tl.num_programs(2) + tl.program_id(2)
            tl.store(out_scales + group * scale_stride + token, scale)
            tl.store(out + flat * head_dim + dims, (wide / scale).to(out.dtype.element_ty), mask=dims < head_dim)
        else:
            tl.store(out + flat * head_dim + dims, result.to(out.dtype.element_ty), mask=dims < head_dim)
