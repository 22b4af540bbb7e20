"""The self-check's cache: entries are read where steps write them, and whatever is no token's is not a number."""

from __future__ import annotations

import pytest
import torch

from minserve.kernels import reference
from minserve.kernels.interface import AttentionShape, kv_page_shape
from minserve.runtime.page_allocator import DUMMY_PAGE
from minserve.runtime.poisoned_cache import PoisonedCache
from minserve.runtime.step import ScheduledRow, ScheduledStep

PAGE_SIZE, NUM_PAGES, NUM_LAYERS = 4, 6, 3
SHAPES = {
    "gqa": AttentionShape(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=8, rope_dim=0, scale=1.0),
    "mla": AttentionShape(kind="mla", num_heads=4, num_kv_heads=1, head_dim=8, rope_dim=2, scale=1.0),
}


def cache_of(shape):
    layers = [torch.zeros(1 + NUM_PAGES, *kv_page_shape(shape, PAGE_SIZE)) for _ in range(NUM_LAYERS)]
    return layers, PoisonedCache(layers, shape, PAGE_SIZE)


@pytest.mark.parametrize("kind", SHAPES)
def test_what_a_step_writes_is_read_and_poisoned_again(kind):
    shape = SHAPES[kind]
    layers, cache = cache_of(shape)
    slots = torch.tensor([PAGE_SIZE * 3 + 2, PAGE_SIZE * 6, PAGE_SIZE * 5 + 3])
    written = []
    for layer in layers:
        if kind == "mla":
            entries = torch.randn(3, 1, 10)
            reference.write_mla(entries[:, 0, :8], entries[:, 0, 8:], layer, slots)
        else:
            entries = torch.randn(3, 2, 2 * 8)
            reference.write_gqa(entries[:, 0].view(3, 2, 8), entries[:, 1].view(3, 2, 8), layer, slots)
        written.append(entries)
    places = cache.places(slots)
    assert torch.equal(cache.read(places), torch.stack(written, dim=1))
    cache.poison(places)
    assert all(layer.isnan().all() for layer in layers)
    cache.clear()
    assert not any(layer.any() for layer in layers)


@pytest.mark.parametrize("kind", SHAPES)
def test_only_earlier_tokens_are_filled_and_no_layer_is_like_another(kind):
    layers, cache = cache_of(SHAPES[kind])
    rows = [
        ScheduledRow(request_id=0, slot=0, start=6, num_tokens=1, new_pages=(5, 2), samples=True),
        ScheduledRow(request_id=1, slot=1, start=0, num_tokens=1, new_pages=(3,), samples=True),
    ]
    step = ScheduledStep.of(0, rows, 2)
    for layer in layers:
        layer[DUMMY_PAGE] = 1.0  # as padding may leave it
    cache.fill(step, 1)
    slots = torch.arange((1 + NUM_PAGES) * PAGE_SIZE)
    entries = cache.read(cache.places(slots))
    known = [*range(5 * PAGE_SIZE, 6 * PAGE_SIZE), 2 * PAGE_SIZE, 2 * PAGE_SIZE + 1]
    assert sorted(slots[entries.isfinite().all(dim=(1, 2, 3))].tolist()) == sorted(known)
    assert sorted(slots[~entries.isnan().all(dim=(1, 2, 3))].tolist()) == sorted(known)
    assert not (entries[known, 0] == entries[known, 1]).any()
    cache.poison_pages()
    assert all(layer.isnan().all() for layer in layers)
