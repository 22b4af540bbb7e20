"""Ranks that replay graphs together: of unequal sizes under low-latency dispatch, of one size otherwise, padding where idle."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.distributed as dist
from exchange_double import GlooBuffer
from parallel_ranks import gloo, together
from runtime.graph_doubles import HeldPlans, runner_of, with_graphs

from minserve.models.layers.dispatcher import DeepEPDispatcher, TorchDispatcher
from minserve.models.layers.moe import MixtureOfExperts
from minserve.models.layers.placement import ExpertPlacement
from minserve.models.registry import build_model, load_model_config
from minserve.models.weights import load_weights, open_checkpoint
from minserve.request import SamplingParams
from minserve.runtime import self_check
from minserve.runtime.expert_exchange import Exchange
from minserve.runtime.model_runner import BESIDE_PROMPTS
from minserve.runtime.scheduler import Limits
from minserve.runtime.step import ScheduledRow, ScheduledStep, SlotSetup

SIZES = (1, 2, 4)
CAPACITY = 8
LIMITS = Limits(max_num_seqs=4, chunked_prefill_size=32, page_size=8, num_pages=40, max_model_len=128, vocab_size=0)
GREEDY = SamplingParams(max_tokens=9, seed=0, temperature=0.0)


def make_runner(directory, group=None, low_latency=True):
    """A rank's, or without a group that of an engine alone, with graphs of all sizes; ranks call it together."""
    checkpoint, config = open_checkpoint(directory), load_model_config(directory)
    kernels, options = HeldPlans().kernels(), {}
    if group is not None:
        placement = ExpertPlacement.spread(config.moe.num_experts, group.size(), group.rank())
        dispatcher = TorchDispatcher(group, placement.slots_per_rank)
        if low_latency:
            buffer = GlooBuffer(group, config.moe.num_experts, CAPACITY)
            dispatcher = DeepEPDispatcher(buffer, group.size(), CAPACITY)
        options = {"dispatcher": dispatcher, "placement": placement}
    cpu = torch.device("cpu")
    model = build_model(config, checkpoint.formats, kernels, torch.float32, cpu, **options)
    load_weights(model, checkpoint)
    model.finish_load()
    runner = runner_of(model, kernels, msgspec.structs.replace(LIMITS, vocab_size=config.vocab_size))
    runner.low_latency_rows = CAPACITY if low_latency and group is not None else None
    return with_graphs(runner, SIZES, mixed_sizes=(CAPACITY,) if runner.low_latency_rows else ())


def prompts(count, first=0):
    """A step that reads `count` prompts, 3 tokens each, into slots from 0 on."""
    rows = tuple(
        ScheduledRow(
            request_id=slot, slot=slot, start=0, num_tokens=3, token_ids=tuple(first + slot + i for i in (5, 6, 7)),
            new_pages=(slot + 1,), samples=True, setup=SlotSetup(GREEDY, [5, 6, 7]),
        )
        for slot in range(count)
    )  # fmt: skip
    return ScheduledStep(number=1, rows=rows, num_decode_rows=0, num_tokens=3 * count)


def decodes(number, count):
    rows = tuple(
        ScheduledRow(request_id=slot, slot=slot, start=1 + number, num_tokens=1, table_offset=1, samples=True)
        for slot in range(count)
    )
    return ScheduledStep(number=number, rows=rows, num_decode_rows=count, num_tokens=count)


def tokens(result):
    return [row.token_id for row in result.rows]


class Pair:
    """Two ranks, and an engine alone that does the work of either."""

    def __init__(self, directory, low_latency):
        store = dist.HashStore()
        self.directory = directory
        groups = together(2, lambda rank: gloo(store, rank, 2))
        self.runners = together(2, lambda rank: make_runner(directory, groups[rank], low_latency))

    def step(self, steps, *, all_decode=True):
        """Each rank's result; a rank whose step is None runs padding. rows_per_rank is what the ranks would agree on."""
        rows = max(step.num_tokens for step in steps if step is not None)

        def work(rank):
            if steps[rank] is None:
                return self.runners[rank].launch_dummy(rows, all_decode=all_decode).result()
            return self.runners[rank].launch(steps[rank], rows_per_rank=rows, all_decode=all_decode).result()

        return together(2, work)

    def load(self):
        """(token, expert) pairs that both ranks' experts had so far."""
        return sum(sum(counts) for runner in self.runners for counts in runner.model.expert_load().values())

    def alone(self, steps):
        runner = make_runner(self.directory)
        return [tokens(runner.launch(step).result()) for step in steps]


@pytest.fixture(params=["deepseek_v3_small", "qwen2_moe"])
def directory(request, tiny):
    return tiny(request.param).directory


def test_low_latency_ranks_replay_graphs_of_their_own_sizes(directory) -> None:
    pair = Pair(directory, low_latency=True)
    first = [prompts(1), prompts(4, first=40)]
    found = [[tokens(result)] for result in pair.step(first, all_decode=False)]
    sizes = []
    for number in range(2, 6):
        results = pair.step([decodes(number, 1), decodes(number, 4)])
        sizes.append([result.graph_size for result in results])
        for told, result in zip(found, results, strict=True):
            told.append(tokens(result))
    assert sizes == [[1, 4]] * 4
    for rank, count in enumerate((1, 4)):
        assert found[rank] == pair.alone([first[rank], *(decodes(number, count) for number in range(2, 6))])


def test_an_idle_rank_replays_its_smallest_graph_and_moves_nothing(directory) -> None:
    pair = Pair(directory, low_latency=True)
    before = pair.load()
    found = [tokens(pair.step([prompts(2), None], all_decode=False)[0])]
    for number in (2, 3):
        real, dummy = pair.step([decodes(number, 2), None])
        assert (real.graph_size, dummy.graph_size) == (2, 1)
        found.append(tokens(real))
    assert found == pair.alone([prompts(2), decodes(2, 2), decodes(3, 2)])
    config = pair.runners[0].model.config.moe
    assert pair.load() - before == (6 + 2 + 2) * config.router.top_k * sum(config.sparse_layers)


def test_a_small_piece_of_a_prompt_leaves_the_other_rank_its_graph(directory) -> None:
    """Up to the capacity, and has one itself; a larger piece makes the step one that no graph holds."""
    pair = Pair(directory, low_latency=True)
    first = [tokens(pair.step([prompts(1), None], all_decode=False)[0])]
    decode, prompt = pair.step([decodes(2, 1), prompts(2)], all_decode=False)
    assert decode.graph_size == 1
    assert pair.runners[1].mixed_graphs is not None and pair.runners[1].mixed_graphs.sizes == (CAPACITY,)
    assert [*first, tokens(decode)] == pair.alone([prompts(1), decodes(2, 1)])
    assert [tokens(prompt)] == pair.alone([prompts(2)])
    decode, prompt = pair.step([decodes(3, 1), prompts(4)], all_decode=False)  # 12 tokens, and the capacity is 8
    assert decode.graph_size is None and prompt.graph_size is None
    assert decode.eager_reason == BESIDE_PROMPTS


def test_other_ranks_replay_one_size_and_only_when_all_decode(directory) -> None:
    pair = Pair(directory, low_latency=False)
    first = [prompts(1), prompts(3, first=20)]
    found = [[tokens(result)] for result in pair.step(first, all_decode=False)]
    for steps, all_decode, size in (
        ([decodes(2, 1), decodes(2, 3)], True, 4),
        ([decodes(3, 1), None], True, 1),
        ([decodes(4, 1), prompts(1)], False, None),
    ):
        results = pair.step(steps, all_decode=all_decode)
        assert [result.graph_size for result in results] == [size, size]
        found[0].append(tokens(results[0]))
    assert found[0] == pair.alone([first[0], decodes(2, 1), decodes(3, 1), decodes(4, 1)])


@pytest.mark.parametrize("low_latency", [True, False])
def test_the_self_check_passes_on_both_ranks_in_step(directory, low_latency) -> None:
    pair = Pair(directory, low_latency)
    verdicts = together(2, lambda rank: self_check.check_graphs(pair.runners[rank], "fast"))
    assert [verdict.comparisons for verdict in verdicts] == [2 * (len(SIZES) + 1) + low_latency] * 2


@pytest.mark.parametrize("low_latency", [True, False])
def test_a_rehearsal_waits_for_nobody(directory, low_latency) -> None:
    """One rank steps and captures while the other does nothing; afterwards both compute as ever."""
    pair = Pair(directory, low_latency)
    model = pair.runners[0].model
    first = next(layer.mlp for layer in model.layers if isinstance(layer.mlp, MixtureOfExperts))
    exchange = Exchange("any", first.experts.placement, first.dispatcher, captured=True, low_latency_rows=None)
    with exchange.rehearsal(model):
        pair.runners[0].launch(prompts(4), rows_per_rank=30, all_decode=False).result()
        with_graphs(pair.runners[0], SIZES)
    together(2, lambda rank: with_graphs(pair.runners[rank], SIZES))
    found = [tokens(pair.step([prompts(2), None], all_decode=False)[0]), tokens(pair.step([decodes(2, 2), None])[0])]
    assert found == pair.alone([prompts(2), decodes(2, 2)])
