"""The self-check without a GPU: a sound runner passes and keeps no trace of it; every kind of fault is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
import torch
from paged_steps import load
from runtime.graph_doubles import FakeGraph, FakeRecorder, HeldPlans, buffers, runner_of, with_graphs
from runtime.scripted import Loop, make_limits, request

from minserve.errors import SelfCheckFailed
from minserve.kernels import reference
from minserve.models.sampler import sample
from minserve.runtime import captured_steps, model_runner, replay_streams
from minserve.runtime.self_check import check_graphs


def limits_of(**changes):
    values = {"max_num_seqs": 6, "num_pages": 40, "page_size": 16, "max_model_len": 128, "vocab_size": 320}
    return make_limits(**(values | changes))


def checked_runner(directory, *, sizes=(1, 4, 6), recorder=None, limits=None, **kernels):
    table = HeldPlans().kernels(**kernels)
    return with_graphs(runner_of(load(directory, table), table, limits or limits_of()), sizes, recorder)


@pytest.mark.parametrize("variant", ["deepseek_v3_small", "qwen2_moe"])
@pytest.mark.parametrize(("level", "comparisons"), [("fast", 8), ("full", 14)])
def test_a_sound_runner_passes_and_serves_as_if_nothing_had_been(tiny_dir, variant, level, comparisons):
    runner = checked_runner(tiny_dir(variant))
    before, fractions = buffers(runner), []
    verdict = check_graphs(runner, level, fractions.append)
    assert verdict.comparisons == comparisons
    trials = comparisons // 2
    assert fractions == [*(done / trials for done in range(trials)), 1.0]
    for name, values in buffers(runner).items():
        if name.startswith("cache"):
            assert not values.any(), name
        else:
            assert torch.equal(values[: runner.limits.max_num_seqs], before[name][: runner.limits.max_num_seqs]), name

    loops = [Loop(runner.limits, runner), Loop(runner.limits, checked_runner(tiny_dir(variant)))]
    for loop in loops:
        for index in range(5):
            loop.add(request(index, [3 + index, 9, 250], 5))
        loop.run()
        loop.check_at_rest()
    assert loops[0].tokens == loops[1].tokens
    assert loops[0].scheduler.stats().prefix_cache_hits == loops[1].scheduler.stats().prefix_cache_hits


@pytest.mark.parametrize(
    "changes", [{"num_pages": 4, "max_model_len": 64}, {"page_size": 1, "max_model_len": 9}, {"max_num_seqs": 1}]
)
def test_any_cache_is_large_enough_to_be_checked(tiny_dir, changes):
    limits = limits_of(**changes)
    runner = checked_runner(tiny_dir("deepseek_v3_small"), sizes=(1, limits.max_num_seqs), limits=limits)
    assert check_graphs(runner, "full").comparisons > 0


def refusal(runner):
    with pytest.raises(SelfCheckFailed) as caught:
        check_graphs(runner, "fast")
    assert caught.value.exit_code == 7
    assert not any(layer.any() for layer in runner.kv_cache)
    return str(caught.value)


class Frozen(FakeGraph):
    """Reads its inputs once and for all."""

    def replay(self):
        if not self.replays:
            self._first = [value.clone() for value in self._work()]
        self.replays += 1
        for place, value in zip(self._result, self._first, strict=True):
            place.copy_(value)


class Unwritten(FakeGraph):
    """Leaves one of its outputs as it was."""

    def replay(self):
        kept = self._result[-1].clone()
        super().replay()
        self._result[-1].copy_(kept)


class Unsteady(FakeGraph):
    """A race: the second run differs from the first."""

    def replay(self):
        super().replay()
        self._result[-1][0] += self.replays


@pytest.mark.parametrize(
    ("graph_type", "words"),
    [
        (Frozen, "does not"),
        (Unwritten, "does not equal an eager run of the same batch: hidden differ in rows 0, 1"),
        (Unsteady, "does not repeat itself: hidden differ in row 0 "),
    ],
)
def test_faulty_graphs_are_refused(tiny_dir, graph_type, words):
    runner = checked_runner(tiny_dir("deepseek_v3_small"), sizes=(6,), recorder=FakeRecorder(graph_type=graph_type))
    message = refusal(runner)
    assert words in message
    assert "batch size 6" in message


def test_weights_that_moved_after_the_capture_are_noticed(tiny_dir):
    """The graph goes on reading the old place."""
    runner = runner_of(load(tiny_dir("deepseek_v3_small")), HeldPlans().kernels(), limits_of())
    captured = runner.model

    class Stale(FakeGraph):
        def replay(self):
            now, runner.model = runner.model, captured
            try:
                super().replay()
            finally:
                runner.model = now

    with_graphs(runner, (4, 6), FakeRecorder(graph_type=Stale))
    check_graphs(runner, "fast")
    runner.model = copy.deepcopy(captured)
    check_graphs(runner, "fast")  # equal values: nothing is wrong yet
    runner.model.layers[1].attention.output.weight.mul_(1.001)
    assert "does not equal an eager run" in refusal(runner)


def test_padding_that_reaches_other_rows_is_noticed(tiny_dir):
    """One scale for the whole batch, as a careless quantisation has it: a NaN in a padding row is a NaN everywhere."""

    def shared_scale(x, slot_ids, weights, experts):
        scale = x.abs().amax()
        return reference.experts_flat(x / scale, slot_ids, weights, experts) * scale

    message = refusal(checked_runner(tiny_dir("deepseek_v3_small"), sizes=(6,), experts_flat=shared_scale))
    assert "are not numbers; padding or unused cache reaches them" in message


def test_a_read_beyond_the_context_is_noticed(tiny_dir):
    plans = HeldPlans()

    def one_too_far(metadata, shape):
        longer = dataclasses.replace(metadata, seq_lens_host=tuple(length + 1 for length in metadata.seq_lens_host))
        return plans.plan(longer, shape)

    message = refusal(checked_runner(tiny_dir("qwen3_moe"), sizes=(6,), plan_attention=one_too_far))
    assert "are not numbers" in message


def test_an_unwritten_cache_entry_is_noticed(tiny_dir):
    """Written when the step runs eagerly, forgotten when it is replayed."""
    writing = []

    def write(*inputs):
        *others, cache, slots = inputs
        return reference.mla_inputs(*others, cache.clone() if writing else cache, slots)

    class Forgets(FakeGraph):
        def replay(self):
            writing.append(False)
            super().replay()
            writing.clear()

    runner = checked_runner(
        tiny_dir("deepseek_v3_small"), sizes=(6,), recorder=FakeRecorder(graph_type=Forgets), mla_inputs=write
    )
    assert "does not equal an eager run" in refusal(runner)


class LastRow(FakeGraph):
    """Captured with a buffer of one row too few."""

    def replay(self):
        super().replay()
        self._result[-1][-1] += 1


def test_a_fault_of_the_last_row_is_noticed(tiny_dir):
    recorder = FakeRecorder(graph_type=LastRow)
    message = refusal(checked_runner(tiny_dir("qwen3_moe"), sizes=(6,), recorder=recorder))
    assert "6 rows filled): it does not equal an eager run of the same batch: hidden differ in row 5 " in message


def sampling_as(variant):
    return lambda logits, slots, state, _: sample(logits, slots, state, variant)


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize(
    ("module", "name", "instead", "words"),
    [
        (model_runner, "sample", sampling_as("general"), r"decode graph .*tokens differ"),
        (captured_steps, "sample", sampling_as("argmax"), r"sampling graph .*tokens differ"),
        (captured_steps, "take_back", lambda *_: None, r"sampling graph .*(tokens|output index) differ"),
    ],
    ids=["decode", "sampling", "take back"],
)
def test_graphs_that_sample_in_another_way_are_noticed(tiny_dir, monkeypatch, size, module, name, instead, words):
    class Otherwise(FakeGraph):
        def replay(self):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, instead)
                super().replay()

    limits, recorder = limits_of(max_num_seqs=size), FakeRecorder(graph_type=Otherwise)
    assert re.search(words, refusal(checked_runner(tiny_dir("qwen3_moe"), sizes=(size,), recorder=recorder, limits=limits)))


@pytest.mark.parametrize("result", ["logits", "hidden"])
def test_a_sampling_graph_that_writes_into_what_the_step_goes_on_with_is_noticed(tiny_dir, result):
    """Both graphs have one pool of memory, and log-probabilities are read after both."""

    class Careless(FakeGraph):
        def replay(self):
            super().replay()
            if self in recorder.graphs[1:]:
                getattr(runner.graphs.result(6), result)[0] += 1

    recorder = FakeRecorder(graph_type=Careless)
    runner = checked_runner(tiny_dir("qwen3_moe"), sizes=(6,), recorder=recorder)
    assert f"does not equal an eager run of the same batch: {result} differ in row 0 " in refusal(runner)


def test_without_graphs_there_is_nothing_to_compare(tiny_dir):
    runner = runner_of(load(tiny_dir("qwen3_moe")), reference.cpu(), limits_of())
    assert check_graphs(runner, "full").comparisons == 0


@pytest.mark.parametrize(("streams", "refused"), [(1, False), (3, False), (4, True), (61, True)])
def test_too_many_streams_are_refused(tiny_dir, monkeypatch, streams, refused):
    runner = checked_runner(tiny_dir("qwen3_moe"), sizes=(2, 6))
    monkeypatch.setattr(replay_streams, "kernel_streams", lambda runs: [run() and [*range(streams)] for run in runs])
    if refused:
        with pytest.raises(SelfCheckFailed, match=f"batch size 2 runs on {streams} streams, more than 3"):
            replay_streams.count_all_streams(runner, runner.graphs)
    else:
        assert replay_streams.count_all_streams(runner, runner.graphs) == {2: streams, 6: streams}
