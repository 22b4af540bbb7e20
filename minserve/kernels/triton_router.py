"""Triton kernels of the router: hidden states to logits, logits to expert ids and weights. They know no expert's weights."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.interface import RouterConfig
from minserve.kernels.launch import cdiv, dependent_launch, fetch_ahead, follow, lead, next_power_of_2


@triton.jit
def _logits_kernel(
    x,
    weight,
    partial,
    tokens,
    experts,
    width,
    each,
    x_stride,
    dependent: tl.constexpr,
    block_m: tl.constexpr,
    block_e: tl.constexpr,
    block_k: tl.constexpr,
):
    """partial[split, token, expert]: what the split's columns add to a logit."""
    split = tl.program_id(2)
    from_k = split * each
    to_k = tl.minimum(from_k + each, width)
    row = tl.program_id(0) * block_m + tl.arange(0, block_m)
    column = tl.program_id(1) * block_e + tl.arange(0, block_e)
    k = tl.arange(0, block_k)
    rows = weight + column[:, None] * width
    lines = from_k + tl.arange(0, block_k // 16) * 32
    fetch_ahead(tl.where((column < experts)[:, None] & (lines < to_k)[None, :], rows + lines[None, :], weight))
    lead(dependent)
    follow(dependent)
    source = x + row[:, None].to(tl.int64) * x_stride + k[None, :]
    logits = tl.zeros([block_m, block_e], tl.float32)
    for start in range(from_k, to_k, block_k):
        within = (start + k < to_k)[None, :]
        a = tl.load(source + start, mask=(row < tokens)[:, None] & within, other=0.0)
        w = tl.load(rows + start + k[None, :], mask=(column < experts)[:, None] & within, other=0.0)
        if a.dtype == tl.bfloat16 and w.dtype == tl.bfloat16:
            logits = tl.dot(a, tl.trans(w), logits)
        elif a.dtype == tl.bfloat16:
            # fp32 is the sum of three bf16 numbers, whose products with bf16 are exact in fp32.
            for _ in tl.static_range(3):
                high = w.to(tl.bfloat16)
                logits = tl.dot(a, tl.trans(high), logits)
                w -= high.to(tl.float32)
        else:
            logits = tl.dot(a.to(tl.float32), tl.trans(w.to(tl.float32)), logits, input_precision="ieee")
    place = (split * tokens + row[:, None]).to(tl.int64) * experts + column[None, :]
    tl.store(partial + place, logits, mask=(row < tokens)[:, None] & (column < experts)[None, :])


@triton.jit
def _ordered(bits):
    """Bits of an fp32 number to an integer of the same order, and back: a warp finds the largest integer in one instruction."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _choose_kernel(
    partial,
    bias,
    num_tokens,
    ids,
    weights,
    scale,
    tokens,
    splits,
    groups: tl.constexpr,
    group_size: tl.constexpr,
    top_k: tl.constexpr,
    top_k_groups: tl.constexpr,
    group_score: tl.constexpr,
    softmax: tl.constexpr,
    biased: tl.constexpr,
    normalize: tl.constexpr,
    always_on: tl.constexpr,
    padded: tl.constexpr,
    dependent: tl.constexpr,
    block_tokens: tl.constexpr,
    block_splits: tl.constexpr,
    block_groups: tl.constexpr,
    block_size: tl.constexpr,
    block_slots: tl.constexpr,
):
    """Some tokens' choices, each by one warp: nothing has to pass from warp to warp."""
    experts: tl.constexpr = groups * group_size
    places: tl.constexpr = block_groups * block_size
    nothing = float("-inf")
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    place = tl.arange(0, places)
    expert = place // block_size * group_size + place % block_size
    inside = ((place // block_size < groups) & (place % block_size < group_size))[None, :]
    if biased:
        steer = tl.load(bias + expert[None, :], mask=inside, other=0.0)
    real = tokens
    if padded:
        real = tl.load(num_tokens)
    lead(dependent)
    follow(dependent)
    values = tl.zeros([block_tokens, places], tl.float32)
    for part in tl.static_range(block_splits):
        logit = partial + (part * tokens + token[:, None]).to(tl.int64) * experts + expert[None, :]
        values += tl.load(logit, mask=(part < splits) & (token < tokens)[:, None] & inside, other=0.0)
    values = tl.where(inside, values, nothing)
    if softmax:
        powers = tl.exp(values - tl.max(values, axis=1)[:, None])
        scores = powers / tl.sum(powers, axis=1)[:, None]
    else:
        scores = tl.sigmoid(values)
    choice = scores
    if biased:
        choice += steer
    # A padded row may hold NaN. Its choice must still be valid indices, so NaN ranks below every number, and above "taken".
    choice = tl.where(choice == choice, choice, -1.0e30)
    choice = tl.where(inside, choice, nothing)
    if group_score > 0:
        group = tl.arange(0, block_groups)[None, :]
        member = tl.arange(0, block_size)[None, None, :]
        grouped = tl.reshape(choice, (block_tokens, block_groups, block_size))
        best = tl.max(grouped, axis=2)
        if group_score == 2:
            first = tl.min(tl.where(grouped == best[:, :, None], member, block_size), axis=2)
            best += tl.max(tl.where(member == first[:, :, None], nothing, grouped), axis=2)
        kept = tl.zeros([block_tokens, block_groups], tl.int32)
        for _ in tl.static_range(top_k_groups):
            _, pick = tl.max(best, axis=1, return_indices=True)
            kept = tl.where(group == pick[:, None], 1, kept)
            best = tl.where(group == pick[:, None], nothing, best)
        kept_all = tl.broadcast_to(kept[:, :, None], (block_tokens, block_groups, block_size))
        kept_all = tl.reshape(kept_all, (block_tokens, places))
        choice = tl.where(kept_all == 1, choice, tl.where(inside, -2.0e38, nothing))
    slot = tl.arange(0, block_slots)[None, :]
    chosen = tl.zeros([block_tokens, block_slots], tl.int32)
    chosen_scores = tl.zeros([block_tokens, block_slots], tl.float32)
    rank = _ordered(choice.to(tl.int32, bitcast=True))
    for turn in tl.static_range(top_k):
        best_rank = tl.max(rank, axis=1)
        pick = tl.min(tl.where(rank == best_rank[:, None], place[None, :], places), axis=1)  # of equal values the first
        mine = place[None, :] == pick[:, None]
        best_bits = _ordered(best_rank)
        if biased:
            best_bits = tl.sum(tl.where(mine, scores.to(tl.int32, bitcast=True), 0), axis=1)
        chosen = tl.where(slot == turn, pick[:, None], chosen)
        chosen_scores = tl.where(slot == turn, best_bits.to(tl.float32, bitcast=True)[:, None], chosen_scores)
        rank = tl.where(mine, -0x80000000, rank)
    if normalize:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, axis=1)[:, None] + 1e-20)
    chosen = tl.where(slot < top_k, chosen // block_size * group_size + chosen % block_size, experts + slot - top_k)
    chosen_scores = tl.where(slot < top_k, chosen_scores * scale, 1.0)
    target = token[:, None] * (top_k + always_on) + slot
    written = (token < tokens)[:, None] & (slot < top_k + always_on)
    tl.store(ids + target, tl.where((token < real)[:, None], chosen, -1), mask=written)
    tl.store(weights + target, tl.where((token < real)[:, None], chosen_scores, 0.0), mask=written)


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How the product of tokens and gate is cut into programs: the fastest on an H200."""

    block_m: int
    block_e: int
    block_k: int
    programs: int
    """At most so many, from splitting the columns: few, that a program has something to add up, many, that all have work."""
    num_warps: int
    num_stages: int
    block_tokens: int
    """Of a program that chooses, each by a warp."""


_FIXED = Cut(16, 16, 128, 512, 1, 3, 1)


def cut_of(tokens: int) -> Cut:
    """The same whatever the gate's type, so that the same numbers give the same bits."""
    if tokens <= 16:
        return Cut(16, 32, 256, 256, 4, 2, 1)
    if tokens <= 256:
        return Cut(64, 16, 128, 256 if tokens <= 64 else 128, 4, 2, 1)
    return Cut(64, 128, 64, 128 if tokens <= 2048 else 256, 4, 4, 4)


def route(
    x: Tensor,
    weight: Tensor,
    correction_bias: Tensor | None,
    config: RouterConfig,
    num_tokens: Tensor | None,
    *,
    fixed: bool = False,
) -> tuple[Tensor, Tensor]:
    """x [T, H] times weight fp32 or bf16 [E, H], and the choice: (ids int32 [T, k], weights fp32 [T, k]), best first, equal
    choices to the lower id, then the always-on slots; rows from num_tokens (int32 [1]) on get -1 and 0. Two launches.

    A row of NaN still gets valid and distinct ids. `fixed`: cut in the same way for any number of tokens.
    """
    tokens, width = x.shape
    experts, columns = weight.shape[0], config.top_k + config.always_on
    ids = torch.empty(tokens, columns, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, columns, dtype=torch.float32, device=x.device)
    if tokens == 0:
        return ids, weights
    groups = config.num_groups if config.group_score != "none" else 1
    cut = _FIXED if fixed else cut_of(tokens)
    blocks, across = cdiv(tokens, cut.block_m), cdiv(experts, cut.block_e)
    block_k = cut.block_k
    splits = max(1, min(cdiv(width, block_k), cut.programs // ((1 if fixed else blocks) * across)))
    each = cdiv(cdiv(width, block_k), splits) * block_k
    splits = cdiv(width, each)
    partial = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
    dependent = dependent_launch(x.device)
    _logits_kernel[(blocks, across, splits)](
        x,
        weight,
        partial,
        tokens,
        experts,
        width,
        each,
        x.stride(0),
        block_m=cut.block_m,
        block_e=cut.block_e,
        block_k=block_k,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **dependent,
    )
    _choose_kernel[(cdiv(tokens, cut.block_tokens),)](
        partial,
        weight if correction_bias is None else correction_bias,
        ids if num_tokens is None else num_tokens,
        ids,
        weights,
        config.scale,
        tokens,
        splits,
        groups=groups,
        group_size=experts // groups,
        top_k=config.top_k,
        top_k_groups=config.top_k_groups,
        group_score={"none": 0, "max": 1, "top2_sum": 2}[config.group_score],
        softmax=config.scoring == "softmax",
        biased=correction_bias is not None,
        normalize=config.normalize,
        always_on=config.always_on,
        padded=num_tokens is not None,
        block_tokens=cut.block_tokens,
        block_splits=next_power_of_2(splits),
        block_groups=next_power_of_2(groups),
        block_size=next_power_of_2(experts // groups),
        block_slots=next_power_of_2(columns),
        num_warps=cut.block_tokens,
        **dependent,
    )
    return ids, weights
