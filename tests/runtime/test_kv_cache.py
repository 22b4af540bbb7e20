"""Sizing the cache: every limit, and the numbers in the refusals."""

from __future__ import annotations

import pytest
import torch

from minserve.config import Config
from minserve.errors import DoesNotFit, UsageError
from minserve.kernels.interface import AttentionShape
from minserve.runtime import kv_cache

GQA = AttentionShape(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=16, rope_dim=0, scale=1.0)
MLA = AttentionShape(kind="mla", num_heads=4, num_kv_heads=1, head_dim=32, rope_dim=16, scale=1.0)


def plan(memory_bytes, max_positions=1000, **settings):
    config = Config(**{"page_size": 10, "max_num_seqs": 4, **settings})
    return kv_cache.plan(
        config, bytes_per_page=100, memory_bytes=memory_bytes, memory_name="the memory", max_positions=max_positions
    )


def test_bytes_of_a_page_count_all_layers():
    assert kv_cache.page_bytes(GQA, 3, 10, torch.float32) == 3 * 2 * 10 * 2 * 16 * 4
    assert kv_cache.page_bytes(MLA, 3, 10, torch.bfloat16) == 3 * 10 * 48 * 2


def test_memory_decides_and_keeps_room_for_the_dummy_page():
    size = plan(5_000)
    assert (size.num_pages, size.num_bytes, size.max_model_len) == (49, 5_000, 490)
    assert size.limited_by == "the memory"


def test_no_more_pages_than_the_requests_can_use():
    size = plan(10_000_000, max_positions=95)
    assert (size.num_pages, size.max_model_len) == (40, 95)


def test_an_explicit_length_counts_for_what_is_useful():
    assert plan(10_000_000, max_model_len=55).num_pages == 24


def test_an_explicit_number_of_pages():
    size = plan(1_000_000, num_pages=7)
    assert (size.num_pages, size.max_model_len, size.limited_by) == (7, 70, "--num-pages")


@pytest.mark.parametrize(
    ("memory_bytes", "settings", "words"),
    [
        (1_000, {"num_pages": 12}, ["--num-pages 12", "at most 9 pages"]),
        (150, {}, ["two pages", "the memory"]),
        (-5, {}, ["two pages"]),
        (1_000, {"max_model_len": 91}, ["--max-model-len 91", "10 KV pages", "there are 9", "90 tokens is the most"]),
        (1_000_000, {"num_pages": 3, "max_model_len": 31}, ["--max-model-len 31", "--num-pages"]),
        (1_000, {"page_size": 1, "num_pages": 1}, ["1 token"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(memory_bytes, settings, words):
    with pytest.raises(DoesNotFit) as refusal:
        plan(memory_bytes, **settings)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_length_that_the_model_does_not_have_is_a_mistake_in_the_flags():
    with pytest.raises(UsageError, match="max_position_embeddings of 1000"):
        plan(1_000_000, max_model_len=1001)
    assert plan(1_000_000, max_model_len=1000).max_model_len == 1000


@pytest.mark.parametrize("shape", [GQA, MLA])
def test_the_tensors_are_zero_and_of_the_planned_size(shape):
    bytes_per_page = kv_cache.page_bytes(shape, 2, 10, torch.bfloat16)
    size = kv_cache.plan(
        Config(page_size=10, num_pages=5), bytes_per_page=bytes_per_page, memory_bytes=1 << 30, memory_name="it", max_positions=50
    )
    tensors = kv_cache.allocate(size, shape, 2, torch.bfloat16, torch.device("cpu"))
    assert len(tensors) == 2
    assert sum(t.numel() * t.element_size() for t in tensors) == size.num_bytes
    assert all(t.shape[0] == 6 and t.dtype == torch.bfloat16 and not t.any() for t in tensors)
    tensors[0][1] = 1.0
    assert not tensors[1].any()


def test_refused_memory_says_how_much_was_wanted():
    bytes_per_page = kv_cache.page_bytes(MLA, 2, 10, torch.float32)
    config = Config(page_size=10, num_pages=1 << 44)
    size = kv_cache.plan(config, bytes_per_page=bytes_per_page, memory_bytes=1 << 62, memory_name="it", max_positions=50)
    with pytest.raises(DoesNotFit, match=r"no memory for a KV cache of [\d,.]+ MiB"):
        kv_cache.allocate(size, MLA, 2, torch.float32, torch.device("cpu"))


def test_only_refusals_of_memory_are_translated():
    with pytest.raises(RuntimeError, match="shape"), kv_cache.refusal_of_memory("it"):
        raise RuntimeError("wrong shape")
    with pytest.raises(DoesNotFit, match="no memory for it"), kv_cache.refusal_of_memory("it"):
        torch.empty(1 << 60)


def test_available_memory_is_a_number_of_this_machine():
    assert 1 << 20 < kv_cache.host_memory_available() <= 1 << 62
