"""Triton kernels that sort (token, expert) pairs by expert and move rows, without a host sync and without atomics.

A pair is token * top_k + place. Every result is the same on each run: within an expert, pairs keep their order. They know
no matrix product; the expert kernels of both the Triton and the DeepGEMM path start and end here.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.expert_tiles import OWN_TILES_TOKENS
from minserve.kernels.interface import Fp8Rows
from minserve.kernels.launch import cdiv, dependent_launch, follow, lead, next_power_of_2
from minserve.kernels.triton_values import fp8_scale, silu_and_gate

FP8_BLOCK = 128
FP8_MAX = 448.0
_CHUNK = 4096
"""Most pairs that a program looks at at once."""


@triton.jit
def _count_kernel(slot_ids, counts, pairs, chunk: tl.constexpr, dependent: tl.constexpr):
    """Program e counts expert e's pairs."""
    follow(dependent)
    lead(dependent)
    expert = tl.program_id(0)
    found = tl.zeros([chunk], tl.int32)
    for first in range(0, pairs, chunk):
        pair = first + tl.arange(0, chunk)
        found += (tl.load(slot_ids + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, axis=0))


@triton.jit
def _place_kernel(
    slot_ids,
    counts,
    destinations,
    rows,
    tile_expert,
    row_expert,
    pairs,
    num_experts,
    capacity,
    num_rows,
    packed: tl.constexpr,
    counted: tl.constexpr,
    want_destinations: tl.constexpr,
    want_rows: tl.constexpr,
    want_tiles: tl.constexpr,
    want_row_expert: tl.constexpr,
    tile: tl.constexpr,
    chunk: tl.constexpr,
    block_experts: tl.constexpr,
    dependent: tl.constexpr,
):
    """Program e gives expert e's pairs their rows: from e * capacity, or packed, each expert's first row on a tile."""
    follow(dependent)
    lead(dependent)
    expert = tl.program_id(0)
    start = expert.to(tl.int64) * capacity
    end = start + capacity
    if packed:
        all_experts = tl.arange(0, block_experts)
        if counted:
            sizes = tl.load(counts + all_experts, mask=all_experts < num_experts, other=0)
        else:
            # Each program counts all experts' pairs for itself: with few pairs cheaper than a launch that counts them once.
            sizes = tl.zeros([block_experts], tl.int32)
            for first in range(0, pairs, chunk):
                pair = first + tl.arange(0, chunk)
                owner = tl.load(slot_ids + pair, mask=pair < pairs, other=-1)
                known = (owner >= 0) & (owner < num_experts)
                sizes += tl.histogram(tl.where(known, owner, 0), block_experts, mask=known)
        padded = (sizes + tile - 1) // tile * tile
        start = tl.sum(tl.where(all_experts < expert, padded, 0), axis=0).to(tl.int64)
        end = start + tl.sum(tl.where(all_experts == expert, padded, 0), axis=0)
    found = 0
    for first in range(0, pairs, chunk):
        pair = first + tl.arange(0, chunk)
        owner = tl.load(slot_ids + pair, mask=pair < pairs, other=-1)
        mine = owner == expert
        row = start + found + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        if want_destinations:
            tl.store(destinations + pair, row.to(tl.int32), mask=mine)
            nobody = (pair < pairs) & ((owner < 0) | (owner >= num_experts)) & (expert == 0)
            tl.store(destinations + pair, tl.full([chunk], -1, tl.int32), mask=nobody)
        if want_rows:
            tl.store(rows + row, pair, mask=mine)
        found += tl.sum(mine.to(tl.int32), axis=0)
    if not counted:
        tl.store(counts + expert, found)
    last = expert == num_experts - 1
    limit = tl.where(last, num_rows, end)
    if want_rows:
        for first in range(start + found, end, chunk):
            row = first + tl.arange(0, chunk)
            tl.store(rows + row, tl.full([chunk], -1, tl.int32), mask=row < end)
    if want_tiles:
        # The last expert also marks the tiles that nobody got.
        for first in range(start // tile, limit // tile, chunk):
            index = first + tl.arange(0, chunk)
            used = index * tile < start + found
            tl.store(tile_expert + index, tl.where(used, expert, -1), mask=index < limit // tile)
            tl.store(tile_expert + num_rows // tile + index, tl.zeros([chunk], tl.int32), mask=index < limit // tile)
    if want_row_expert:
        for first in range(start, limit, chunk):
            row = first + tl.arange(0, chunk)
            tl.store(row_expert + row, tl.where(row < end, expert, -1), mask=row < limit)


@triton.jit
def _counted_tiles_kernel(
    counts, rows, tile_expert, capacity, tiles_each: tl.constexpr, tile: tl.constexpr, dependent: tl.constexpr
):
    """The same lists for rows that already sit at e * capacity, the first counts[e] of them real."""
    follow(dependent)
    lead(dependent)
    expert = tl.program_id(0)
    index = tl.program_id(1)
    count = tl.load(counts + expert)
    place = index * tile + tl.arange(0, tile)
    listed = (expert * tiles_each + index) * tile + tl.arange(0, tile)
    tl.store(rows + listed, tl.where(place < count, expert * capacity + place, -1))
    tl.store(tile_expert + expert * tiles_each + index, tl.where(index * tile < count, expert, -1))
    tl.store(tile_expert + (tl.num_programs(0) + expert) * tiles_each + index, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """Pairs in tiles of one expert each; unused places and tiles hold -1."""

    rows: Tensor
    """int32 [tiles * tile]: the pair at each place."""
    expert: Tensor
    """int32 [tiles]"""
    tile: int
    ready: Tensor | None = None
    """int32 [tiles], zero: where a product counts what it has done of each tile, so that the next one need not wait for all."""
    own: bool = False
    """Nothing is listed: both tensors are the slots [T, k], each pair is a tile, and `tile_pairs` finds the tile's pairs."""

    @property
    def count(self) -> int:
        return self.expert.numel()

    def operands(self) -> dict[str, Any]:
        """What a kernel that calls `tile_pairs` is told of them."""
        top_k = self.expert.shape[1] if self.own else 1
        return {
            "slot_ids": self.expert,
            "rows": self.rows,
            "tile_expert": self.expert,
            "pairs": self.count,
            "top_k": top_k,
            "direct": self.own,
            "places": next_power_of_2(top_k),
            "block_rows": self.tile,
        }


def own_tiles(slot_ids: Tensor) -> Tiles:
    """slot_ids int32 [T, k], T at most OWN_TILES_TOKENS, without a launch."""
    return Tiles(slot_ids, slot_ids, OWN_TILES_TOKENS, own=True)


@triton.jit
def _own_pairs(slot_ids, tile, pairs, top_k, places: tl.constexpr, block_tokens: tl.constexpr):
    """(expert of the pair `tile`, that expert's pair of each token or -1); -1 for all but an expert's first pair."""
    expert = tl.load(slot_ids + tile)
    token, place = tl.arange(0, block_tokens), tl.arange(0, places)
    pair = token[:, None] * top_k + place[None, :]
    owner = tl.load(slot_ids + pair, mask=(pair < pairs) & (place[None, :] < top_k), other=-1)
    mine = tl.max(tl.where(owner == expert, pair, -1), axis=1)
    first = tl.min(tl.where(mine < 0, pairs, mine), axis=0)
    return tl.where(first == tile, expert, -1), mine


@triton.jit
def tile_pairs(
    slot_ids,
    rows,
    tile_expert,
    tile,
    pairs,
    top_k,
    direct: tl.constexpr,
    places: tl.constexpr,
    block_rows: tl.constexpr,
    columns: tl.constexpr,
):
    """(expert of a tile or -1, its first `columns` pairs, -1 for none): as listed, or `direct`, where each pair is a tile."""
    if direct:
        return _own_pairs(slot_ids, tile, pairs, top_k, places, block_rows)
    return tl.load(tile_expert + tile), tl.load(rows + tile * block_rows + tl.arange(0, columns))


def tiles_of_pairs(slot_ids: Tensor, num_experts: int, tile: int) -> Tiles:
    """slot_ids int32 [T, k] -> tiles, expert by expert: few tokens get fixed room for each expert, many are packed."""
    pairs, device = slot_ids.numel(), slot_ids.device
    tiles_each = cdiv(slot_ids.shape[0], tile)
    packed = tiles_each > 2
    num_tiles = min(num_experts, pairs) + pairs // tile if packed else num_experts * tiles_each
    rows = torch.empty(num_tiles * tile, dtype=torch.int32, device=device)
    expert = torch.empty(2, num_tiles, dtype=torch.int32, device=device)
    _place(slot_ids, num_experts, packed, tile, tiles_each * tile, num_tiles * tile, rows=rows, tile_expert=expert)
    return Tiles(rows, expert[0], tile, expert[1])


def tiles_of_counts(counts: Tensor, capacity: int, tile: int) -> Tiles:
    """counts int32 [E] of rows that sit at e * capacity -> tiles of row indices."""
    num_experts, tiles_each = counts.shape[0], cdiv(capacity, tile)
    rows = torch.empty(num_experts * tiles_each * tile, dtype=torch.int32, device=counts.device)
    expert = torch.empty(2, num_experts * tiles_each, dtype=torch.int32, device=counts.device)
    _counted_tiles_kernel[(num_experts, tiles_each)](
        counts, rows, expert, capacity, tiles_each=tiles_each, tile=tile, num_warps=1, **dependent_launch(counts.device)
    )
    return Tiles(rows, expert[0], tile, expert[1])


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Each pair's row in a buffer sorted by expert."""

    destinations: Tensor
    """int32 [T * k]: row of each pair, -1 for none."""
    counts: Tensor
    """int32 [E]"""
    num_rows: int
    row_expert: Tensor | None
    """contiguous: int32 [num_rows], the expert of each row, -1 beyond the last; masked: None."""


def place_masked(slot_ids: Tensor, num_experts: int, capacity: int) -> Placement:
    """Expert e's pairs at rows e * capacity and up."""
    destinations = torch.empty(slot_ids.numel(), dtype=torch.int32, device=slot_ids.device)
    num_rows = num_experts * capacity
    counts = _place(slot_ids, num_experts, False, 1, capacity, num_rows, destinations=destinations)
    return Placement(destinations, counts, num_rows, None)


def place_contiguous(slot_ids: Tensor, num_experts: int, alignment: int) -> Placement:
    """Experts one after the other, each on a multiple of `alignment`, in a buffer that fits any choice of experts."""
    pairs = slot_ids.numel()
    num_rows = (min(num_experts, pairs) + pairs // alignment) * alignment
    destinations = torch.empty(pairs, dtype=torch.int32, device=slot_ids.device)
    row_expert = torch.empty(num_rows, dtype=torch.int32, device=slot_ids.device)
    counts = _place(slot_ids, num_experts, True, alignment, 0, num_rows, destinations=destinations, row_expert=row_expert)
    return Placement(destinations, counts, num_rows, row_expert)


def _place(
    slot_ids: Tensor,
    num_experts: int,
    packed: bool,
    tile: int,
    capacity: int,
    num_rows: int,
    *,
    destinations: Tensor | None = None,
    rows: Tensor | None = None,
    tile_expert: Tensor | None = None,
    row_expert: Tensor | None = None,
) -> Tensor:
    counts = torch.empty(num_experts, dtype=torch.int32, device=slot_ids.device)
    pairs = slot_ids.numel()
    slot_ids = slot_ids.contiguous()
    chunk = min(_CHUNK, max(128, next_power_of_2(pairs)))
    counted, num_warps, dependent = packed and pairs > _CHUNK, 8 if pairs > _CHUNK else 4, dependent_launch(slot_ids.device)
    if counted:
        _count_kernel[(num_experts,)](slot_ids, counts, pairs, chunk=chunk, num_warps=num_warps, **dependent)
    _place_kernel[(num_experts,)](
        slot_ids,
        counts,
        counts if destinations is None else destinations,
        counts if rows is None else rows,
        counts if tile_expert is None else tile_expert,
        counts if row_expert is None else row_expert,
        pairs,
        num_experts,
        capacity,
        num_rows,
        packed=packed,
        counted=counted,
        want_destinations=destinations is not None,
        want_rows=rows is not None,
        want_tiles=tile_expert is not None,
        want_row_expert=row_expert is not None,
        tile=tile,
        chunk=chunk,
        block_experts=next_power_of_2(num_experts),
        num_warps=num_warps,
        **dependent,
    )
    return counts


@triton.jit
def _move_rows_kernel(
    source,
    target,
    scales,
    where,
    items,
    width,
    source_stride,
    group_rows,
    scale_group_stride,
    scale_column_stride,
    mapping: tl.constexpr,
    places: tl.constexpr,
    gated: tl.constexpr,
    quantize: tl.constexpr,
    fp8_max: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    pieces: tl.constexpr,
    dependent: tl.constexpr,
):
    """Some blocks of an item's columns, or of several items'. Item i is row: 0 all (i), 1 scatter (i, which goes to `places`
    rows), 2 listed (where[i])."""
    follow(dependent)
    lead(dependent)
    piece = tl.program_id(0).to(tl.int64) * pieces + tl.arange(0, pieces)
    item, index = piece // blocks, piece % blocks
    real = item < items
    origin = item
    if mapping == 2:
        origin = tl.load(where + item, mask=real, other=-1).to(tl.int64)
        real = origin >= 0
    columns = index[:, None] * block + tl.arange(0, block)[None, :]
    inside = real[:, None] & (columns < width)
    values = tl.load(source + origin[:, None] * source_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if gated:
        up = tl.load(source + origin[:, None] * source_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
        values = silu_and_gate(values, up)
    if quantize:
        scale = fp8_scale(values, fp8_max)
        values = values / scale[:, None]
    result = values.to(target.dtype.element_ty)
    for place in tl.static_range(places):
        row = origin
        if mapping == 1:
            row = tl.load(where + item * places + place, mask=real, other=-1).to(tl.int64)
        if quantize:
            spot = scales + (row // group_rows) * scale_group_stride + index * scale_column_stride + row % group_rows
            tl.store(spot, scale, mask=real & (row >= 0))
        tl.store(target + row[:, None] * width + columns, result, mask=inside & (row >= 0)[:, None])


Mapping = Literal["all", "scatter", "listed"]


def _pieces(count: int, gated: bool) -> tuple[int, int]:
    """Blocks of columns for a program to move, of so many in all, and its warps: the fastest on an H200."""
    if count <= 8192:
        return 8, 4
    return (8, 1) if gated else (16, 2)


def move_rows(
    source: Tensor,
    num_rows: int,
    *,
    mapping: Mapping = "all",
    where: Tensor | None = None,
    items: int | None = None,
    top_k: int = 1,
    groups: int = 1,
    gated: bool = False,
    quantize: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rows of source [N, W] moved into a new [num_rows, W], optionally through SiLU-and-multiply ([N, 2W]) and into FP8.

    mapping: "all" row i to row i; "scatter" row i to the rows where[i * top_k] and on for `items` rows, -1 skipped; "listed"
    row where[i] to itself. Rows that nothing goes to stay as allocated.
    With `quantize`, the second result holds fp32 scales [groups, num_rows / groups, W / 128], rows fastest and padded to
    four, as DeepGEMM reads them; amax is at least 1e-4, scale = amax / 448.
    """
    width = source.shape[-1] // (2 if gated else 1)
    group_rows = num_rows // groups
    target = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn if quantize else source.dtype, device=source.device)
    scales, columns, padded_rows = None, cdiv(width, FP8_BLOCK), cdiv(group_rows, 4) * 4
    if quantize:
        scales = torch.empty(groups, columns, padded_rows, dtype=torch.float32, device=source.device)
    items = num_rows if items is None else items
    if items:
        pieces, num_warps = _pieces(items * columns, gated)
        _move_rows_kernel[(cdiv(items * columns, pieces),)](
            source,
            target,
            target if scales is None else scales,
            target if where is None else where,
            items,
            width,
            source.stride(-2),
            max(group_rows, 1),
            columns * padded_rows,
            padded_rows,
            mapping={"all": 0, "scatter": 1, "listed": 2}[mapping],
            places=top_k,
            gated=gated,
            quantize=quantize,
            fp8_max=FP8_MAX,
            blocks=columns,
            block=FP8_BLOCK,
            pieces=pieces,
            num_warps=num_warps,
            **dependent_launch(source.device),
        )
    if scales is None:
        return target, None
    return target, scales.transpose(1, 2)[:, :group_rows]


def empty_fp8_rows(num_rows: int, width: int, device: torch.device) -> Fp8Rows:
    """Memory for rows whose width is a multiple of 128; TMA wants the columns of scales to begin at multiples of 16 bytes."""
    values = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(width // FP8_BLOCK, cdiv(num_rows, 4) * 4, dtype=torch.float32, device=device)
    return Fp8Rows(values, scales.t()[:num_rows])


def fp8_rows(source: Tensor, *, gated: bool = False) -> Fp8Rows:
    """Rows [T, K], or with `gated` SiLU-and-multiplied ones [T, 2K], quantised by a launch of their own."""
    values, scales = move_rows(source, source.shape[0], gated=gated, quantize=True)
    assert scales is not None
    return Fp8Rows(values, scales[0])


@triton.jit
def _combine_kernel(
    y, where, weights, out, width, top_k: tl.constexpr, direct: tl.constexpr, block: tl.constexpr, dependent: tl.constexpr
):
    follow(dependent)
    lead(dependent)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    acc = tl.zeros([block], tl.float32)
    for place in tl.static_range(top_k):
        pair = token * top_k + place
        row = tl.load(where + pair).to(tl.int64)
        chosen = row >= 0
        if direct:
            row = pair
        weight = tl.load(weights + pair, mask=chosen, other=0.0)
        acc += weight * tl.load(y + row * width + columns, mask=inside & chosen, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, acc.to(out.dtype.element_ty), mask=inside)


def combine(y: Tensor, where: Tensor, weights: Tensor, *, direct: bool) -> Tensor:
    """out[t] = sum over places of weights[t, place] * y[row of the pair], in order, in fp32: [T, H].

    y [rows, H], weights fp32 [T, k]; where int32 [T * k] is each pair's row, or with `direct` any sign (the row is the pair
    itself); pairs with a negative one add nothing, whatever lies there.
    """
    tokens, top_k = weights.shape
    out = torch.empty(tokens, y.shape[1], dtype=y.dtype, device=y.device)
    if tokens:
        block = min(1024, next_power_of_2(y.shape[1]))
        _combine_kernel[(tokens, cdiv(y.shape[1], block))](
            y,
            where,
            weights.contiguous(),
            out,
            y.shape[1],
            top_k=top_k,
            direct=direct,
            block=block,
            num_warps=4,
            **dependent_launch(y.device),
        )
    return out
