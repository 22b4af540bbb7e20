"""Which path takes a step's experts and how it is cut: what was measured for their shape on this kind of GPU, or else a rule.

`minserve tune` measures and remembers; tables for some models on some GPUs come with the package. Knows no kernel.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from minserve.kernels.expert_tiles import Block, ExpertFormat, TileSizes, tile_sizes
from minserve.remembered import Remembered

ExpertPath = Literal["vector", "tiles", "masked", "contiguous"]
VECTOR_TOKENS = 1
"""Most tokens of the vector path by the rule; it reads an expert once for each pair, tiles once for all of its pairs."""
TILES_TOKENS: dict[ExpertFormat, int] = {"plain": 8192, "fp8_block": 256, "int4_group": 1 << 30}
"""Up to so many tokens tiles are faster than DeepGEMM by the rule, measured on an H200 at the widths of published models."""
_SHIPPED = Path(__file__).parent / "tuned"
_QUESTION = "experts"


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertShape:
    """A layer's experts as far as their speed depends on it."""

    format: ExpertFormat
    experts: int
    hidden: int
    inner: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.format} {self.experts} x {self.hidden} x {self.inner}, top {self.top_k}"


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """For one number of tokens."""

    path: ExpertPath
    sizes: TileSizes
    """The best cut into tiles, also where another path is faster: not every stack has that."""

    def to_json(self) -> list[Any]:
        up, down = (list(dataclasses.astuple(block)) for block in (self.sizes.up, self.sizes.down))
        return [self.path, self.sizes.rows, up, down, self.sizes.group_tiles]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Choice:
        path, rows, up, down, group_tiles = values
        return cls(path, TileSizes(rows, Block(*up), Block(*down), group_tiles))


def by_rule(tokens: int, shape: ExpertShape) -> Choice:
    """For shapes that nobody measured."""
    sizes = tile_sizes(tokens, -(-tokens * shape.top_k // shape.experts), shape.format)
    if tokens <= VECTOR_TOKENS and shape.format != "int4_group":
        return Choice("vector", sizes)
    if tokens <= TILES_TOKENS[shape.format]:
        return Choice("tiles", sizes)
    return Choice("contiguous", sizes)


class ExpertChoices:
    """The choices on one GPU."""

    def __init__(self, gpu: str, remembered: Remembered | None = None) -> None:
        """gpu: torch's name of it."""
        path = _SHIPPED / f"{gpu.lower().replace(' ', '-')}.json"
        self._gpu, self._remembered = gpu, remembered
        self._shipped: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        self._tables: dict[ExpertShape, list[tuple[int, Choice]]] = {}

    def of(self, tokens: int, shape: ExpertShape) -> Choice:
        """The choice for the next measured number of tokens, or by the rule."""
        if shape not in self._tables:
            own = None if self._remembered is None else self._remembered.recall(_QUESTION, self._key(shape))
            table = self._shipped.get(str(shape), []) if own is None else own
            self._tables[shape] = [(most, Choice.from_json(choice)) for most, choice in table]
        measured = (choice for most, choice in self._tables[shape] if tokens <= most)
        return next(measured, None) or by_rule(tokens, shape)

    def keep(self, shape: ExpertShape, table: Sequence[tuple[int, Choice]]) -> None:
        """Remember what was measured, for later processes, too."""
        self._tables[shape] = sorted(table, key=lambda entry: entry[0])
        if self._remembered is not None:
            self._remembered.keep(_QUESTION, self._key(shape), [[most, choice.to_json()] for most, choice in self._tables[shape]])

    def _key(self, shape: ExpertShape) -> dict[str, str]:
        return {"gpu": self._gpu, "shape": str(shape)}
