"""Captured decode without a GPU: which sizes, in which order and under which flags, and the same tokens as eager steps."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged_steps import load
from runtime.graph_doubles import FakeRecorder, HeldPlans, buffers, runner_of, with_graphs
from runtime.scripted import Loop, make_limits, request

from minserve.capture_flags import EAGER
from minserve.errors import DoesNotFit, EnvironmentFault, UsageError
from minserve.kernels import reference
from minserve.request import Request, SamplingParams
from minserve.runtime.capture_mode import current_flags
from minserve.runtime.captured_steps import capture, drop, rehearse
from minserve.runtime.cuda_graph import StepGraphs, capture_sizes, mixed_sizes


@given(st.integers(1, 20_000))
def test_every_mixed_step_has_a_size_that_is_at_most_twice_as_large(most):
    sizes = mixed_sizes(most)
    assert sizes[-1] == most
    assert all(low < high <= 2 * low for low, high in itertools.pairwise(sizes))
    assert sizes[0] <= 256


@given(st.integers(1, 2000), st.sets(st.integers(1, 3000), max_size=6))
def test_the_ceiling_is_always_captured_and_nothing_lies_above_it(ceiling, asked):
    sizes = capture_sizes(ceiling, sorted(asked))
    assert sizes[-1] == ceiling
    assert list(sizes) == sorted(set(sizes))
    assert not asked or set(sizes) == {size for size in asked if size < ceiling} | {ceiling}


def test_the_usual_sizes():
    assert capture_sizes(1) == (1,)
    assert capture_sizes(12) == (1, 2, 4, 8, 12)
    assert capture_sizes(64) == (1, 2, 4, 8, 16, 32, 64)
    assert capture_sizes(600) == (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 600)


def graphs_of(recorder, sizes=(1, 4, 8), log=None):
    def prepare(size):
        def work(flags):
            if log is not None:
                log.append((size, flags))
            return (torch.full((size,), float(size)),)

        return work

    return StepGraphs(prepare, sizes, recorder)


def test_largest_first_and_warm_ups_before_each_recording_under_the_same_flags():
    recorder, log, fractions = FakeRecorder(), [], []
    graphs_of(recorder, log=log).capture(fractions.append)
    kinds = [kind for kind, _ in recorder.log]
    assert kinds == ["warm-up", "warm-up", "record"] + ["warm-up", "record"] * 2
    recorded = [entry for kind, entry in zip(kinds, log, strict=True) if kind == "record"]
    assert [size for size, _ in recorded] == [8, 4, 1]
    for (kind, around), (size, flags) in zip(recorder.log, log, strict=True):
        assert around == flags
        assert flags.padded_batch_size == size
        assert (flags.capturing, flags.disable_dispose_tensor, flags.allow_host_sync) == (True, True, False)
        assert flags.allow_overlap
        assert flags.phase == kind
        assert dataclasses.replace(flags, phase="record", allow_jit=False) == dict(recorded)[size]
    assert current_flags() == EAGER
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_each_number_of_rows_has_the_smallest_size_that_holds_it():
    graphs = graphs_of(FakeRecorder())
    assert graphs.size_for(1) is None  # nothing is captured yet
    graphs.capture()
    assert [graphs.size_for(rows) for rows in range(1, 10)] == [1, 4, 4, 4, 8, 8, 8, 8, None]


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), EnvironmentFault),
        (torch.OutOfMemoryError("CUDA out of memory"), DoesNotFit),
        (UsageError("said by a kernel"), UsageError),
    ],
)
@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_failed_capture_leaves_nothing_behind(failure, error, fails_at):
    recorder, forgotten = FakeRecorder(failure=failure, fails_at=fails_at), []
    graphs = graphs_of(recorder)
    graphs._forget = lambda: forgotten.append(True)
    with pytest.raises(error) as caught:
        graphs.capture()
    if error is EnvironmentFault:
        assert f"batch size {(8, 4, 1)[fails_at]}" in str(caught.value)
        assert "--enforce-eager" in str(caught.value)
    assert current_flags() == EAGER
    assert len(recorder.graphs) == fails_at
    assert all(graph.is_reset for graph in recorder.graphs)
    assert recorder.released == 1
    assert forgotten == [True]
    assert graphs.size_for(1) is None

    recorder.failure = None
    graphs.capture()
    assert graphs.size_for(5) == 8
    assert graphs.replay(4)[0].tolist() == [4.0] * 4


def test_an_interrupt_during_a_capture_goes_on_as_it_is():
    recorder = FakeRecorder(failure=KeyboardInterrupt(), fails_at=1)
    with pytest.raises(KeyboardInterrupt):
        graphs_of(recorder).capture()
    assert all(graph.is_reset for graph in recorder.graphs)


def test_memory_is_reported_for_each_size():
    graphs = graphs_of(FakeRecorder())
    graphs.capture()
    assert graphs.memory_bytes == {8: 1000, 4: 1000, 1: 1000}


# through the runner


def requests(count, vocab=250):
    dice = torch.Generator().manual_seed(count)
    for index in range(count):
        prompt = torch.randint(0, vocab, (3 + 5 * index % 17,), generator=dice).tolist()
        yield request(index, prompt, 4 + index % 7)


def sampled(index):
    params = SamplingParams(max_tokens=9, seed=index, temperature=1.0, top_p=0.9, frequency_penalty=0.3, logprobs=2)
    return Request(id=index, prompt_token_ids=[7, 8, index], sampling=params, arrival_time=0.0)


def limits_of(**changes):
    return make_limits(
        max_num_seqs=6, num_pages=64, page_size=16, max_model_len=128, vocab_size=320, chunked_prefill_size=64, **changes
    )


def answers(loop, asked):
    for one in asked:
        loop.add(one)
    loop.run()
    loop.check_at_rest()
    return loop.tokens, {
        index: [entry for output in outputs for entry in output.logprobs or ()] for index, outputs in loop.outputs.items()
    }


@pytest.mark.parametrize("variant", ["deepseek_v3_small", "qwen2_moe"])
def test_replayed_steps_give_the_tokens_of_eager_ones(tiny_dir, variant):
    """More requests than slots, so that sizes change and rows come and go; some sample, some ask for log-probabilities."""
    limits, asked = limits_of(), [*requests(9), *(sampled(index) for index in range(20, 24))]
    plain = runner_of(load(tiny_dir(variant)), reference.cpu(), limits)
    plans = HeldPlans()
    recorder = FakeRecorder()
    replayed = with_graphs(runner_of(load(tiny_dir(variant)), plans.kernels(), limits), (1, 4, 6), recorder, (7, 20, 64))
    eager_loop, graph_loop = Loop(limits, plain), Loop(limits, replayed)
    wanted, wanted_scores = answers(eager_loop, asked)
    tokens, scores = answers(graph_loop, asked)
    assert tokens == wanted
    for index, entries in wanted_scores.items():
        assert [entry.top_ids for entry in scores[index]] == [entry.top_ids for entry in entries]
        assert [entry.logprob for entry in scores[index]] == pytest.approx([entry.logprob for entry in entries], abs=1e-4)
    stats = graph_loop.scheduler.stats()
    assert stats.eager_decode_steps == {}
    assert set(stats.graph_replays) == {1, 4, 6}
    assert sum(graph.replays for graph in recorder.graphs[:-3]) == stats.steps
    assert all(graph.replays for graph in recorder.graphs[-3:])  # some rows of each size wanted other tokens than the argmax
    assert eager_loop.scheduler.stats().eager_decode_steps == {"cpu": sum(stats.graph_replays.values())}


def test_steps_of_greedy_rows_replay_no_sampling_graph(tiny_dir):
    limits, recorder = limits_of(), FakeRecorder()
    runner = with_graphs(runner_of(load(tiny_dir("qwen2_moe")), HeldPlans().kernels(), limits), (1, 4, 6), recorder)
    answers(Loop(limits, runner), [*requests(9)])
    assert all(graph.replays for graph in recorder.graphs[:3])
    assert not any(graph.replays for graph in recorder.graphs[3:])


@pytest.mark.parametrize("fails_at", range(6))
def test_a_failed_capture_leaves_no_graph(tiny_dir, fails_at):
    """Two mixed graphs, two of decode steps, two of their sampling."""
    limits = limits_of()
    recorder = FakeRecorder(failure=RuntimeError("operation not permitted when stream is capturing"), fails_at=fails_at)
    runner = runner_of(load(tiny_dir("qwen2_moe")), HeldPlans().kernels(), limits)
    with pytest.raises(EnvironmentFault, match=("mixed step of", "decode step of", "sampling of")[fails_at // 2]):
        with_graphs(runner, (2, 6), recorder, (20, 64))
    assert (runner.graphs, runner.sampling_graphs, runner.mixed_graphs) == (None, None, None)
    assert len(recorder.graphs) == fails_at
    assert all(graph.is_reset for graph in recorder.graphs)
    eager_steps_of(runner)


def test_dropped_graphs_leave_eager_steps_that_say_so(tiny_dir):
    recorder = FakeRecorder()
    runner = with_graphs(runner_of(load(tiny_dir("qwen2_moe")), HeldPlans().kernels(), limits_of()), (6,), recorder, (64,))
    drop(runner)
    assert all(graph.is_reset for graph in recorder.graphs)
    eager_steps_of(runner)


def eager_steps_of(runner):
    loop = Loop(runner.limits, runner)
    answers(loop, list(requests(3)))
    assert loop.scheduler.stats().eager_decode_steps.keys() == {"no graphs"}


def test_the_progress_of_all_captures_together(tiny_dir):
    runner, fractions = runner_of(load(tiny_dir("qwen2_moe")), HeldPlans().kernels(), limits_of()), []
    capture(runner, FakeRecorder(), (2, 6), (20, 64), fractions.append)
    assert fractions == sorted(fractions)
    assert set(fractions) == {part / 6 for part in range(7)}


def test_mixed_steps_sample_as_many_rows_as_some_decode_step_and_a_rehearsal_knows_all(tiny_dir):
    """As many logits as never were before would wait on a GPU for kernels and memory."""
    limits, sizes = limits_of(), (1, 4, 6)
    runner = with_graphs(runner_of(load(tiny_dir("qwen2_moe")), HeldPlans().kernels(), limits), sizes, mixed_sizes=(7, 20, 64))
    head, seen = runner.model.compute_logits, []
    runner.model.compute_logits = lambda hidden: (seen.append(len(hidden)), head(hidden))[1]
    before = buffers(runner)
    rehearse(runner)
    assert seen == [6, 6, 4, 4, 1, 1]
    for name, value in buffers(runner).items():
        kept = (
            slice(None) if name.startswith("cache") else slice(limits.max_num_seqs)
        )  # of the sampler's all but the scratch slot
        assert value.shape[0] == 1 or torch.equal(value[kept], before[name][kept]), name
    seen.clear()
    loop = Loop(limits, runner)
    answers(loop, [*requests(9), *(sampled(index) for index in range(20, 24))])
    assert set(seen) == {1, 4, 6}


def test_prompt_scores_and_parts_of_prompts_through_mixed_graphs(tiny_dir):
    limits = limits_of()
    asked = [request(index, [index, *range(40)], 3, prompt_logprobs=1) for index in range(1, 4)]
    outputs = []
    for mixed in ((), (5, 64)):
        runner = with_graphs(runner_of(load(tiny_dir("qwen2_moe")), HeldPlans().kernels(), limits), (6,), None, mixed)
        loop = Loop(limits, runner)
        answers(loop, asked)
        outputs.append([[score and score.top_ids for score in loop.outputs[index][0].prompt_logprobs] for index in range(1, 4)])
    assert outputs[0] == outputs[1]


def test_padding_rows_are_routed_nowhere(tiny_dir):
    counts = []

    def counting(x, slot_ids, weights, experts):
        counts.append((x.shape[0], int((slot_ids >= 0).sum()), float(weights.sum(-1)[-1])))
        return reference.experts_flat(x, slot_ids, weights, experts)

    plans, limits = HeldPlans(), limits_of()
    kernels = plans.kernels(experts_flat=counting)
    runner = with_graphs(runner_of(load(tiny_dir("deepseek_v3_small"), kernels), kernels, limits), (6,))
    counts.clear()
    loop = Loop(limits, runner)
    answers(loop, list(requests(2)))
    decode = [(routed, last) for rows, routed, last in counts if rows == 6]
    assert decode
    assert {routed for routed, _ in decode} <= {1 * 4, 2 * 4}
    assert {last for _, last in decode} == {0.0}


def test_more_may_not_run_than_the_largest_graph_holds(tiny_dir):
    limits = limits_of()
    runner = runner_of(load(tiny_dir("deepseek_v3_small")), HeldPlans().kernels(), limits)
    with pytest.raises(ValueError, match="holds 4 rows, and 6 may run"):
        with_graphs(runner, (1, 4))
    assert runner.graphs is None


def test_a_step_beyond_the_sizes_runs_eagerly_and_is_counted(tiny_dir):
    """It cannot happen through `capture`; should it happen, nothing crashes and it does not go unseen."""
    limits = limits_of()
    runner = runner_of(load(tiny_dir("deepseek_v3_small")), HeldPlans().kernels(), limits)
    with_graphs(runner, (1, 6))
    runner.graphs.sizes = (1,)
    loop = Loop(limits, runner)
    answers(loop, list(requests(3)))
    assert loop.scheduler.stats().eager_decode_steps.keys() == {"more rows than the largest graph's 6"}
