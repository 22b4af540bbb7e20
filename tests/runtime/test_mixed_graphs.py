"""The self-check of captured mixed steps without a GPU: sound ones pass, faulty ones are refused by name."""

from __future__ import annotations

import pytest
from paged_steps import load
from runtime.graph_doubles import FakeGraph, FakeRecorder, HeldPlans, runner_of, with_graphs
from runtime.scripted import make_limits

from minserve.errors import SelfCheckFailed
from minserve.kernels import reference
from minserve.runtime.captured_steps import mixed_graphs
from minserve.runtime.self_check import check_graphs


def mixed_runner(directory, *, sizes=(8, 40), recorder=None, limits=None, **kernels):
    table = HeldPlans().kernels(**kernels)
    limits = limits or make_limits(
        max_num_seqs=6, num_pages=40, page_size=16, max_model_len=128, vocab_size=320, chunked_prefill_size=40
    )
    runner = with_graphs(runner_of(load(directory, table), table, limits), (limits.max_num_seqs,), mixed_sizes=sizes)
    if recorder is not None:
        runner.mixed_graphs = mixed_graphs(runner, sizes, recorder)
        runner.mixed_graphs.capture()
    return runner


@pytest.mark.parametrize("variant", ["deepseek_v3_small", "qwen2_moe"])
@pytest.mark.parametrize(
    ("changes", "comparisons"),
    [
        ({}, 6),
        ({"num_pages": 4, "max_model_len": 64}, 4),
        ({"page_size": 1, "max_model_len": 9}, 6),
        ({"max_num_seqs": 1}, 4),
        ({"num_pages": 1, "page_size": 7, "max_model_len": 7}, 3),
    ],
)
def test_sound_graphs_pass_and_leave_nothing_behind(tiny_dir, variant, changes, comparisons):
    values = {
        "max_num_seqs": 6,
        "num_pages": 40,
        "page_size": 16,
        "max_model_len": 128,
        "vocab_size": 320,
        "chunked_prefill_size": 40,
    } | changes
    runner = mixed_runner(tiny_dir(variant), limits=make_limits(**values))
    assert check_graphs(runner, "fast").comparisons == comparisons
    assert not any(layer.any() for layer in runner.kv_cache)


def test_graphs_of_more_tokens_than_the_cache_holds_are_not_tried(tiny_dir):
    limits = make_limits(max_num_seqs=6, num_pages=2, page_size=16, max_model_len=32, vocab_size=320, chunked_prefill_size=160)
    runner = mixed_runner(tiny_dir("qwen2_moe"), sizes=(8, 40, 160), limits=limits)
    assert check_graphs(runner, "fast").comparisons == 4


class Frozen(FakeGraph):
    """Reads its inputs once and for all."""

    def replay(self):
        if not self.replays:
            self._first = [value.clone() for value in self._work()]
        self.replays += 1
        for place, value in zip(self._result, self._first, strict=True):
            place.copy_(value)


class Unsteady(FakeGraph):
    """A race: the second run differs from the first."""

    def replay(self):
        super().replay()
        self._result[0][2, 5] += self.replays


@pytest.mark.parametrize(
    ("graph_type", "words"), [(Frozen, "does not"), (Unsteady, "does not repeat itself: hidden differ in row 2 ")]
)
def test_faulty_graphs_are_refused(tiny_dir, graph_type, words):
    runner = mixed_runner(tiny_dir("deepseek_v3_small"), sizes=(40,), recorder=FakeRecorder(graph_type=graph_type))
    with pytest.raises(SelfCheckFailed) as caught:
        check_graphs(runner, "fast")
    assert "the mixed graph of 40 tokens (35 filled)" in str(caught.value)
    assert words in str(caught.value)


def test_padding_that_reaches_real_tokens_is_noticed(tiny_dir):
    def shared_scale(x, slot_ids, weights, experts):
        scale = x.abs().amax() if x.shape[0] == 40 else 1.0
        return reference.experts_flat(x / scale, slot_ids, weights, experts) * scale

    runner = mixed_runner(tiny_dir("deepseek_v3_small"), sizes=(40,), experts_flat=shared_scale)
    with pytest.raises(SelfCheckFailed, match=r"mixed graph of 40 tokens .* are not numbers"):
        check_graphs(runner, "fast")
