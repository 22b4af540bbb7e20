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
def _choose(
    values,
    bias,
    inside,
    expert,
    top_k: tl.constexpr,
    top_k_groups: tl.constexpr,
    group_score: tl.constexpr,
    softmax: tl.constexpr,
    biased: tl.constexpr,
    normalize: tl.constexpr,
    block_t: tl.constexpr,
    block_groups: tl.constexpr,
    block_size: tl.constexpr,
    block_slots: tl.constexpr,
):
    """Logits [tokens, places], groups side by side, to (places, scores) [tokens, block_slots]."""
    nothing = float("-inf")
    if softmax:
        powers = tl.exp(values - tl.max(values, axis=1)[:, None])
        scores = powers / tl.sum(powers, axis=1)[:, None]
    else:
        scores = tl.sigmoid(values)
    choice = scores
    if biased:
        choice += tl.load(bias + expert, mask=inside, other=0.0)[None, :]
    # A padded row may hold NaN. Its choice must still be valid indices, so NaN ranks below every number, and above "taken".
    choice = tl.where(choice == choice, choice, -1.0e30)
    choice = tl.where(inside[None, :], choice, nothing)
    if group_score > 0:
        group = tl.arange(0, block_groups)[None, :]
        member = tl.arange(0, block_size)[None, None, :]
        grouped = tl.reshape(choice, (block_t, block_groups, block_size))
        best = tl.max(grouped, axis=2)
        if group_score == 2:
            first = tl.min(tl.where(grouped == best[:, :, None], member, block_size), axis=2)
            best += tl.max(tl.where(member == first[:, :, None], nothing, grouped), axis=2)
        kept = tl.zeros([block_t, block_groups], tl.int32)
        for _ in tl.static_range(top_k_groups):
            _, pick = tl.max(best, axis=1, return_indices=True)
            kept = tl.where(group == pick[:, None], 1, kept)
            best = tl.where(group == pick[:, None], nothing, best)
        kept_all = tl.reshape(tl.broadcast_to(kept[:, :, None], (block_t, block_groups, block_size)), choice.shape)
        choice = tl.where(kept_all == 1, choice, tl.where(inside[None, :], -2.0e38, nothing))
    place = tl.arange(0, block_groups * block_size)[None, :]
    slot = tl.arange(0, block_slots)[None, :]
    chosen = tl.zeros([block_t, block_slots], tl.int32)
    for turn in tl.static_range(top_k):
        # Of equal values the first.
        _, pick = tl.max(choice, axis=1, return_indices=True)
        chosen = tl.where(slot == turn, pick[:, None], chosen)
        choice = tl.where(place == pick[:, None], nothing, choice)
    chosen_scores = tl.where(slot < top_k, tl.gather(scores, chosen, axis=1), 0.0)
    if normalize:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, axis=1) + 1e-20)[:, None]
    return chosen, chosen_scores


@triton.jit
def _settle(
    first,
    bias,
    num_tokens,
    partial,
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
    block_t: tl.constexpr,
    block_splits: tl.constexpr,
    block_groups: tl.constexpr,
    block_size: tl.constexpr,
    block_slots: tl.constexpr,
):
    """Ids and weights of `block_t` tokens, of the parts of their logits that programs left in `partial`."""
    experts: tl.constexpr = groups * group_size
    real = tokens
    if padded:
        real = tl.load(num_tokens)
    lane = tl.arange(0, block_groups * block_size)
    expert = lane // block_size * group_size + lane % block_size
    inside = (lane // block_size < groups) & (lane % block_size < group_size)
    slot = tl.arange(0, block_slots)[None, :]
    part = tl.arange(0, block_splits)[:, None, None]
    token = first + tl.arange(0, block_t)
    logit = partial + (part * tokens + token[None, :, None]).to(tl.int64) * experts + expert[None, None, :]
    held = (part < splits) & (token < tokens)[None, :, None] & inside[None, None, :]
    values = tl.sum(tl.load(logit, mask=held, other=0.0, cache_modifier=".cg"), axis=0)
    chosen, scores = _choose(
        tl.where(inside[None, :], values, float("-inf")),
        bias,
        inside,
        expert,
        top_k,
        top_k_groups,
        group_score,
        softmax,
        biased,
        normalize,
        block_t,
        block_groups,
        block_size,
        block_slots,
    )
    chosen = chosen // block_size * group_size + chosen % block_size
    chosen = tl.where(slot < top_k, chosen, experts + slot - top_k)
    scores = tl.where(slot < top_k, scores * scale, 1.0)
    padding = (token >= real)[:, None]
    target = token[:, None] * (top_k + always_on) + slot
    written = (token < tokens)[:, None] & (slot < top_k + always_on)
    tl.store(ids + target, tl.where(padding, -1, chosen), mask=written)
    tl.store(weights + target, tl.where(padding, 0.0, scores), mask=written)


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
    choose: tl.constexpr,
    dependent: tl.constexpr,
    block_m: tl.constexpr,
    block_e: tl.constexpr,
    block_k: tl.constexpr,
    block_t: tl.constexpr,
    block_splits: tl.constexpr,
    block_groups: tl.constexpr,
    block_size: tl.constexpr,
    block_slots: tl.constexpr,
):
    """Programs of one block of tokens add up their parts of the logits; the last of them to finish chooses."""
    experts: tl.constexpr = groups * group_size
    from_k = tl.program_id(2) * each
    to_k = tl.minimum(from_k + each, width)
    row = tl.program_id(0) * block_m + tl.arange(0, block_m)
    column = tl.program_id(1) * block_e + tl.arange(0, block_e)
    k = tl.arange(0, block_k)
    rows = weight + column[:, None] * width
    lines = from_k + tl.arange(0, block_k // 16) * 32
    fetch_ahead(tl.where((column < experts)[:, None] & (lines < to_k)[None, :], rows + lines[None, :], weight))
    lead(dependent)
    follow(dependent)
    logits = tl.zeros([block_m, block_e], tl.float32)
    for start in range(from_k, to_k, block_k):
        within = start + k < to_k
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
    if choose:  # noqa: SIM102 - Triton evaluates both sides of an `and`
        if is_last(arrivals, tl.program_id(0), tl.num_programs(1) * splits):
            begin = tl.program_id(0) * block_m
            for first in range(begin, tl.minimum(begin + block_m, tokens), block_t):
                _settle(
                    first,
                    bias,
                    num_tokens,
                    partial,
                    ids,
                    weights,
                    scale,
                    tokens,
                    splits,
                    groups,
                    group_size,
                    top_k,
                    top_k_groups,
                    group_score,
                    softmax,
                    biased,
                    normalize,
                    always_on,
                    padded,
                    block_t,
                    block_splits,
                    block_groups,
                    block_size,
                    block_slots,
                )


@triton.jit
def _settle_kernel(
    bias,
    num_tokens,
    partial,
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
    block_t: tl.constexpr,
    block_splits: tl.constexpr,
    block_groups: tl.constexpr,
    block_size: tl.constexpr,
    block_slots: tl.constexpr,
):
    """The choice alone, where there are so many tokens that they are spread better than over the product's programs."""
    lead(dependent)
    follow(dependent)
    _settle(
        tl.program_id(0) * block_t,
        bias,
        num_tokens,
        partial,
        ids,
        weights,
        scale,
        tokens,
        splits,
        groups,
        group_size,
        top_k,
        top_k_groups,
        group_score,
        softmax,
        biased,
        normalize,
        always_on,
        padded,
        block_t,
        block_splits,
        block_groups,
        block_size,
        block_slots,
    )


_MOST_BLOCKS = 4096
_PROGRAMS = 128
"""About one a multiprocessor: a small batch's router weights are read by all of them at once."""
_CHOICE = 8192
"""Most parts of logits that the last program of a block holds at once."""


class TritonRouter:
    """The router's kernel and its counters, which serve one stream. `fixed`: cut in the same way for any number of tokens."""

    def __init__(self, device: torch.device, *, fixed: bool = False) -> None:
        self._fixed = fixed
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
        block_m, block_e, block_k = (16, 16, 128) if tokens <= 256 or self._fixed else (64, 64, 64)
        blocks, across = triton.cdiv(tokens, block_m), triton.cdiv(experts, block_e)
        splits = max(1, min(triton.cdiv(width, block_k), _PROGRAMS // ((1 if self._fixed else blocks) * across)))
        each = triton.cdiv(triton.cdiv(width, block_k), splits) * block_k
        splits = triton.cdiv(width, each)
        block_groups, block_size = triton.next_power_of_2(groups), triton.next_power_of_2(group_size)
        block_splits = triton.next_power_of_2(splits)
        # So few tokens at once that a warp has a token to itself, and all parts of its logits in registers.
        block_t = max(1, _CHOICE // (block_groups * block_size * block_splits))
        block_t = min(block_m, block_t, 4 if self._fixed else triton.next_power_of_2(tokens))
        partial = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
        choose = block_m == 16
        if not choose:
            block_t = min(4, block_t)
        choice = {
            "groups": groups,
            "group_size": group_size,
            "top_k": config.top_k,
            "top_k_groups": config.top_k_groups,
            "group_score": {"none": 0, "max": 1, "top2_sum": 2}[config.group_score],
            "softmax": config.scoring == "softmax",
            "biased": correction_bias is not None,
            "normalize": config.normalize,
            "always_on": config.always_on,
            "padded": num_tokens is not None,
            "block_t": block_t,
            "block_splits": block_splits,
            "block_groups": block_groups,
            "block_size": block_size,
            "block_slots": triton.next_power_of_2(columns),
            **dependent_launch(x.device),
        }
        bias, real = weight if correction_bias is None else correction_bias, ids if num_tokens is None else num_tokens
        _route_kernel[(blocks, across, splits)](
            x,
            weight,
            bias,
            real,
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
            choose=choose,
            block_m=block_m,
            block_e=block_e,
            block_k=block_k,
            num_warps=min(4, block_t) if choose else 4,
            **choice,
        )
        if not choose:
            _settle_kernel[(triton.cdiv(tokens, block_t),)](
                bias, real, partial, ids, weights, config.scale, tokens, splits, num_warps=block_t, **choice
            )
        return ids, weights
