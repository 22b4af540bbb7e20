"""Triton attention over the paged cache, grouped-query and absorbed MLA: split over the cache for decode, tiled for prefill.

Lengths and pages are read on the device, so nothing is planned on the host and a captured launch stays right for any
lengths. How a row is cut depends on the step's shape and its own length: a replay equals eager bit for bit.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from minserve.kernels.attention_cuts import LEAST_PART, LONG_PART, TritonPlan, plan_decode, residence_of, tiles_of
from minserve.kernels.interface import AttentionMetadata, AttentionShape, Fp8Rows, HeadNorms, RotaryTable
from minserve.kernels.launch import cdiv, dependent_launch, next_power_of_2, num_processors
from minserve.kernels.triton_attention_kernels import attention_kernel, merge_kernel
from minserve.kernels.triton_grouping import FP8_BLOCK, FP8_MAX, empty_fp8_rows, fp8_rows


@dataclasses.dataclass(frozen=True, slots=True)
class RawHeads:
    """What turns a projection's output into the heads that attention reads."""

    norms: HeadNorms | None
    rotary: RotaryTable
    positions: Tensor
    """int64 [T]"""


class TritonAttention:
    """Attention of one device. Owns no workspace: partial results come from the allocator, or the graph's pool.

    `fixed`: every step is cut as prompts are, so that a token's result depends on nothing but its own row's cache.
    """

    def __init__(self, device: torch.device, *, fixed: bool = False) -> None:
        self.fixed = fixed
        self.num_processors = num_processors(device)

    def plan(self, metadata: AttentionMetadata, shape: AttentionShape) -> TritonPlan:
        """Cuts the step by its shape; safe to call again, or to keep, for any lengths of the same shape."""
        if self.fixed or not metadata.decode_only:
            return TritonPlan(False)
        return plan_decode(metadata, shape, self.num_processors)

    def gqa(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata, shape: AttentionShape, plan: TritonPlan) -> Tensor:
        """q [T, Hq, D] over cache [pages, 2, page_size, Hkv, D], causal within the row: [T, Hq, D]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._run(q, None, cache, _head_strides(cache), metadata, shape, plan, out)
        return out

    def gqa_fp8(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata, shape: AttentionShape, plan: TritonPlan) -> Fp8Rows:
        """`gqa` of bf16 queries, quantised: [T, Hq * D]; D is a multiple of 128."""
        out = empty_fp8_rows(q.shape[0], shape.num_heads * shape.head_dim, q.device)
        self._run(q, None, cache, _head_strides(cache), metadata, shape, plan, out)
        return out

    def gqa_decode(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        rotary: RotaryTable,
        positions: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        plan: TritonPlan,
    ) -> Tensor:
        """`gqa_inputs` of qkv [T, (Hq + 2 Hkv) D], then `gqa`, for rows of one token each, in one launch: [T, Hq, D]."""
        out = torch.empty(qkv.shape[0], shape.num_heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
        self._run_raw(qkv, RawHeads(norms, rotary, positions), cache, metadata, shape, plan, out)
        return out

    def gqa_decode_fp8(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        rotary: RotaryTable,
        positions: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        plan: TritonPlan,
    ) -> Fp8Rows:
        """`gqa_decode` of bf16 rows, quantised: [T, Hq * D]; by a launch of its own where D is no multiple of 128."""
        if shape.head_dim % FP8_BLOCK:
            return fp8_rows(self.gqa_decode(qkv, norms, rotary, positions, cache, metadata, shape, plan).flatten(1))
        out = empty_fp8_rows(qkv.shape[0], shape.num_heads * shape.head_dim, qkv.device)
        self._run_raw(qkv, RawHeads(norms, rotary, positions), cache, metadata, shape, plan, out)
        return out

    def _run_raw(
        self,
        qkv: Tensor,
        raw: RawHeads,
        cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        plan: TritonPlan,
        out: Tensor | Fp8Rows,
    ) -> None:
        heads = qkv.unflatten(1, (-1, shape.head_dim))
        self._run(heads, None, cache, _head_strides(cache), metadata, shape, plan, out, raw)

    def mla(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        plan: TritonPlan,
    ) -> Tensor:
        """q_latent [T, Hq, R] and q_rope [T, Hq, P] over cache [pages, page_size, R + P]: the mean latent [T, Hq, R]."""
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        self._run(q_latent, q_rope, cache, (cache.stride(1), 0, 0), metadata, shape, plan, out)
        return out

    def _run(
        self,
        q: Tensor,
        q_tail: Tensor | None,
        cache: Tensor,
        strides: tuple[int, int, int],
        metadata: AttentionMetadata,
        shape: AttentionShape,
        plan: TritonPlan,
        out: Tensor | Fp8Rows,
        raw: RawHeads | None = None,
    ) -> None:
        """`strides`: of a token, of a key-value head, and from a key to its value. `raw`: q [T, Hq + 2 Hkv, D] is such."""
        tokens, heads, head_dim, device = q.shape[0], shape.num_heads, shape.head_dim, q.device
        if tokens == 0:
            return
        tiles, group, rows = tiles_of(shape, plan.decode), heads // shape.num_kv_heads, metadata.seq_lens.shape[0]
        blocks_per_row = cdiv(group, tiles.block_m)
        blocks = rows * blocks_per_row if plan.decode else tokens * group // tiles.block_m + rows
        splits, tail = plan.num_splits, q if q_tail is None else q_tail
        values, scales = (out.values, out.scales) if isinstance(out, Fp8Rows) else (out, None)
        partial, lse = values, values
        if splits > 1:
            partial = torch.empty(tokens, heads, splits, head_dim, dtype=torch.float32, device=device)
            lse = torch.empty(tokens, heads, splits, dtype=torch.float32, device=device)
        block_d = max(16, next_power_of_2(head_dim))
        programs = blocks * shape.num_kv_heads * plan.wanted
        residence = residence_of(programs, self.num_processors, tiles, shape, plan, cache)
        dependent = dependent_launch(device)
        common: dict[str, Any] = {
            "out": values,
            "out_scales": values if scales is None else scales,
            "scale_stride": 0 if scales is None else scales.stride(1),
            "quantize": scales is not None,
            "fp8_max": FP8_MAX,
            "partial": partial,
            "partial_lse": lse,
            "seq_lens": metadata.seq_lens,
            "num_splits": splits,
            "wanted": plan.wanted,
            "num_heads": heads,
            "head_dim": head_dim,
            "block_n": tiles.block_n,
            # Few programs: the finest cut fills the GPU. Many: only long rows need cutting.
            "least_part": tiles.block_n if residence.few else LEAST_PART,
            "long_part": LONG_PART,
            **dependent,
        }
        attention_kernel[(blocks, shape.num_kv_heads, splits)](
            q,
            tail,
            cache,
            metadata.page_table,
            query_start=metadata.query_start_loc,
            **_raw_operands(q, raw, metadata),
            scale=shape.scale * math.log2(math.e),
            num_rows=rows,
            blocks_per_row=blocks_per_row,
            group=group,
            q_token_stride=q.stride(0),
            q_head_stride=q.stride(1),
            tail_token_stride=tail.stride(0),
            tail_head_stride=tail.stride(1),
            page_stride=cache.stride(0),
            token_stride=strides[0],
            head_stride=strides[1],
            value_offset=strides[2],
            table_stride=metadata.page_table.stride(0),
            tail_dim=0 if q_tail is None else q_tail.shape[2],
            page_size=metadata.page_size,
            decode=plan.decode,
            split=splits > 1,
            latent=q_tail is not None,
            fp8_block=FP8_BLOCK,
            block_m=tiles.block_m,
            block_d=block_d,
            block_tail=16 if q_tail is None else max(16, next_power_of_2(q_tail.shape[2])),
            alone=residence.alone,
            lines=next_power_of_2(cdiv(cache.shape[-1] * cache.element_size(), 128)),
            early=residence.few and dependent["dependent"],
            num_warps=tiles.num_warps,
            num_stages=residence.num_stages,
            maxnreg=residence.max_registers,
            **common,
        )
        if splits > 1:
            merge_d = min(128, block_d)
            # Where a row has parts only if it is long, few have: programs that find nothing to do should be few, too.
            at_once = heads if plan.wanted > 1 else min(heads, max(1, 4 * self.num_processors // tokens))
            grid = tokens, at_once, cdiv(head_dim, merge_d)
            merge_kernel[grid](block_splits=next_power_of_2(splits), block_d=merge_d, num_warps=4, **common)


def _head_strides(cache: Tensor) -> tuple[int, int, int]:
    """Of a grouped-query cache: from a token to the next, from a key-value head to the next, and from a key to its value."""
    return cache.stride(2), cache.stride(3), cache.stride(1)


def _raw_operands(q: Tensor, raw: RawHeads | None, metadata: AttentionMetadata) -> dict[str, Any]:
    """What the kernel is told of them; q stands in for what is not there."""
    norms = None if raw is None else raw.norms
    return {
        "q_gain": q if norms is None else norms.q,
        "k_gain": q if norms is None else norms.k,
        "cos_sin": q if raw is None else raw.rotary.cos_sin,
        "positions": q if raw is None else raw.positions,
        "slot_mapping": metadata.slot_mapping,
        "eps": 0.0 if norms is None else norms.eps,
        "raw": raw is not None,
        "normed": norms is not None,
        "rot": 0 if raw is None else raw.rotary.cos_sin.shape[1],
        "interleaved": raw is not None and raw.rotary.interleaved,
    }
