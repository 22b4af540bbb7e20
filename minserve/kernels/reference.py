"""The slow plain-torch truth of every kernel: what the CPU runs and what the GPU kernels are tested against.

Knows no layer and no model. Statistics, scores and sums are in fp32 whatever the tensors' type; a row's result depends on
its batch mates by no more than the rounding of fp32.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from minserve.kernels.four_bits import widen_int4
from minserve.kernels.interface import (
    AttentionMetadata,
    AttentionShape,
    ExpertWeights,
    Fp8RowKernels,
    Fp8Rows,
    HeadNorms,
    Kernels,
    LinearWeight,
    PartialSums,
    RotaryTable,
    RouterConfig,
    Unsummed,
)

FP8_BLOCK = 128


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x view [..., H] over its root mean square, times weight [H]; rounded once, at the end."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def sum_rows(x: Unsummed) -> Tensor:
    """[T, H]: each token's rows, weighted and summed in fp32; what is added to them is added to the rounded sum. Of a product's
    parts, in fp32."""
    if isinstance(x, PartialSums):
        return x.parts.sum(dim=1)
    weights = x.weights.masked_fill(x.slots < 0, 0.0).unsqueeze(-1)
    rows = x.rows.unflatten(0, x.weights.shape).masked_fill(x.slots.unsqueeze(-1) < 0, 0.0)
    total: Tensor = (rows.float() * weights).sum(dim=1).to(x.rows.dtype)
    return total if x.added is None else total + x.added


def add_rms_norm(x: Tensor | Unsummed, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum), both new; each sum is rounded to the residual's type before it is read."""
    total = (x if isinstance(x, Tensor) else sum_rows(x).to(residual.dtype)) + residual
    return rms_norm(total, weight, eps), total


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """New (q, k) turned by their positions' angles.

    q view [T, Hq, D], k view [T, Hk, D], cos_sin fp32 [max_positions, rot] = cat(cos, sin) of rot/2 angles each, positions
    int64 [T]. The first `rot` dims of each head turn in pairs (2i, 2i + 1) when interleaved, else (i, i + rot/2); results
    keep the pairs where they were, and the other dims pass.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return _turn(q, cos, sin, interleaved), _turn(k, cos, sin, interleaved)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    head = x[..., : 2 * half].float()
    if interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
    else:
        first, second = head[..., :half], head[..., half:]
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((joined.to(x.dtype), x[..., 2 * half :]), dim=-1)


def silu_and_mul(x: Tensor) -> Tensor:
    """[..., 2I] = gate | up -> [..., I] = silu(gate) * up."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def widen(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """weight [..., N, K] times its scale [..., ceil(N/128), ceil(K/128)] as `dtype`; without a scale, the weight as it is.

    int32 weights are INT4 (four_bits.py).
    """
    if scale is None:
        return weight
    if weight.dtype == torch.int32:
        return widen_int4(weight, scale, dtype)
    rows, columns = weight.shape[-2:]
    tiled = scale.repeat_interleave(FP8_BLOCK, dim=-2)[..., :rows, :].repeat_interleave(FP8_BLOCK, dim=-1)[..., :columns]
    return (weight.float() * tiled).to(dtype)


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]. FP8 weights are widened first: no activation is quantised."""
    return F.linear(x, widen(weight.weight, weight.scale, x.dtype), bias)


def quantize(x: Tensor) -> Fp8Rows:
    """x view [T, K], K a multiple of 128, each 128 columns of a row over what brings their amax (at least 1e-4) to 448."""
    groups = x.float().unflatten(-1, (-1, FP8_BLOCK))
    scales = groups.abs().amax(-1).clamp(min=1e-4) / 448.0
    values = (groups / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2)
    padded = scales.new_zeros(scales.shape[1], -(-x.shape[0] // 4) * 4)
    padded[:, : x.shape[0]] = scales.t()
    return Fp8Rows(values, padded.t()[: x.shape[0]])


def fp8_rows(dtype: torch.dtype) -> Fp8RowKernels:
    """The entries for a stack whose `linear` quantises all rows of that type for FP8 weights, if K is a multiple of 128."""

    def takes(rows: int, row_type: torch.dtype, weight: LinearWeight, by_parts: bool) -> bool:
        del by_parts
        return rows > 0 and row_type == dtype and weight.scale is not None and weight.weight.shape[1] % FP8_BLOCK == 0

    def linear_fp8(x: Fp8Rows, weight: LinearWeight, bias: Tensor | None) -> Tensor:
        wide = x.values.float() * x.scales.repeat_interleave(FP8_BLOCK, dim=1)
        return linear(wide, weight, None if bias is None else bias.float()).to(dtype)

    def add_rms_norm_fp8(x: Tensor | Unsummed, residual: Tensor, weight: Tensor, eps: float) -> tuple[Fp8Rows, Tensor]:
        normed, total = add_rms_norm(x, residual, weight, eps)
        return quantize(normed), total

    return Fp8RowKernels(
        takes=takes,
        linear=linear_fp8,
        rms_norm=lambda x, weight, eps: quantize(rms_norm(x, weight, eps)),
        add_rms_norm=add_rms_norm_fp8,
        silu_and_mul=lambda x: quantize(silu_and_mul(x.float())),
        heads_linear=lambda x, weight: quantize(heads_linear(x, weight).flatten(1)),
        gqa_attention=lambda *arguments: quantize(gqa_attention(*arguments).flatten(1)),
    )


def route(
    x: Tensor, weight: Tensor, correction_bias: Tensor | None, config: RouterConfig, num_tokens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x [T, H] times weight fp32 or bf16 [E, H] in fp32, then `choose`; rows from num_tokens (int32 [1]) on get -1 and 0."""
    ids, weights = choose(F.linear(x.float(), weight.float()), correction_bias, config)
    if num_tokens is None:
        return ids, weights
    padded = (torch.arange(x.shape[0], device=x.device) >= num_tokens).unsqueeze(1)
    return ids.masked_fill(padded, -1), weights.masked_fill(padded, 0.0)


def choose(logits: Tensor, correction_bias: Tensor | None, config: RouterConfig) -> tuple[Tensor, Tensor]:
    """Expert ids int32 [T, k] and weights fp32 [T, k], best choice first; equal choices go to the lower id.

    The bias (DeepSeek-V3's noaux_tc) steers the choice and never the weight. Experts outside the kept groups score -inf, so
    that a kept expert wins whatever its sign. `config.scale` is applied here and nowhere else. The always-on slots come last.
    """
    scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias
    if config.group_score != "none":
        grouped = choice.unflatten(-1, (config.num_groups, -1))
        best = grouped.amax(-1) if config.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, _best(best, config.top_k_groups), True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = _best(choice, config.top_k)
    weights = scores.gather(-1, ids)
    if config.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    always_on = torch.arange(config.always_on, device=ids.device).expand(*ids.shape[:-1], -1)
    ids = torch.cat((ids, logits.shape[-1] + always_on), dim=-1)
    return ids.to(torch.int32), torch.cat((weights * config.scale, torch.ones_like(always_on, dtype=weights.dtype)), dim=-1)


def _best(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest of the last dim, largest first, ties to the lower index (topk promises no order of ties)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def experts_flat(x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
    """Each row of x [T, H] through its slots [T, k] (-1: none), weighted by weights fp32 [T, k] and summed: [T, H].

    Loops over the slots that were hit, so the cost follows the work and not the number of experts.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    flat_slots = slot_ids.flatten()
    order = flat_slots.argsort(stable=True)
    counts = torch.bincount(flat_slots + 1, minlength=experts.w13.shape[0] + 1).tolist()
    tokens = order // max(slot_ids.shape[1], 1)
    pair_weights = weights.flatten()[order]
    start = counts[0]
    for slot, count in enumerate(counts[1:]):
        if count:
            rows = tokens[start : start + count]
            result = _expert(x[rows], slot, experts).float()
            out.index_add_(0, rows, result * pair_weights[start : start + count].unsqueeze(-1))
            start += count
    return out.to(x.dtype)


def experts_masked(x: Tensor, counts: Tensor, experts: ExpertWeights) -> Tensor:
    """x [E, M, H], of which the first counts[e] rows are real, through expert e: [E, M, H]; the other rows are zero here."""
    out = torch.zeros_like(x)
    for slot, count in enumerate(counts.tolist()):
        if count:
            out[slot, :count] = _expert(x[slot, :count], slot, experts)
    return out


def _expert(x: Tensor, slot: int, experts: ExpertWeights) -> Tensor:
    w13 = widen(experts.w13[slot], None if experts.w13_scale is None else experts.w13_scale[slot], x.dtype)
    w2 = widen(experts.w2[slot], None if experts.w2_scale is None else experts.w2_scale[slot], x.dtype)
    return F.linear(silu_and_mul(F.linear(x, w13)), w2)


def write_gqa(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """k and v views [T, Hkv, D] into cache [pages, 2, page_size, Hkv, D] at slot_mapping int64 [T]."""
    page_size = cache.shape[2]
    pages, offsets = slot_mapping // page_size, slot_mapping % page_size
    cache[pages, 0, offsets] = k.to(cache.dtype)
    cache[pages, 1, offsets] = v.to(cache.dtype)


def write_mla(latent: Tensor, k_rope: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """latent view [T, R] and k_rope view [T, P] into cache [pages, page_size, R + P] at slot_mapping int64 [T]."""
    page_size = cache.shape[1]
    cache[slot_mapping // page_size, slot_mapping % page_size] = torch.cat((latent, k_rope), dim=-1).to(cache.dtype)


def gqa_inputs(
    qkv: Tensor,
    norms: HeadNorms | None,
    rotary_table: RotaryTable,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    shape: AttentionShape,
) -> Tensor:
    """qkv [T, (Hq + 2 Hkv) D]: its normed and turned queries [T, Hq, D]; keys, likewise, and values go to the cache."""
    heads = qkv.unflatten(-1, (-1, shape.head_dim))
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    q, k = rotary(q, k, rotary_table.cos_sin, positions, rotary_table.interleaved)
    write_gqa(k, v, cache, slot_mapping)
    return q


def mla_inputs(
    q: Tensor,
    kv: Tensor,
    gain: Tensor,
    eps: float,
    w_uk: Tensor,
    rotary_table: RotaryTable,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor]:
    """q view [T, Hq, N + P] as (q_latent [T, Hq, R], q_rope [T, Hq, P]); kv view [T, R + P], its latent normed, to the cache."""
    nope, rank = w_uk.shape[1:]
    k_rope = kv[:, rank:].unsqueeze(1)
    q_rope, k_turned = rotary(q[..., nope:], k_rope, rotary_table.cos_sin, positions, rotary_table.interleaved)
    write_mla(rms_norm(kv[:, :rank], gain, eps), k_turned.squeeze(1), cache, slot_mapping)
    return heads_linear(q[..., :nope], w_uk), q_rope


def heads_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, Hq, K] times each head's weight view [Hq, K, N]: [T, Hq, N]."""
    return (x.transpose(0, 1) @ weight).transpose(0, 1).contiguous()


@dataclasses.dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one step whose attention is computed together: B rows of L query tokens over at most S cache entries."""

    tokens: Tensor
    """int64 [B, L]: the rows' indices among the step's tokens."""
    entries: Tensor
    """int64 [B, S]: where each entry lies when the cache is seen as rows (a gqa page is its keys' rows, then its values').
    Beyond a row's end its last token stands in, since what lies there may be NaN."""
    visible: Tensor
    """bool [B, L, S]: entries that each query may see."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The same for every layer, so it is made once a step."""

    groups: tuple[RowGroup, ...]


def plan_attention(metadata: AttentionMetadata, shape: AttentionShape) -> AttentionPlan:
    """Single-token rows in groups of like length (within a factor of two), each longer row alone; empty rows nowhere."""
    rows_a_page = metadata.page_size * (2 if shape.kind == "gqa" else 1)
    starts = [0]
    groups: dict[tuple[int, int], list[int]] = {}
    for row, (length, seq_len) in enumerate(zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True)):
        starts.append(starts[-1] + length)
        if length == 1:
            groups.setdefault((-1, seq_len.bit_length()), []).append(row)
        elif length > 1:
            groups[row, 0] = [row]
    return AttentionPlan(tuple(_group(rows, starts, metadata, rows_a_page) for rows in groups.values()))


def _group(rows: list[int], starts: list[int], metadata: AttentionMetadata, rows_a_page: int) -> RowGroup:
    device = metadata.page_table.device
    length = metadata.query_lens_host[rows[0]]
    seq_lens = torch.tensor([metadata.seq_lens_host[row] for row in rows], device=device)
    positions = torch.arange(max(metadata.seq_lens_host[row] for row in rows), device=device)
    queries = torch.arange(length, device=device)
    tokens = torch.tensor([starts[row] for row in rows], device=device).unsqueeze(1) + queries
    query_positions = (seq_lens - length).unsqueeze(1) + queries
    table = metadata.page_table[torch.tensor(rows, device=device)].long()
    readable = torch.minimum(positions, seq_lens.unsqueeze(1) - 1)
    return RowGroup(
        tokens=tokens,
        entries=table.gather(1, readable // metadata.page_size) * rows_a_page + readable % metadata.page_size,
        visible=positions <= query_positions.unsqueeze(-1),
    )


def gqa_attention(q: Tensor, cache: Tensor, metadata: AttentionMetadata, shape: AttentionShape, plan: AttentionPlan) -> Tensor:
    """q [T, Hq, D] over cache [pages, 2, page_size, Hkv, D], causal within the row: [T, Hq, D]."""
    del metadata
    out = torch.zeros_like(q)
    for group in plan.groups:
        keys, values = (
            _gather(cache, group.entries + first, (shape.num_kv_heads, shape.head_dim)) for first in (0, cache.shape[2])
        )
        # Query heads h * G .. h * G + G - 1 share key-value head h.
        queries = q[group.tokens].float().unflatten(2, (shape.num_kv_heads, -1))
        scores = torch.einsum("blhgd,bshd->bhgls", queries, keys) * shape.scale
        result = torch.einsum("bhgls,bshd->blhgd", _probabilities(scores, group), values)
        out[group.tokens] = result.flatten(2, 3).to(q.dtype)
    return out


def mla_attention(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, metadata: AttentionMetadata, shape: AttentionShape, plan: AttentionPlan
) -> Tensor:
    """q_latent [T, Hq, R] and q_rope [T, Hq, P] over cache [pages, page_size, R + P], causal: the mean latent [T, Hq, R]."""
    del metadata
    out = torch.zeros_like(q_latent)
    for group in plan.groups:
        entries = _gather(cache, group.entries, (shape.head_dim + shape.rope_dim,))
        queries = torch.cat((q_latent[group.tokens], q_rope[group.tokens]), dim=-1).float()
        scores = torch.einsum("blhd,bsd->bhls", queries, entries) * shape.scale
        probabilities = _probabilities(scores.unsqueeze(2), group).squeeze(2)
        result = torch.einsum("bhls,bsr->blhr", probabilities, entries[..., : shape.head_dim])
        out[group.tokens] = result.to(q_latent.dtype)
    return out


def _gather(cache: Tensor, entries: Tensor, entry_shape: tuple[int, ...]) -> Tensor:
    """Rows of a contiguous cache as fp32 [B, S, *entry_shape]. index_select copies whole rows, several times faster."""
    rows = cache.view(-1, math.prod(entry_shape))
    return rows.index_select(0, entries.flatten()).view(*entries.shape, *entry_shape).float()


def _probabilities(scores: Tensor, group: RowGroup) -> Tensor:
    """Softmax of scores [B, Hkv, G, L, S] over the visible entries."""
    return scores.masked_fill(~group.visible[:, None, None], float("-inf")).softmax(-1)


def part_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [N, V] -> (their largest fp32 [N, 1], the lowest id that has it int64 [N, 1]): the whole row is one part."""
    values, ids = logits.max(dim=-1, keepdim=True)
    return values.float(), ids


def record_tokens(
    values: Tensor,
    ids: Tensor,
    slots: Tensor,
    last_tokens: Tensor,
    output_index: Tensor,
    broken_rows: Tensor,
    token_counts: Tensor,
) -> Tensor:
    """The id of each row's largest of values [N, S]: int64 [N]. Where that is not finite the row is broken and its token 0.

    Ties go to the first part. Of rows that share a slot each is counted, and `last_tokens` gets the token of any.
    """
    best, part = values.max(dim=-1, keepdim=True)
    broken = ~best.isfinite().squeeze(1)
    tokens = ids.gather(1, part).squeeze(1).masked_fill(broken, 0)
    one = torch.ones_like(slots, dtype=torch.int32)
    last_tokens.index_copy_(0, slots, tokens)
    output_index.index_add_(0, slots, one)
    broken_rows.index_add_(0, slots, broken.to(torch.int32))
    token_counts.view(-1).index_add_(0, torch.add(tokens, slots, alpha=token_counts.shape[1]), one)
    return tokens


def cpu() -> Kernels:
    """The `cpu` stack."""
    return Kernels(
        name="cpu",
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_and_mul=silu_and_mul,
        linear=linear,
        linear_parts=None,
        route=route,
        experts_flat=experts_flat,
        expert_rows=None,
        experts_masked=experts_masked,
        gqa_inputs=gqa_inputs,
        mla_inputs=mla_inputs,
        heads_linear=heads_linear,
        plan_attention=plan_attention,
        gqa_attention=gqa_attention,
        mla_attention=mla_attention,
        part_maxima=part_maxima,
        record_tokens=record_tokens,
        keeps_int4=True,
    )
