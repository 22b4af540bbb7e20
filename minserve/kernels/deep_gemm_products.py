"""DeepGEMM's products: FP8 linear layers and the routed experts, masked for decode and contiguous for prefill.

The one place that knows DeepGEMM's names. Compiles on the first call of a shape, so each captured size must be warmed up;
calls never synchronise. Shapes and types that DeepGEMM has no kernel for go to Triton.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import deep_gemm
import torch
from torch import Tensor

from minserve.kernels import triton_experts, triton_few_rows, triton_linear
from minserve.kernels.expert_choices import ExpertChoices
from minserve.kernels.interface import ExpertRows, ExpertWeights, Fp8Rows, LinearWeight, PartialSums
from minserve.kernels.triton_exchange import dequantize_rows, scatter_quantized
from minserve.kernels.triton_grouping import (
    FP8_BLOCK,
    Placement,
    combine,
    fp8_rows,
    move_rows,
    place_contiguous,
    place_masked,
)
from minserve.kernels.triton_masked import masked_rows

BLOCK_ROWS = 128
"""Most rows of one block. A contiguous block belongs to one expert. A masked one is stored whole, over the next expert's rows
too where an expert's room is no multiple of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Calls:
    """The library's operations under one set of names; its versions spell them differently."""

    dense_fp8: Callable[..., None]
    """(x, scales), (weight, scales), out"""
    masked_fp8: Callable[..., None]
    """(x, scales), (weight, scales), out, counts, expected rows"""
    masked_bf16: Callable[..., None]
    """x, weight, out, counts, expected rows"""
    contiguous_fp8: Callable[..., None]
    """(x, scales), (weight, scales), out, expert of each row"""
    contiguous_bf16: Callable[..., None]
    """x, weight, out, expert of each row"""


def calls(library: Any = deep_gemm) -> Calls:
    """The names of the installed version: 0.1.4 says `fp8_fp4` where later ones say `fp8`."""
    masked = ("m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked")
    return Calls(
        dense_fp8=library.fp8_gemm_nt,
        masked_fp8=next(getattr(library, name) for name in masked if hasattr(library, name)),
        masked_bf16=library.m_grouped_bf16_gemm_nt_masked,
        contiguous_fp8=library.m_grouped_fp8_gemm_nt_contiguous,
        contiguous_bf16=library.m_grouped_bf16_gemm_nt_contiguous,
    )


class DeepGemmProducts:
    """Linear and expert entries of the kernel table. Holds no buffer."""

    def __init__(self, choices: ExpertChoices | None = None) -> None:
        self.calls = calls()
        if hasattr(deep_gemm, "set_pdl"):
            # Its kernels start while the one before them drains, and wait for it themselves (launch.py).
            deep_gemm.set_pdl(True)
        self._choices = choices or ExpertChoices("")

    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
        """x [..., K] times weight [N, K] transposed, plus bias [N]. FP8 weights meet FP8 activations, but for a few rows."""
        n_size, k_size = weight.weight.shape
        rows = x.reshape(-1, k_size)
        if not self.takes_fp8(rows.shape[0], x.dtype, weight, by_parts=False):
            return triton_linear.linear(x, weight, bias)
        return self.linear_fp8(fp8_rows(rows), weight, bias).view(*x.shape[:-1], n_size)

    def takes_fp8(self, rows: int, dtype: torch.dtype, weight: LinearWeight, by_parts: bool) -> bool:
        """Whether `linear`, or `linear_parts`, quantises so many rows of that type for the weight, and may be given FP8."""
        n_size, k_size = weight.weight.shape
        if weight.scale is None or dtype != torch.bfloat16 or rows == 0 or n_size % 64 or k_size % FP8_BLOCK:
            return False
        if by_parts and triton_few_rows.parts_of(rows, torch.float8_e4m3fn, weight):
            return True
        return triton_linear.path_of(rows, dtype, weight) == "tiles"

    def linear_parts(self, x: Tensor | Fp8Rows, weight: LinearWeight) -> Tensor | PartialSums:
        """`linear` of x [T, K] without a bias, in parts where that is faster."""
        if isinstance(x, Tensor):
            if not self.takes_fp8(x.shape[0], x.dtype, weight, by_parts=True):
                return triton_linear.linear_parts(x, weight)
            x = fp8_rows(x)
        parts = triton_few_rows.parts_of(x.values.shape[0], x.values.dtype, weight)
        return triton_few_rows.linear_parts(x, weight, parts) if parts else self.linear_fp8(x, weight, None)

    def linear_fp8(self, x: Fp8Rows, weight: LinearWeight, bias: Tensor | None) -> Tensor:
        """x [T, K] times FP8 weight [N, K] transposed, plus bias [N]: bf16 [T, N]."""
        if triton_few_rows.takes_whole(x.values.shape[0], x.values.dtype, weight):
            return triton_few_rows.linear(x, weight, bias)
        out = torch.empty(x.values.shape[0], weight.weight.shape[0], dtype=torch.bfloat16, device=x.values.device)
        self.calls.dense_fp8((x.values, x.scales), (weight.weight, weight.scale), out)
        return out if bias is None else out + bias

    def experts_flat(
        self, x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights, scale: Tensor | None = None
    ) -> Tensor:
        """x [T, H] through its slots int32 [T, k] (-1: none), weighted by weights fp32 [T, k] and summed: [T, H].

        FP8 rows come with their scales fp32 [T, H / 128]; only FP8 experts take them.
        """
        choice = self._choices.of(x.shape[0], triton_experts.shape_of(experts, slot_ids.shape[1]))
        if choice.path in ("masked", "contiguous") and (scale is not None or _fits(x, experts)):
            return self.experts_grouped(x, slot_ids, weights, experts, scale, masked=choice.path == "masked")
        if scale is not None:
            x = dequantize_rows(x, scale)
        return triton_experts.by_choice(choice, x, slot_ids, weights, experts)

    def expert_rows(
        self, x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights, scale: Tensor | None = None
    ) -> Tensor | ExpertRows:
        """The same, or what is left to be summed where Triton computes them."""
        choice = self._choices.of(x.shape[0], triton_experts.shape_of(experts, slot_ids.shape[1]))
        if scale is not None or (choice.path in ("masked", "contiguous") and _fits(x, experts)):
            return self.experts_flat(x, slot_ids, weights, experts, scale)
        return triton_experts.rows_by_choice(choice, x, slot_ids, weights, experts)

    def experts_grouped(
        self,
        x: Tensor,
        slot_ids: Tensor,
        weights: Tensor,
        experts: ExpertWeights,
        scale: Tensor | None = None,
        *,
        masked: bool,
    ) -> Tensor:
        """The same by DeepGEMM, for rows that fit it. Masked buffers have room for E * 128 rows for each 128 tokens."""
        tokens, fp8, num_experts = x.shape[0], experts.w13_scale is not None, experts.w13.shape[0]
        x = x.contiguous()
        if masked:
            place = place_masked(slot_ids, num_experts, -(-tokens // BLOCK_ROWS) * BLOCK_ROWS)
        else:
            place = place_contiguous(slot_ids, num_experts, BLOCK_ROWS)
        expected = max(1, -(-slot_ids.numel() // num_experts))
        groups = 1 if place.row_expert is not None else num_experts
        top_k = slot_ids.shape[1]
        moved: tuple[Tensor, Tensor | None]
        if scale is not None:
            moved = scatter_quantized(x, scale, place.destinations, place.num_rows, top_k=top_k, groups=groups)
        else:
            moved = move_rows(
                x,
                place.num_rows,
                mapping="scatter",
                where=place.destinations,
                items=tokens,
                top_k=top_k,
                groups=groups,
                quantize=fp8,
            )
        hidden = self._product(moved, experts.w13, experts.w13_scale, place, expected)
        moved = move_rows(
            hidden,
            place.num_rows,
            mapping="listed",
            where=place.destinations,
            items=slot_ids.numel(),
            groups=groups,
            gated=True,
            quantize=fp8,
        )
        y = self._product(moved, experts.w2, experts.w2_scale, place, expected)
        return combine(y, place.destinations, weights, direct=False)

    def experts_masked(self, x: Tensor, counts: Tensor, experts: ExpertWeights, scale: Tensor | None = None) -> Tensor:
        """x [E, M, H], of which the first counts[e] rows are real, through expert e: [E, M, H]; other rows are unspecified.

        M should be a multiple of 128: other sizes go to Triton. FP8 rows come with their scales fp32 [E, M, H / 128], rows
        fastest; only FP8 experts take them, at such an M.
        """
        num_experts, capacity, _ = x.shape
        fp8 = experts.w13_scale is not None
        if scale is None and (capacity % BLOCK_ROWS or not _fits(x, experts)):
            return triton_experts.experts_masked(x, counts, experts)
        place = Placement(counts, counts, num_experts * capacity, None)
        expected = min(capacity, 32)
        quantised, scale = masked_rows(x, counts, quantize=True) if fp8 and scale is None else (x, scale)
        hidden = self._product((quantised, scale), experts.w13, experts.w13_scale, place, expected)
        moved = masked_rows(hidden.view(num_experts, capacity, -1), counts, gated=True, quantize=fp8)
        return self._product(moved, experts.w2, experts.w2_scale, place, expected).view(x.shape)

    def _product(
        self, moved: tuple[Tensor, Tensor | None], weight: Tensor, scale: Tensor | None, place: Placement, expected: int
    ) -> Tensor:
        """Rows sorted by expert [rows, K] times each one's expert [E, N, K]: [rows, N]."""
        rows, row_scales = moved
        num_experts, n_size, k_size = weight.shape
        out = torch.empty(place.num_rows, n_size, dtype=torch.bfloat16, device=rows.device)
        if place.row_expert is not None:
            if scale is None or row_scales is None:
                self.calls.contiguous_bf16(rows, weight, out, place.row_expert)
            else:
                self.calls.contiguous_fp8((rows, row_scales[0]), (weight, scale), out, place.row_expert)
            return out
        grouped, grouped_out = rows.view(num_experts, -1, k_size), out.view(num_experts, -1, n_size)
        if scale is None or row_scales is None:
            self.calls.masked_bf16(grouped, weight, grouped_out, place.counts, expected)
        else:
            self.calls.masked_fp8((grouped, row_scales), (weight, scale), grouped_out, place.counts, expected)
        return out


def _fits(x: Tensor, experts: ExpertWeights) -> bool:
    """Weights are plain or FP8, both products have K a multiple of the block (FP8) or of 64, rows in bf16 and something to do."""
    if experts.format == "int4_group":
        return False
    width, inner = experts.w2.shape[1:]
    step = FP8_BLOCK if experts.w13_scale is not None else 64
    return x.dtype == torch.bfloat16 and x.numel() > 0 and width % step == 0 and inner % step == 0
