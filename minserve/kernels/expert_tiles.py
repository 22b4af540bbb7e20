"""How the tiled products of the experts are cut, by shapes alone: sizes measured on an H200. Knows no kernel."""

from __future__ import annotations

import dataclasses
from typing import Literal

ExpertFormat = Literal["plain", "fp8_block", "int4_group"]
OWN_TILES_TOKENS = 8
"""Most tokens whose pairs find their experts' tiles themselves: the least width of a matrix unit's operand."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """One program's tile of weights, n rows by k columns, and its launch options. FP8: n is at most 128, and k at most that or a
    multiple; INT4: k is 256."""

    n: int
    k: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True, slots=True)
class TileSizes:
    """How both products of a step are cut."""

    rows: int
    """Pairs of a tile: at most so many share one read of an expert. Without a sort it is OWN_TILES_TOKENS."""
    up: Block
    down: Block
    group_tiles: int = 1
    """Tiles whose programs share weights in the second-level cache."""


def tile_sizes(tokens: int, mean: int, kind: ExpertFormat) -> TileSizes:
    """By the mean number of pairs an expert gets, rounded up: a tile wastes least where it is near that."""
    fp8 = kind == "fp8_block"
    if kind == "int4_group":
        rows = 8 if tokens <= OWN_TILES_TOKENS else 16 if mean <= 16 else 64
        return TileSizes(rows, Block(32, 256, 2, 3), Block(128, 256, 4, 2) if rows < 64 else Block(64, 256, 4, 2))
    if tokens <= OWN_TILES_TOKENS:
        if fp8:
            return TileSizes(8, Block(64, 256, 4, 2), Block(64, 128, 4, 4))
        return TileSizes(8, Block(32, 256, 2, 3), Block(32, 128, 2, 3))
    if mean <= 48 and fp8:
        block = Block(64, 256, 4, 3) if mean <= 4 else Block(128, 256, 4, 2) if mean <= 16 else Block(32, 128, 2, 3)
        return TileSizes(8 if mean <= 4 else 16 if mean <= 16 else 32, block, block)
    if mean <= 48:
        block = Block(64, 128, 4, 3) if mean <= 8 else Block(64, 64, 4, 5)
        return TileSizes(16 if mean <= 8 else 32, block, block)
    if mean <= 96:
        return TileSizes(64, Block(64, 128 if fp8 else 64, 4, 3), Block(64, 128 if fp8 else 64, 4, 3), 8)
    block = Block(64, 128, 8, 3) if fp8 else Block(128, 64, 8, 3)
    return TileSizes(128, block, block, 8)


FIXED_SIZES = TileSizes(32, Block(64, 128, 4, 3), Block(64, 128, 4, 3))
"""One cut for every number of tokens and every format."""
