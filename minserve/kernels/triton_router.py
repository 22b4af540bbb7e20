"""Triton kernel of the router's choice: logits to expert ids and weights, one program a token. Knows no expert's weights."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.interface import RouterConfig


@triton.jit
def _best(values, index, nobody: tl.constexpr):
    """Largest value of a 2-d tile, and the lowest index that holds it."""
    top = tl.max(tl.max(values, axis=1), axis=0)
    return tl.min(tl.min(tl.where(values == top, index, nobody), axis=1), axis=0)


@triton.jit
def _route_kernel(
    logits,
    bias,
    ids,
    weights,
    scale,
    groups: tl.constexpr,
    group_size: tl.constexpr,
    top_k: tl.constexpr,
    top_k_groups: tl.constexpr,
    group_score: tl.constexpr,
    softmax: tl.constexpr,
    biased: tl.constexpr,
    normalize: tl.constexpr,
    always_on: tl.constexpr,
    block_groups: tl.constexpr,
    block_size: tl.constexpr,
    block_k: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    nobody: tl.constexpr = groups * group_size
    nothing = float("-inf")
    group = tl.arange(0, block_groups)
    member = tl.arange(0, block_size)
    expert = group[:, None] * group_size + member[None, :]
    inside = (group < groups)[:, None] & (member < group_size)[None, :]
    values = tl.load(logits + token * nobody + expert, mask=inside, other=nothing)
    if softmax:
        powers = tl.exp(values - tl.max(tl.max(values, axis=1), axis=0))
        scores = powers / tl.sum(tl.sum(powers, axis=1), axis=0)
    else:
        scores = tl.sigmoid(values)
    choice = scores
    if biased:
        choice += tl.load(bias + expert, mask=inside, other=0.0)
    # A padded row may hold NaN. Its choice must still be valid indices, so NaN ranks below every number, and above "taken".
    choice = tl.where(choice == choice, choice, -1.0e30)
    choice = tl.where(inside, choice, nothing)
    if group_score > 0:
        best = tl.max(choice, axis=1)
        if group_score == 2:
            first = tl.min(tl.where(choice == best[:, None], member[None, :], block_size), axis=1)
            best += tl.max(tl.where(member[None, :] == first[:, None], nothing, choice), axis=1)
        kept = group < 0
        for _ in tl.static_range(top_k_groups):
            pick = tl.min(tl.where(best == tl.max(best, axis=0), group, block_groups), axis=0)
            kept = kept | (group == pick)
            best = tl.where(group == pick, nothing, best)
        choice = tl.where(kept[:, None], choice, tl.where(inside, -2.0e38, nothing))
    slot = tl.arange(0, block_k)
    chosen = tl.zeros([block_k], tl.int32)
    chosen_scores = tl.zeros([block_k], tl.float32)
    for place in tl.static_range(top_k):
        pick = _best(choice, expert, nobody)
        score = tl.sum(tl.sum(tl.where(expert == pick, scores, 0.0), axis=1), axis=0)
        chosen = tl.where(slot == place, pick, chosen)
        chosen_scores = tl.where(slot == place, score, chosen_scores)
        choice = tl.where(expert == pick, nothing, choice)
    if normalize:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, axis=0) + 1e-20)
    chosen = tl.where(slot < top_k, chosen, nobody + slot - top_k)
    chosen_scores = tl.where(slot < top_k, chosen_scores * scale, 1.0)
    column = token * (top_k + always_on) + slot
    tl.store(ids + column, chosen, mask=slot < top_k + always_on)
    tl.store(weights + column, chosen_scores, mask=slot < top_k + always_on)


def route(logits: Tensor, correction_bias: Tensor | None, config: RouterConfig) -> tuple[Tensor, Tensor]:
    """Logits fp32 [T, E] to (ids int32 [T, k], weights fp32 [T, k]), best first, equal choices to the lower id, then the
    always-on slots.

    A row of NaN, as padding may be, still gets valid and distinct ids.
    """
    tokens, experts = logits.shape
    columns = config.top_k + config.always_on
    ids = torch.empty(tokens, columns, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, columns, dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return ids, weights
    groups = config.num_groups if config.group_score != "none" else 1
    group_size = experts // groups
    _route_kernel[(tokens,)](
        logits.contiguous(),
        logits if correction_bias is None else correction_bias,
        ids,
        weights,
        config.scale,
        groups=groups,
        group_size=group_size,
        top_k=config.top_k,
        top_k_groups=config.top_k_groups,
        group_score={"none": 0, "max": 1, "top2_sum": 2}[config.group_score],
        softmax=config.scoring == "softmax",
        biased=correction_bias is not None,
        normalize=config.normalize,
        always_on=config.always_on,
        block_groups=triton.next_power_of_2(groups),
        block_size=triton.next_power_of_2(group_size),
        block_k=triton.next_power_of_2(columns),
        num_warps=1 if experts <= 256 else 4,
    )
    return ids, weights
