"""Rows that travel between ranks in FP8."""

from __future__ import annotations

import torch
import torch.distributed as dist
from parallel_ranks import gloo, together

from minserve.models.layers.dispatcher import TorchDispatcher


def test_quantised_rows_travel_as_bytes() -> None:
    """Each rank finds the values and scales that the others made, and its own rows' sums after."""
    store = dist.HashStore()
    groups = together(2, lambda rank: gloo(store, rank, 2))

    def quantise(x):
        scale = x.abs().amax(1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn), scale

    def work(rank):
        dispatcher = TorchDispatcher(groups[rank], 4)
        dispatcher.quantize = quantise
        x = torch.randn(2 + rank, 128, generator=torch.Generator().manual_seed(rank))
        ids = torch.tensor([[0, 5], [6, 3], [7, -1]], dtype=torch.int32)[: len(x)]
        dispatched = dispatcher.dispatch(x, ids, torch.ones(ids.shape), None, 4)
        found = dispatched.tokens
        assert found.hidden.dtype == torch.float8_e4m3fn and found.hidden.shape == (8, 128)
        wide = found.hidden.float() * found.scale
        mine = (found.slot_ids >= 0).any(1, keepdim=True)
        return x, dispatcher.combine(torch.where(mine, wide, 0.0), dispatched)

    for x, out in together(2, work):
        chosen = torch.tensor([2.0, 2.0, 1.0])[: len(x), None]  # ranks that the row's experts are on
        assert torch.allclose(out, x * chosen, rtol=0.07, atol=0.02)
