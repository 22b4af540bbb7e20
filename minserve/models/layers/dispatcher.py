"""Sends tokens to where their experts are and brings the results back. Knows slots and ranks, no weights."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Which slot holds each expert."""

    slot_of_expert: tuple[int, ...]

    @classmethod
    def identity(cls, num_experts: int) -> ExpertPlacement:
        return cls(tuple(range(num_experts)))

    @property
    def is_identity(self) -> bool:
        return self.slot_of_expert == tuple(range(len(self.slot_of_expert)))


@dataclasses.dataclass(frozen=True, slots=True)
class FlatTokens:
    """Tokens in rows, each with the local slots that it goes through."""

    hidden: Tensor
    """[N, H]"""
    slot_ids: Tensor
    """int32 [N, k]: local slots, -1 for none."""
    weights: Tensor
    """fp32 [N, k]"""


@dataclasses.dataclass(frozen=True, slots=True)
class MaskedTokens:
    """Tokens already sorted into their slots, of which the first counts[e] rows are real."""

    hidden: Tensor
    """[E, M, H]"""
    counts: Tensor
    """int32 [E]"""


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatched:
    """What this rank's experts have to compute, and what `combine` needs to bring it back."""

    tokens: FlatTokens | MaskedTokens
    handle: Any = None


class Dispatcher(Protocol):
    """One expert-parallel group. Each rank calls dispatch and combine once per MoE layer, tokens or not."""

    def dispatch(self, hidden: Tensor, slot_ids: Tensor, weights: Tensor, num_tokens: Tensor | None) -> Dispatched:
        """hidden [T, H], global slots int32 [T, k] (-1: none), weights fp32 [T, k], real tokens int32 [1] or None for all."""
        ...

    def combine(self, output: Tensor, dispatched: Dispatched) -> Tensor:
        """The experts' output, in the layout of `dispatched.tokens`, back in the tokens' order, weighted and summed: [T, H]."""
        ...


class LocalDispatcher:
    """All experts live here: nothing moves."""

    def dispatch(self, hidden: Tensor, slot_ids: Tensor, weights: Tensor, num_tokens: Tensor | None) -> Dispatched:
        del num_tokens
        return Dispatched(FlatTokens(hidden, slot_ids, weights))

    def combine(self, output: Tensor, dispatched: Dispatched) -> Tensor:
        del dispatched
        return output
