"""Routing: the rules of each family, bit by bit, and against a plain-Python statement of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logit_comparison import prompt
from paged_steps import load

from minserve.kernels.interface import RouterConfig
from minserve.kernels.reference import choose

NOAUX = RouterConfig(top_k=4, scoring="sigmoid", num_groups=4, top_k_groups=2, group_score="top2_sum", normalize=True, scale=2.5)
LIMITED = RouterConfig(top_k=3, scoring="softmax", num_groups=4, top_k_groups=2, group_score="max", scale=16.0)
GREEDY = RouterConfig(top_k=4, scoring="softmax", normalize=True)


def test_dropped_groups_never_win_over_negative_choices():
    """All choices of the kept group are negative; a mask of 0.0 would prefer the dropped ones."""
    config = RouterConfig(top_k=2, scoring="sigmoid", num_groups=4, top_k_groups=1, group_score="top2_sum", normalize=True)
    logits = torch.tensor([[-1.0, -1.0, 2.0, 1.0, -2.0, 0.0, 1.0, -3.0]])
    ids, weights = choose(logits, torch.full((8,), -1.0), config)
    assert ids.tolist() == [[2, 3]]
    assert weights.sum() == pytest.approx(1.0)


def test_softmax_underflow_in_a_kept_group_stays_in_it():
    """The kept group's second expert has probability zero: as much as a mask of 0.0 gives to the dropped groups."""
    config = RouterConfig(top_k=2, scoring="softmax", num_groups=2, top_k_groups=1, group_score="max")
    ids, _ = choose(torch.tensor([[1.0, 2.0, 900.0, -900.0]]), None, config)
    assert ids.tolist() == [[2, 3]]


def test_ties_go_to_the_lower_id():
    for config in (NOAUX, LIMITED, GREEDY):
        ids, _ = choose(torch.zeros(3, 16), torch.zeros(16) if config.scoring == "sigmoid" else None, config)
        assert ids.tolist() == [list(range(config.top_k))] * 3


def test_the_bias_steers_the_choice_and_not_the_weight():
    config = RouterConfig(top_k=1, scoring="sigmoid", scale=2.5)
    logits = torch.tensor([[3.0, 0.0]])
    ids, weights = choose(logits, torch.tensor([0.0, 1.0]), config)
    assert ids.tolist() == [[1]]
    assert weights.item() == pytest.approx(0.5 * 2.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_that_bf16_cannot_tell_apart_change_the_choice(tiny, dtype):
    """64 experts in 8 groups, biases half a bf16 step apart: kept in fp32 through the loader and summed in fp32."""
    step = 2.0**-9
    config = RouterConfig(top_k=8, scoring="sigmoid", num_groups=8, top_k_groups=4, group_score="top2_sum", normalize=True)
    bias = 1.0 + step * torch.randperm(64, generator=torch.Generator().manual_seed(0)) / 64
    ids, _ = choose(torch.zeros(1, 64), bias, config)
    assert set(ids[0].tolist()) != set(choose(torch.zeros(1, 64), bias.bfloat16().float(), config)[0][0].tolist())
    groups = sorted(range(8), key=lambda group: -bias[8 * group : 8 * group + 8].topk(2).values.sum())[:4]
    kept = [expert for group in groups for expert in range(8 * group, 8 * group + 8)]
    assert ids[0].tolist() == sorted(kept, key=lambda expert: -bias[expert])[:8]

    checkpoint = tiny("deepseek_v3_small")
    stored = checkpoint.reference.model.layers[1].mlp.gate.e_score_correction_bias
    router = load(checkpoint.directory, dtype=dtype).layers[1].mlp.router
    assert not torch.equal(stored, stored.bfloat16().float())
    assert torch.equal(router.correction_bias, stored)
    assert router.correction_bias.dtype == torch.float32


@pytest.mark.parametrize(("dtype", "stored", "kept"), [
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.float32),
])  # fmt: skip
def test_a_gate_that_was_stored_in_bf16_is_kept_so_for_rows_of_bf16(tiny, dtype, stored, kept):
    router = load(tiny("deepseek_v3_small").directory, dtype=dtype).layers[1].mlp.router
    gate = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(0)).to(stored).float()
    router.weight = torch.nn.Parameter(gate, requires_grad=False)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        before = router(hidden, None)
        router.finish_load()
        after = router(hidden, None)
    assert router.weight.dtype == kept
    assert all(map(torch.equal, before, after))


def test_padded_rows_are_routed_nowhere(tiny):
    router = load(tiny("deepseek_v3_small").directory).layers[1].mlp.router
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    hidden[3:] = torch.nan
    with torch.inference_mode():
        ids, weights = router(hidden, torch.tensor([3], dtype=torch.int32))
        alone_ids, alone_weights = router(hidden[:3], None)
    assert ids[3:].eq(-1).all()
    assert weights[3:].eq(0).all()
    assert torch.equal(ids[:3], alone_ids)
    torch.testing.assert_close(weights[:3], alone_weights)


# ---- where transformers differs from what was published


def test_v2_normalises_instead_of_scaling(tiny):
    """As published, norm_topk_prob divides by the sum and leaves the scale out; transformers ignores it and scales."""
    checkpoint = tiny("deepseek_v2")

    def published(config):
        router = dataclasses.replace(config.moe.router, normalize=True, scale=1.0)
        return dataclasses.replace(config, moe=dataclasses.replace(config.moe, router=router))

    ours = load(checkpoint.directory, config=published).layers[1].mlp.router
    theirs = checkpoint.reference.model.layers[1].mlp.gate
    hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ids, weights = ours(hidden, None)
        _, their_weights, their_ids = theirs(hidden)
    assert torch.equal(ids.long().sort(-1).values, their_ids.sort(-1).values)
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))
    their_sums = their_weights.sum(-1)
    assert (their_sums - 1.0).abs().min() > 1e-3
    raw = (their_weights / theirs.routed_scaling_factor).sort(-1).values
    torch.testing.assert_close(weights.sort(-1).values, raw / raw.sum(-1, keepdim=True))


def test_one_chosen_expert_keeps_its_score(tiny):
    """As published, a top-k of one is not normalised (its weight would always be 1); transformers normalises it."""
    checkpoint = tiny("deepseek_v3_small")
    config = RouterConfig(top_k=1, scoring="sigmoid", scale=2.5)
    logits = torch.tensor([[0.3, -0.2]])
    assert choose(logits, torch.zeros(2), config)[1].item() == pytest.approx(2.5 * torch.tensor(0.3).sigmoid().item())
    theirs = checkpoint.reference.model.layers[1].mlp.gate
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    kept = theirs.top_k
    try:
        theirs.top_k = 1
        with torch.inference_mode():
            torch.testing.assert_close(theirs(hidden)[1], torch.full((4, 1), 2.5))
    finally:
        theirs.top_k = kept


# ---- properties


def _plain(logits: list[float], bias: list[float], config: RouterConfig) -> tuple[list[int], list[float]]:
    """The published rules, one token at a time, in fp32 scores and Python floats."""
    row = torch.tensor(logits)
    scores = (row.softmax(-1) if config.scoring == "softmax" else row.sigmoid()).tolist()
    choice = (torch.tensor(scores) + torch.tensor(bias)).tolist()
    size = len(logits) // config.num_groups
    members = [list(range(group * size, group * size + size)) for group in range(config.num_groups)]

    def group_score(group: int) -> float:
        best = sorted((choice[expert] for expert in members[group]), reverse=True)
        return torch.tensor(best[:2]).sum().item() if config.group_score == "top2_sum" else best[0]

    groups = list(range(config.num_groups))
    if config.group_score != "none":
        groups = sorted(groups, key=lambda group: (-group_score(group), group))[: config.top_k_groups]
    candidates = [expert for group in groups for expert in members[group]]
    ids = sorted(candidates, key=lambda expert: (-choice[expert], expert))[: config.top_k]
    weights = [scores[expert] for expert in ids]
    total = sum(weights) if config.normalize else 1.0
    return ids, [weight / total * config.scale for weight in weights]


@st.composite
def _cases(draw):
    scoring = draw(st.sampled_from(["softmax", "sigmoid"]))
    groups, size = draw(st.sampled_from([(1, 5), (2, 3), (4, 2), (4, 4)]))
    kept = draw(st.integers(1, groups))
    config = RouterConfig(
        top_k=draw(st.integers(1, kept * size)),
        scoring=scoring,
        num_groups=groups,
        top_k_groups=kept,
        group_score=draw(st.sampled_from(["max", "top2_sum"])) if kept < groups else "none",
        normalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5, 16.0])),
    )
    # Few distinct values: ties are common.
    values = st.sampled_from([-8.0, -1.5, -0.5, 0.0, 0.25, 1.0, 3.0])
    experts = groups * size
    rows = draw(st.lists(st.lists(values, min_size=experts, max_size=experts), min_size=0, max_size=4))
    bias = draw(st.lists(values, min_size=experts, max_size=experts)) if scoring == "sigmoid" else None
    return config, torch.tensor(rows).view(-1, experts), bias


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_route_is_the_plain_rule(case):
    config, logits, bias = case
    before = logits.clone()
    ids, weights = choose(logits, None if bias is None else torch.tensor(bias), config)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert torch.equal(logits, before)
    assert ids.shape == weights.shape == (len(logits), config.top_k)
    for row, (row_ids, row_weights) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        wanted_ids, wanted_weights = _plain(logits[row].tolist(), bias or [0.0] * logits.shape[1], config)
        assert row_ids == wanted_ids
        assert row_weights == pytest.approx(wanted_weights, rel=1e-5)


def test_a_row_is_routed_as_if_it_were_alone(tiny):
    checkpoint = tiny("moonlight")
    router = load(checkpoint.directory).layers[2].mlp.router
    embedding = checkpoint.reference.model.embed_tokens.weight
    hidden = embedding[torch.tensor(prompt(40, seed=0))]
    with torch.inference_mode():
        ids, weights = router(hidden, None)
        for row in range(40):
            row_ids, row_weights = router(hidden[row : row + 1], None)
            assert torch.equal(row_ids[0], ids[row])
            torch.testing.assert_close(row_weights[0], weights[row])
