"""Experts spread over ranks: the same logits as on one rank, whoever has tokens, and each rank reads only its own experts."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from exchange_double import GlooBuffer
from logit_comparison import assert_same_logits, prompt
from paged_steps import PagedSteps
from parallel_ranks import gloo, together

from minserve.errors import UsageError
from minserve.kernels import reference
from minserve.models.decoder import Decoder
from minserve.models.layers.dispatcher import DeepEPDispatcher, TorchDispatcher
from minserve.models.layers.placement import ExpertPlacement
from minserve.models.registry import build_model, load_model_config
from minserve.models.weights import load_weights, open_checkpoint

CPU = torch.device("cpu")


class Ranks:
    """One model on several ranks, driven step by step."""

    def __init__(self, directory, num_ranks, kernels=None, capacity=None, redundant=0, loads=None):
        """capacity: of DeepEP's low-latency mode, here over gloo; None: torch's collectives. loads: by layer."""
        store = dist.HashStore()
        self.num_ranks = num_ranks
        self.groups = together(num_ranks, lambda rank: gloo(store, rank, num_ranks))
        self.models: list[Decoder] = []
        self.reports = []
        self.buffers: list[GlooBuffer] = []
        kernels = kernels or reference.cpu()
        config = load_model_config(directory)
        for rank, group in enumerate(self.groups):
            spread = functools.partial(ExpertPlacement.spread, config.moe.num_experts, num_ranks, rank, redundant)
            placement = spread()
            dispatcher = TorchDispatcher(group, placement.slots_per_rank)
            if capacity is not None:
                self.buffers.append(GlooBuffer(group, config.moe.num_experts + redundant, capacity))
                dispatcher = DeepEPDispatcher(self.buffers[-1], num_ranks, capacity)
            checkpoint = open_checkpoint(directory)
            placements = {layer: spread(load) for layer, load in (loads or {}).items()}
            options = {"dispatcher": dispatcher, "placement": placement, "placements": placements}
            model = build_model(config, checkpoint.formats, kernels, torch.float32, CPU, **options)
            self.reports.append(load_weights(model, checkpoint))
            model.finish_load()
            self.models.append(model)
        self.steps = [PagedSteps(model, kernels) for model in self.models]

    def step(self, rows_of_ranks, rows_per_rank):
        """Logits of each rank's rows; a rank without rows runs a dummy, as the engine does."""

        def work(rank):
            rows = rows_of_ranks[rank]
            if rows is None:
                return self.steps[rank].step([], padding=1, rows_per_rank=rows_per_rank)
            return self.steps[rank].step(rows, rows_per_rank=rows_per_rank)

        return together(self.num_ranks, work)


def alone(directory, kernels=None) -> PagedSteps:
    from paged_steps import load

    return PagedSteps(load(directory, kernels), kernels)


@pytest.mark.parametrize("name", ["deepseek_v3_small", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_give_the_logits_of_one(tiny, name, num_ranks) -> None:
    directory = tiny(name).directory
    if load_model_config(directory).moe.num_experts % num_ranks:
        num_ranks = 3  # six experts
    ranks, one = Ranks(directory, num_ranks), alone(directory)
    lengths = [5, 17, 1, 9][:num_ranks]
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    wanted = [one.step([(f"r{rank}", tokens)])[0] for rank, tokens in enumerate(prompts)]
    got = ranks.step([[("a", tokens)] for tokens in prompts], max(lengths))
    for (logits,), expected in zip(got, wanted, strict=True):
        assert_same_logits(logits, expected)
    # Only the last rank goes on, the others run dummies; then one has an empty step, and one more rows than the others.
    last = num_ranks - 1
    expected = one.step([(f"r{last}", [7])])[0]
    assert_same_logits(ranks.step([None] * last + [[("a", [7])]], 1)[last][0], expected)
    expected = one.step([("r0", [3]), ("new", prompts[1])])
    got = ranks.step([[("a", [3]), ("b", prompts[1])], *([[]] * last)], 18)[0]
    for logits, wanted_logits in zip(got, expected, strict=True):
        assert_same_logits(logits, wanted_logits)


@pytest.mark.parametrize("name", ["deepseek_v3_small", "qwen2_moe"])
def test_both_modes_of_deep_ep_give_the_logits_of_one(tiny, name) -> None:
    """Steps up to the capacity take the masked layout, larger ones the flat one; on all ranks the same, whatever each has."""
    directory = tiny(name).directory
    ranks, one = Ranks(directory, 2, capacity=8), alone(directory)
    prompts = [prompt(21, 1), prompt(3, 2)]
    wanted = [one.step([(f"r{rank}", tokens)])[0] for rank, tokens in enumerate(prompts)]
    for (logits,), expected in zip(ranks.step([[("a", tokens)] for tokens in prompts], 21), wanted, strict=True):
        assert_same_logits(logits, expected)
    moe_layers = len(ranks.buffers[0].calls)
    assert [buffer.calls for buffer in ranks.buffers] == [["normal"] * moe_layers] * 2
    wanted = [one.step([(f"r{rank}", [7 + rank])])[0] for rank in range(2)]
    for (logits,), expected in zip(ranks.step([[("a", [7])], [("a", [8])]], 1), wanted, strict=True):
        assert_same_logits(logits, expected)
    assert [buffer.calls[moe_layers:] for buffer in ranks.buffers] == [["low latency"] * moe_layers] * 2
    loads = [sum(counts) for model in ranks.models for counts in model.expert_load().values()]
    assert sum(loads) == moe_layers * (21 + 3 + 1 + 1) * load_model_config(directory).moe.router.top_k
    # A prompt's piece beside another rank's decode row, then a rank that has padding alone, then one that has nothing at all.
    wanted = [one.step([("r0", [3])])[0], one.step([("new", prompts[0][:8])])[0]]
    for (logits,), expected in zip(ranks.step([[("a", [3])], [("b", prompts[0][:8])]], 8), wanted, strict=True):
        assert_same_logits(logits, expected)
    for nothing, token in ((None, 5), ([], 6)):
        expected = one.step([("r0", [token])])[0]
        assert_same_logits(ranks.step([[("a", [token])], nothing], 1)[0][0], expected)


@pytest.mark.parametrize("capacity", [None, 64])
@pytest.mark.parametrize("name", ["deepseek_v3_small", "qwen2_moe"])
def test_copies_of_experts_change_where_tokens_go_and_nothing_else(tiny, name, capacity) -> None:
    directory = tiny(name).directory
    plain = Ranks(directory, 2)
    rows = [[("a", prompt(33, 1))], [("a", prompt(20, 2))]]
    expected = plain.step(rows, 33)
    plain_counts = [sum(pair) for pair in zip(*(model.expert_load()[1] for model in plain.models), strict=True)]
    num_experts, hot = len(plain_counts), max(range(len(plain_counts)), key=plain_counts.__getitem__)
    copied = Ranks(directory, 2, capacity=capacity, redundant=4, loads={1: plain_counts})
    for (logits,), (wanted,) in zip(copied.step(rows, 33), expected, strict=True):
        assert_same_logits(logits, wanted)
    layer = [model.layers[1].mlp.experts for model in copied.models]
    assert all(hot in experts.placement.local_experts for experts in layer)  # on both ranks
    assert all(len(experts.w13) == (num_experts + 4) // 2 for experts in layer)
    counts = [model.expert_load()[1] for model in copied.models]
    assert [sum(pair) for pair in zip(*counts, strict=True)] == plain_counts
    assert min(own[hot] for own in counts) > 0
    # Every tensor was written once, those of an expert with two slots on two ranks once on each.
    assert sum(report.bytes_written for report in copied.reports) > sum(report.bytes_written for report in plain.reports)


def test_deep_ep_refuses_more_tokens_than_agreed(tiny) -> None:
    ranks = Ranks(tiny("qwen3_moe").directory, 2, capacity=8)
    with pytest.raises(ValueError, match="3 tokens do not fit in the 2 rows"):
        ranks.step([[("a", [1, 2, 3])], [("a", [1, 2, 3])]], 2)


@pytest.mark.parametrize("capacity", [None, 8, 64])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_tokens_to_one_expert_lose_none(tiny, rank, capacity) -> None:
    """Every token of every rank chooses the same experts, all on one rank."""
    directory = tiny("deepseek_v3_small").directory

    def to_the_first(*inputs):
        config = inputs[3]
        ids, weights = reference.route(*inputs)
        first = 8 * rank + torch.arange(config.top_k, dtype=torch.int32)
        return first.expand_as(ids).contiguous(), weights

    kernels = dataclasses.replace(reference.cpu(), route=to_the_first)
    ranks, one = Ranks(directory, 2, kernels, capacity), alone(directory, kernels)
    prompts = [prompt(40, 1), prompt(33, 2)]
    wanted = [one.step([(str(index), tokens)])[0] for index, tokens in enumerate(prompts)]
    got = ranks.step([[("a", tokens)] for tokens in prompts], 40)
    for (logits,), expected in zip(got, wanted, strict=True):
        assert_same_logits(logits, expected)


def test_dummies_of_another_rank_move_no_bit(tiny) -> None:
    ranks = [Ranks(tiny("qwen2_moe").directory, 2) for _ in range(2)]
    tokens = prompt(12, 3)
    with_dummy = ranks[0].step([[("a", tokens)], None], 12)[0][0]
    with_empty = ranks[1].step([[("a", tokens)], []], 12)[0][0]
    assert torch.equal(with_dummy, with_empty)


def test_more_tokens_than_agreed_are_refused(tiny) -> None:
    ranks = Ranks(tiny("qwen3_moe").directory, 2)
    with pytest.raises(ValueError, match="3 tokens do not fit in the 2 rows"):
        ranks.step([[("a", [1, 2, 3])], [("a", [1, 2, 3])]], 2)


def test_each_rank_reads_its_experts_and_the_rest_once(tiny) -> None:
    directory = tiny("deepseek_v3").directory
    one, four = Ranks(directory, 1).reports[0], Ranks(directory, 4).reports
    moe = load_model_config(directory).moe
    experts = sum(
        tensor.num_bytes
        for name, tensor in open_checkpoint(directory).tensors.items()
        if ".mlp.experts." in name and not name.startswith("model.layers.3.")
    )
    assert experts > 0 and moe.num_experts == 16
    for report in four:
        assert report.bytes_read == one.bytes_read - experts + experts // 4
        assert report.skipped["an expert of another rank"].bytes == experts - experts // 4
        assert "an expert of another rank" in str(report)


def test_uneven_shares_are_refused_with_the_sizes_that_work() -> None:
    with pytest.raises(UsageError, match=r"--ep-size 3 does not divide the model's 256 experts; possible: 1, 2, 4, 8, .*256"):
        ExpertPlacement.spread(256, 3, 0)
    with pytest.raises(UsageError, match=r"the model's 10 experts; possible: 1, 2, 5, 10$"):
        ExpertPlacement.spread(10, 4, 0)
