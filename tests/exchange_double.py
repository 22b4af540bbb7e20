"""DeepEP's two modes over gloo on CPUs: the layouts and rules of `kernels/deep_ep_buffer.py`, slow and without the library."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GlooBuffer:
    """An `ExchangeBuffer`. Rows that nobody filled hold NaN, as memory may."""

    def __init__(self, group: dist.ProcessGroup, num_slots: int, capacity: int) -> None:
        self.capacity = capacity
        self.calls: list[str] = []
        self._group = group
        self._each = num_slots // group.size()
        self._first = group.rank() * self._each

    def _gather(self, values: Tensor, rows: int) -> list[Tensor]:
        """Every rank's values, padded to as many rows."""
        padded = values.new_full((rows, *values.shape[1:]), -1)
        padded[: len(values)] = values
        gathered = [torch.empty_like(padded) for _ in range(self._group.size())]
        dist.all_gather(gathered, padded, group=self._group)
        return gathered

    def low_latency_dispatch(self, x: Tensor, slot_ids: Tensor, *, fp8: bool) -> tuple[Tensor, Tensor | None, Tensor, Any]:
        assert len(x) <= self.capacity and not fp8
        self.calls.append("low latency")
        ids, tokens = self._gather(slot_ids, self.capacity), self._gather(x, self.capacity)
        rows = x.new_full((self._each, len(ids) * self.capacity, x.shape[1]), torch.nan)
        counts = torch.zeros(self._each, dtype=torch.int32)
        sources = [[] for _ in range(self._each)]  # of each row: (rank, token)
        for rank in range(len(ids)):
            for token, place in (ids[rank] >= 0).nonzero().tolist():
                slot = int(ids[rank][token, place]) - self._first
                if 0 <= slot < self._each:
                    rows[slot, counts[slot]] = tokens[rank][token]
                    sources[slot].append((rank, token))
                    counts[slot] += 1
        return rows, None, counts, (slot_ids, sources)

    def low_latency_combine(self, y: Tensor, weights: Tensor, handle: Any) -> Tensor:
        slot_ids, sources = handle
        answers = y.new_zeros(self._group.size(), self.capacity, self._each, y.shape[2])
        for slot, rows in enumerate(sources):
            for row, (rank, token) in enumerate(rows):
                answers[rank, token, slot] = y[slot, row]
        received = torch.empty_like(answers)
        dist.all_to_all_single(received, answers, group=self._group)
        by_slot = received.transpose(0, 1).flatten(1, 2)  # [capacity, slots of all ranks, H]
        out = torch.zeros(len(slot_ids), y.shape[2])
        for token, place in (slot_ids >= 0).nonzero().tolist():
            out[token] += weights[token, place] * by_slot[token, slot_ids[token, place]]
        return out

    def normal_dispatch(
        self, x: Tensor, scale: Tensor | None, slot_ids: Tensor, weights: Tensor, rows: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Any]:
        assert scale is None
        self.calls.append("normal")
        each = rows // self._group.size()
        ids, tokens, shares = (self._gather(values, each) for values in (slot_ids, x, weights))
        received, local = x.new_full((rows, x.shape[1]), torch.nan), torch.full((rows, slot_ids.shape[1]), -1, dtype=torch.int32)
        kept, sources = torch.full((rows, slot_ids.shape[1]), torch.nan), []
        for rank in range(len(ids)):
            mine = (ids[rank] >= self._first) & (ids[rank] < self._first + self._each)
            for token in mine.any(1).nonzero().flatten().tolist():
                row = len(sources)
                received[row], kept[row] = tokens[rank][token], shares[rank][token]
                local[row] = torch.where(mine[token], ids[rank][token] - self._first, -1)
                sources.append((rank, token))
        return received, None, local, kept, (len(x), each, sources)

    def normal_combine(self, y: Tensor, handle: Any) -> Tensor:
        count, each, sources = handle
        answers = y.new_zeros(self._group.size(), each, y.shape[1])
        for row, (rank, token) in enumerate(sources):
            answers[rank, token] = y[row]
        received = torch.empty_like(answers)
        dist.all_to_all_single(received, answers, group=self._group)
        return received.sum(0)[:count]
