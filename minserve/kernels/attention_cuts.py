"""How steps are cut into programs of our Triton attention kernels: by their shapes alone, so that a plan serves any lengths.

Knows no kernel. As measured on an H200.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from minserve.kernels.interface import AttentionMetadata, AttentionShape
from minserve.kernels.launch import cdiv, next_power_of_2, shared_memory

MAX_SPLITS = 64
LEAST_PART = 256
"""Fewest tokens of a part, but for the last: shorter rows leave parts empty instead of cutting finer."""
LONG_PART = 4096
"""Most tokens of a part, lest one long row hold up a batch of short ones, while the row's parts suffice: longer ones share it."""
LONG_PARTS = 4
"""Parts that long rows may have where fewer keep the GPU busy: so many of each row, or with few rows as many programs a processor
in all. Short rows leave them empty, and their programs start all the same: with nine empty ones a row, steps of 128 rows took
13 % longer where --max-model-len was 40,960."""
_OTHER_SHARED = 8 << 10
"""Bytes of a program's shared memory that hold no cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class TritonPlan:
    """How a step is cut."""

    decode: bool
    """Every row has one query token."""
    num_splits: int = 1
    """Most parts of a row's cache, computed side by side and then merged; 1 outside decode."""
    wanted: int = 1
    """Parts of each row that keep the GPU busy."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """Block sizes and warps of one kind of attention."""

    block_m: int
    block_n: int
    num_warps: int


@dataclasses.dataclass(frozen=True, slots=True)
class Residence:
    """How a launch's programs share processors."""

    few: bool
    """They leave room for the next kernels' beside them, and wait for memory more than they use it."""
    alone: bool = False
    """Each has a processor."""
    num_stages: int = 2
    """One more than the blocks of the cache that are on their way at once."""
    max_registers: int | None = None
    """Of a thread."""


def tiles_of(shape: AttentionShape, decode: bool) -> Tiles:
    group = shape.num_heads // shape.num_kv_heads
    wide = shape.head_dim > 256
    if decode:
        return Tiles(16 if group <= 16 else 32, 64, 8 if wide else 4)
    return Tiles(64, 32, 8) if wide else Tiles(64 if shape.head_dim > 128 else 128, 64, 8)


def plan_decode(metadata: AttentionMetadata, shape: AttentionShape, processors: int) -> TritonPlan:
    """The cut of rows of one query token each."""
    tiles, (rows, max_pages) = tiles_of(shape, True), metadata.page_table.shape
    programs = rows * shape.num_kv_heads * cdiv(shape.num_heads // shape.num_kv_heads, tiles.block_m)
    room = max_pages * metadata.page_size
    # A grouped-query program that has a processor alone reads as fast as two of half the length, which must be merged.
    together = 1 if shape.kind == "gqa" else 2
    wanted = max(1, min(together * processors // max(programs, 1), cdiv(room, tiles.block_n)))
    for_long_rows = max(LONG_PARTS, LONG_PARTS * processors // max(programs, 1))
    num_splits = max(wanted, min(cdiv(room, LONG_PART), for_long_rows))
    return TritonPlan(True, min(num_splits, MAX_SPLITS), min(wanted, MAX_SPLITS))


def residence_of(
    programs: int, processors: int, tiles: Tiles, shape: AttentionShape, plan: TritonPlan, cache: Tensor
) -> Residence:
    """Of so many programs, empty ones of long rows' parts not counted."""
    few = programs <= 2 * processors
    if plan.decode and shape.kind == "mla":
        # The cut is for two on a processor, which a few registers more would not allow. Those of 32 heads each have one anyway.
        return Residence(few, max_registers=128 if tiles.block_m == 16 else None)
    if not plan.decode or cache.element_size() != 2:
        return Residence(few)
    each = -(-programs // processors)
    # As many blocks as leave all of a processor's programs, or four, room beside each other, up to what one needs alone.
    # A block's heads are as wide in shared memory as in registers.
    block_bytes = 2 * tiles.block_n * next_power_of_2(cache.shape[-1]) * cache.element_size()
    room = shared_memory(cache.device) // max(1, min(each, 4)) - _OTHER_SHARED
    num_stages = max(2, min(room // block_bytes + 1, 5))
    # With a few more registers, three programs would run side by side and not four.
    limited = each > 3 and tiles.num_warps == 4 and shape.head_dim <= 128
    return Residence(few, each == 1, num_stages, 128 if limited else None)
