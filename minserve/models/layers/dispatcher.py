"""Sends tokens to where their experts are and brings the results back. Knows slots and ranks, no weights."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class FlatTokens:
    """Tokens in rows, each with the local slots that it goes through."""

    hidden: Tensor
    """[N, H]"""
    slot_ids: Tensor
    """int32 [N, k]: local slots, -1 for none."""
    weights: Tensor
    """fp32 [N, k]"""
    scale: Tensor | None = None
    """FP8 rows: their scales fp32 [N, H / 128]."""


@dataclasses.dataclass(frozen=True, slots=True)
class MaskedTokens:
    """Tokens already sorted into their slots, of which the first counts[e] rows are real."""

    hidden: Tensor
    """[E, M, H]"""
    counts: Tensor
    """int32 [E]"""
    scale: Tensor | None = None
    """FP8 rows: their scales fp32 [E, M, H / 128], rows fastest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatched:
    """What this rank's experts have to compute, and what `combine` needs to bring it back."""

    tokens: FlatTokens | MaskedTokens
    handle: Any = None


_Output = TypeVar("_Output")
_all_gather: Callable[..., Any] = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
"""Of equal pieces into one tensor: later versions of torch call it otherwise."""


Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
"""[T, H] -> FP8 [T, H], scales fp32 [T, H / 128]"""


class CollectiveFailed(RuntimeError):
    """The ranks could not exchange tokens: one of them has ended, is stuck or sent what does not fit."""


class Dispatcher(Protocol):
    """One expert-parallel group. Each rank calls dispatch and combine once per MoE layer, tokens or not."""

    def dispatch(
        self, hidden: Tensor, slot_ids: Tensor, weights: Tensor, num_tokens: Tensor | None, rows_per_rank: int | None
    ) -> Dispatched:
        """hidden [T, H], global slots int32 [T, k] (-1: none), weights fp32 [T, k], real tokens int32 [1] or None for all.

        `rows_per_rank`: room for so many tokens of each rank, the same number on all ranks; None: T is the same on all.
        """
        ...

    def combine(self, output: Tensor, dispatched: Dispatched) -> Tensor:
        """The experts' output, in the layout of `dispatched.tokens`, back in the tokens' order, weighted and summed: [T, H]."""
        ...


class LocalDispatcher:
    """All experts live here: nothing moves."""

    def dispatch(
        self, hidden: Tensor, slot_ids: Tensor, weights: Tensor, num_tokens: Tensor | None, rows_per_rank: int | None
    ) -> Dispatched:
        del num_tokens, rows_per_rank
        return Dispatched(FlatTokens(hidden, slot_ids, weights))

    def combine(self, output: _Output, dispatched: Dispatched) -> _Output:
        del dispatched
        return output


class TorchDispatcher:
    """Every rank gets every rank's tokens, computes what its own experts add, and hands each rank its tokens' sums.

    torch.distributed's fixed-shape collectives: an all-gather of tokens with their slots and weights, and an all-to-all of the
    partial sums, which are then added up in order of rank in fp32. That moves a reduce-scatter's bytes, but rounds the same
    way on every backend, and gloo has no reduce-scatter. No shape depends on a value, and nothing can overflow: a rank has
    room for all tokens of all ranks, whichever experts they choose. With NCCL both can be captured, on the current stream.
    """

    def __init__(
        self, group: torch.distributed.ProcessGroup, slots_per_rank: int, *, through: torch.device | None = None
    ) -> None:
        """through: where the group's collectives find tensors, if that is not where the tokens are; nothing then is captured."""
        self.quantize: Quantize | None = None
        """Makes the rows FP8 in which they travel; None: as they are."""
        self._group = group
        self._through = through
        self._num_ranks = group.size()
        self._first_slot = group.rank() * slots_per_rank
        self._slots_per_rank = slots_per_rank

    def dispatch(
        self, hidden: Tensor, slot_ids: Tensor, weights: Tensor, num_tokens: Tensor | None, rows_per_rank: int | None
    ) -> Dispatched:
        """Raises ValueError when there are more tokens than `rows_per_rank`; padding rows have no slot and cost no product."""
        del num_tokens  # the router gave padding the slot -1
        count, rows = hidden.shape[0], _agreed_rows(hidden, rows_per_rank)
        # One message instead of several: ids, weights and rows as bytes behind each other.
        quantised = (hidden,) if self.quantize is None else self.quantize(hidden)
        parts = [_padded(slot_ids, rows, -1), _padded(weights, rows, 0), *(_padded(part, rows, 0) for part in quantised)]
        packed = torch.cat([part.view(torch.uint8).flatten() for part in parts]).to(self._through or hidden.device)
        gathered = packed.new_empty(self._num_ranks * packed.numel())
        with _failures_named():
            _all_gather(gathered, packed, group=self._group)
        gathered = gathered.to(hidden.device).view(self._num_ranks, -1)
        unpacked, start = [], 0
        for part in parts:
            size = part.numel() * part.element_size()
            of_ranks = gathered[:, start : start + size].contiguous()
            unpacked.append(of_ranks.view(part.dtype).view(self._num_ranks * rows, part.shape[1]))
            start += size
        all_slots, all_weights, all_hidden, *scale = unpacked
        local = all_slots - self._first_slot
        local = torch.where((local >= 0) & (local < self._slots_per_rank), local, -1)
        return Dispatched(FlatTokens(all_hidden, local, all_weights, *scale), (count, rows))

    def combine(self, output: Tensor, dispatched: Dispatched) -> Tensor:
        num_tokens, rows = dispatched.handle
        sent = output.contiguous().to(self._through or output.device)
        partial = torch.empty_like(sent)
        with _failures_named():
            torch.distributed.all_to_all_single(partial, sent, group=self._group)
        of_ranks = partial.to(output.device).view(self._num_ranks, rows, output.shape[1])
        return of_ranks[:, :num_tokens].sum(0, dtype=torch.float32).to(output.dtype)


class ExchangeBuffer(Protocol):
    """What `kernels/deep_ep_buffer.py` offers; its docstrings are the contract."""

    capacity: int

    def low_latency_dispatch(self, x: Tensor, slot_ids: Tensor, *, fp8: bool) -> tuple[Tensor, Tensor | None, Tensor, Any]: ...

    def low_latency_combine(self, y: Tensor, weights: Tensor, handle: Any) -> Tensor: ...

    def normal_dispatch(
        self, x: Tensor, scale: Tensor | None, slot_ids: Tensor, weights: Tensor, rows: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Any]: ...

    def normal_combine(self, y: Tensor, handle: Any) -> Tensor: ...


class DeepEPDispatcher:
    """DeepEP's two ways: low-latency for every captured step and for all steps in which no rank has more tokens than the
    buffer's capacity, normal for the others. The ranks agreed on `rows_per_rank`, so they all take the same way."""

    def __init__(self, buffer: ExchangeBuffer, num_ranks: int, low_latency_rows: int) -> None:
        """low_latency_rows: up to so many tokens a rank go the first way; 0: none do."""
        self.quantize: Quantize | None = None
        """Where there is one, rows travel as FP8: normal ones made so by it, low-latency ones by the buffer itself."""
        self.capacity = buffer.capacity
        self.low_latency_rows = low_latency_rows
        self._buffer = buffer
        self._num_ranks = num_ranks

    def dispatch(
        self, hidden: Tensor, slot_ids: Tensor, weights: Tensor, num_tokens: Tensor | None, rows_per_rank: int | None
    ) -> Dispatched:
        """Raises ValueError when there are more tokens than the ranks agreed on."""
        del num_tokens  # the router gave padding the slot -1
        rows = _agreed_rows(hidden, rows_per_rank)
        if rows <= self.low_latency_rows:
            x, scale, counts, handle = self._buffer.low_latency_dispatch(hidden, slot_ids, fp8=self.quantize is not None)
            return Dispatched(MaskedTokens(x, counts, scale), (weights, handle))
        x, scale = (hidden, None) if self.quantize is None else self.quantize(hidden)
        rows *= self._num_ranks
        x, scale, local, local_weights, handle = self._buffer.normal_dispatch(x, scale, slot_ids, weights, rows)
        return Dispatched(FlatTokens(x, local, local_weights, scale), (weights, handle))

    def combine(self, output: Tensor, dispatched: Dispatched) -> Tensor:
        weights, handle = dispatched.handle
        if isinstance(dispatched.tokens, MaskedTokens):
            return self._buffer.low_latency_combine(output, weights, handle)
        return self._buffer.normal_combine(output, handle)


class Rehearsal:
    """Stands in for a dispatcher of `num_ranks` ranks while kernels compile: experts get work of the same shape, none of it
    real, and no rank waits for another."""

    def __init__(self, num_ranks: int, slots_per_rank: int, dispatcher: Dispatcher) -> None:
        self._num_ranks = num_ranks
        self._slots = slots_per_rank
        self._deep_ep = dispatcher if isinstance(dispatcher, DeepEPDispatcher) else None
        self._quantize: Quantize | None = getattr(dispatcher, "quantize", None)

    def dispatch(
        self, hidden: Tensor, slot_ids: Tensor, weights: Tensor, num_tokens: Tensor | None, rows_per_rank: int | None
    ) -> Dispatched:
        del num_tokens
        (count, width), rows = hidden.shape, rows_per_rank or hidden.shape[0]
        if self._deep_ep is None or rows > self._deep_ep.low_latency_rows:
            nowhere = slot_ids.new_full((rows * self._num_ranks, slot_ids.shape[1]), -1)
            x, scale = hidden.new_zeros(len(nowhere), width), None
            if self._quantize is not None:
                x, scale = self._quantize(x)
            return Dispatched(FlatTokens(x, nowhere, weights.new_zeros(nowhere.shape), scale), count)
        room, scale, fp8 = self._num_ranks * self._deep_ep.capacity, None, self._quantize is not None
        x = hidden.new_zeros(self._slots, room, width, dtype=torch.float8_e4m3fn if fp8 else hidden.dtype)
        if fp8:
            scale = weights.new_zeros(self._slots, -(-width // 128), room).transpose(1, 2)
        return Dispatched(MaskedTokens(x, slot_ids.new_zeros(self._slots), scale), count)

    def combine(self, output: Tensor, dispatched: Dispatched) -> Tensor:
        return output.new_zeros(dispatched.handle, output.shape[-1])


@contextlib.contextmanager
def _failures_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveFailed(str(error)) from error


def _agreed_rows(hidden: Tensor, rows_per_rank: int | None) -> int:
    rows = hidden.shape[0] if rows_per_rank is None else rows_per_rank
    if hidden.shape[0] > rows:
        raise ValueError(f"{hidden.shape[0]} tokens do not fit in the {rows} rows that the ranks agreed on")
    return rows


def _padded(values: Tensor, rows: int, filling: int) -> Tensor:
    """values [T, n] as contiguous [rows, n]."""
    if values.shape[0] == rows:
        return values.contiguous()
    padded = values.new_full((rows, values.shape[1]), filling)
    padded[: values.shape[0]] = values
    return padded
