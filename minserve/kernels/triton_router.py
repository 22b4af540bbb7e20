"""Triton kernel of the router: hidden states to expert ids and weights in one launch. Knows no expert's weights."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minserve.kernels.interface import RouterConfig
from minserve.kernels.launch import dependent_launch, fetch_ahead, follow, is_last, lead


@triton.jit
def _best(values, index, nobody: tl.constexpr):
    """[tokens]: the lowest index that holds a token's largest value, of [tokens, groups, members]."""
    top = tl.max(tl.max(values, axis=2), axis=1)
    held = tl.where(values == top[:, None, None], index, nobody)
    return tl.min(tl.min(held, axis=2), axis=1)


@triton.jit
def _choose(
    values,
    bias,
    expert,
    inside,
    top_k: tl.constexpr,
    top_k_groups: tl.constexpr,
    group_score: tl.constexpr,
    softmax: tl.constexpr,
    biased: tl.constexpr,
    normalize: tl.constexpr,
    nobody: tl.constexpr,
    block_t: tl.constexpr,
    block_groups: tl.constexpr,
    block_size: tl.constexpr,
    block_k: tl.constexpr,
):
    """Logits [tokens, groups, members] to (ids, scores) [tokens, block_k]."""
    nothing = float("-inf")
    group = tl.arange(0, block_groups)
    member = tl.arange(0, block_size)
    if softmax:
        powers = tl.exp(values - tl.max(tl.max(values, axis=2), axis=1)[:, None, None])
        scores = powers / tl.sum(tl.sum(powers, axis=2), axis=1)[:, None, None]
    else:
        scores = tl.sigmoid(values)
    choice = scores
    if biased:
        choice += tl.load(bias + expert, mask=inside, other=0.0)
    # A padded row may hold NaN. Its choice must still be valid indices, so NaN ranks below every number, and above "taken".
    choice = tl.where(choice == choice, choice, -1.0e30)
    choice = tl.where(inside, choice, nothing)
    if group_score > 0:
        best = tl.max(choice, axis=2)
        if group_score == 2:
            first = tl.min(tl.where(choice == best[:, :, None], member[None, None, :], block_size), axis=2)
            best += tl.max(tl.where(member[None, None, :] == first[:, :, None], nothing, choice), axis=2)
        kept = tl.zeros([block_t, block_groups], tl.int32)
        for _ in tl.static_range(top_k_groups):
            held = tl.where(best == tl.max(best, axis=1)[:, None], group[None, :], block_groups)
            pick = group[None, :] == tl.min(held, axis=1)[:, None]
            kept = tl.where(pick, 1, kept)
            best = tl.where(pick, nothing, best)
        choice = tl.where((kept == 1)[:, :, None], choice, tl.where(inside, -2.0e38, nothing))
    slot = tl.arange(0, block_k)[None, :]
    chosen = tl.zeros([block_t, block_k], tl.int32)
    chosen_scores = tl.zeros([block_t, block_k], tl.float32)
    for place in tl.static_range(top_k):
        pick = _best(choice, expert, nobody)
        taken = expert == pick[:, None, None]
        score = tl.sum(tl.sum(tl.where(taken, scores, 0.0), axis=2), axis=1)
        chosen = tl.where(slot == place, pick[:, None], chosen)
        chosen_scores = tl.where(slot == place, score[:, None], chosen_scores)
        choice = tl.where(taken, nothing, choice)
    if normalize:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, axis=1) + 1e-20)[:, None]
    return chosen, chosen_scores


@triton.jit
def _route_kernel(
    x,
    weight,
    bias,
    num_tokens,
    partial,
    arrivals,
    ids,
    weights,
    scale,
    tokens,
    width,
    each,
    x_stride,
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
    block_m: tl.constexpr,
    block_e: tl.constexpr,
    block_k: tl.constexpr,
    block_t: tl.constexpr,
    block_groups: tl.constexpr,
    block_size: tl.constexpr,
    block_slots: tl.constexpr,
):
    """Programs of one block of tokens add up their parts of the logits; the last of them to finish chooses."""
    experts: tl.constexpr = groups * group_size
    begin = tl.program_id(2) * each
    end = tl.minimum(begin + each, width)
    row = tl.program_id(0) * block_m + tl.arange(0, block_m)
    column = tl.program_id(1) * block_e + tl.arange(0, block_e)
    k = tl.arange(0, block_k)
    rows = weight + column[:, None] * width
    lines = begin + tl.arange(0, block_k // 16) * 32
    fetch_ahead(tl.where((column < experts)[:, None] & (lines < end)[None, :], rows + lines[None, :], weight))
    lead(dependent)
    follow(dependent)
    logits = tl.zeros([block_m, block_e], tl.float32)
    for start in range(begin, end, block_k):
        within = start + k < end
        a = tl.load(
            x + row[:, None].to(tl.int64) * x_stride + start + k[None, :],
            mask=(row < tokens)[:, None] & within[None, :],
            other=0.0,
        )
        w = tl.load(rows + start + k[None, :], mask=(column < experts)[:, None] & within[None, :], other=0.0)
        if a.dtype == tl.bfloat16:
            # fp32 is the sum of three bf16 numbers, whose products with bf16 are exact in fp32.
            for _ in tl.static_range(3):
                high = w.to(tl.bfloat16)
                logits = tl.dot(a, tl.trans(high), logits)
                w -= high.to(tl.float32)
        else:
            logits = tl.dot(a.to(tl.float32), tl.trans(w), logits, input_precision="ieee")
    place = (tl.program_id(2) * tokens + row[:, None]).to(tl.int64) * experts + column[None, :]
    tl.store(partial + place, logits, mask=(row < tokens)[:, None] & (column < experts)[None, :])
    if is_last(arrivals, tl.program_id(0), tl.num_programs(1) * splits):
        real = tokens
        if padded:
            real = tl.load(num_tokens)
        group = tl.arange(0, block_groups)[None, :, None]
        member = tl.arange(0, block_size)[None, None, :]
        expert = group * group_size + member
        inside = (group < groups) & (member < group_size)
        slot = tl.arange(0, block_slots)[None, :]
        for first in range(0, block_m, block_t):
            token = tl.program_id(0) * block_m + first + tl.arange(0, block_t)
            held = (token < tokens)[:, None, None] & inside
            logit = partial + token[:, None, None].to(tl.int64) * experts + expert
            values = tl.zeros([block_t, block_groups, block_size], tl.float32)
            for split in range(splits):
                values += tl.load(logit + split * tokens * experts, mask=held, other=0.0, cache_modifier=".cg")
            chosen, scores = _choose(
                tl.where(inside, values, float("-inf")),
                bias,
                expert,
                inside,
                top_k,
                top_k_groups,
                group_score,
                softmax,
                biased,
                normalize,
                experts,
                block_t,
                block_groups,
                block_size,
                block_slots,
            )
            chosen = tl.where(slot < top_k, chosen, experts + slot - top_k)
            scores = tl.where(slot < top_k, scores * scale, 1.0)
            padding = (token >= real)[:, None]
            target = token[:, None] * (top_k + always_on) + slot
            written = (token < tokens)[:, None] & (slot < top_k + always_on)
            tl.store(ids + target, tl.where(padding, -1, chosen), mask=written)
            tl.store(weights + target, tl.where(padding, 0.0, scores), mask=written)


_MOST_BLOCKS = 4096
_PROGRAMS = 128
"""About one a multiprocessor: a small batch's router weights are read by all of them at once."""


class TritonRouter:
    """The router's kernel and its counters, which serve one stream."""

    def __init__(self, device: torch.device) -> None:
        self._arrivals = torch.zeros(_MOST_BLOCKS, dtype=torch.int32, device=device)

    def route(
        self, x: Tensor, weight: Tensor, correction_bias: Tensor | None, config: RouterConfig, num_tokens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x [T, H] times weight fp32 [E, H], and the choice: (ids int32 [T, k], weights fp32 [T, k]), best first, equal choices
        to the lower id, then the always-on slots; rows from num_tokens (int32 [1]) on get -1 and 0.

        A row of NaN still gets valid and distinct ids. At most 2^18 tokens at once.
        """
        tokens, width = x.shape
        experts, columns = weight.shape[0], config.top_k + config.always_on
        ids = torch.empty(tokens, columns, dtype=torch.int32, device=x.device)
        weights = torch.empty(tokens, columns, dtype=torch.float32, device=x.device)
        if tokens == 0:
            return ids, weights
        groups = config.num_groups if config.group_score != "none" else 1
        group_size = experts // groups
        block_m, block_e, block_k = (16, 16, 128) if tokens <= 256 else (64, 64, 64)
        blocks, across = triton.cdiv(tokens, block_m), triton.cdiv(experts, block_e)
        splits = max(1, min(triton.cdiv(width, block_k), _PROGRAMS // (blocks * across)))
        each = triton.cdiv(triton.cdiv(width, block_k), splits) * block_k
        splits = triton.cdiv(width, each)
        block_groups, block_size = triton.next_power_of_2(groups), triton.next_power_of_2(group_size)
        partial = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
        _route_kernel[(blocks, across, splits)](
            x,
            weight,
            weight if correction_bias is None else correction_bias,
            ids if num_tokens is None else num_tokens,
            partial,
            self._arrivals,
            ids,
            weights,
            config.scale,
            tokens,
            width,
            each,
            x.stride(0),
            splits,
            groups=groups,
            group_size=group_size,
            top_k=config.top_k,
            top_k_groups=config.top_k_groups,
            group_score={"none": 0, "max": 1, "top2_sum": 2}[config.group_score],
            softmax=config.scoring == "softmax",
            biased=correction_bias is not None,
            normalize=config.normalize,
            always_on=config.always_on,
            padded=num_tokens is not None,
            block_m=block_m,
            block_e=block_e,
            block_k=block_k,
            block_t=min(block_m, triton.next_power_of_2(tokens), max(1, 2048 // (block_groups * block_size))),
            block_groups=block_groups,
            block_size=block_size,
            block_slots=triton.next_power_of_2(columns),
            num_warps=4,
            **dependent_launch(x.device),
        )
        return ids, weights
