"""The `torch-gpu` and `deterministic` stacks: torch's own products and our Triton kernels, no vendor library."""

from __future__ import annotations

import dataclasses
import functools

import torch

from minserve.kernels import (
    triton_attention,
    triton_cache,
    triton_experts,
    triton_linear,
    triton_router,
    triton_rows,
    triton_sampling,
)
from minserve.kernels.expert_choices import ExpertChoices
from minserve.kernels.expert_tiles import FIXED_SIZES
from minserve.kernels.interface import Kernels


def torch_gpu(device: torch.device, choices: ExpertChoices | None = None) -> Kernels:
    """The stack's table for one device. Nothing in it plans on the host, so one plan serves every step of a shape."""
    table = build("torch-gpu", triton_attention.TritonAttention(device))
    experts = triton_experts.TritonExperts(choices or ExpertChoices(""))
    return dataclasses.replace(table, experts_flat=experts.flat, expert_rows=experts.rows)


def deterministic(device: torch.device) -> Kernels:
    """The stack in which a token's result depends on nothing but its own request: nothing is cut by the size of the step."""
    table = build("deterministic", triton_attention.TritonAttention(device, fixed=True))
    return dataclasses.replace(
        table,
        linear=triton_linear.fixed_linear,
        linear_parts=None,
        route=functools.partial(triton_router.route, fixed=True),
        experts_flat=functools.partial(triton_experts.experts_tiled, sizes=FIXED_SIZES),
        gqa_inputs=functools.partial(triton_cache.gqa_inputs, fixed=True),
        gqa_decode=None,
        mla_inputs=functools.partial(triton_cache.mla_inputs, block_m=64),
        heads_linear=functools.partial(triton_cache.heads_linear, block_m=64),
    )


def build(name: str, attention: triton_attention.TritonAttention) -> Kernels:
    """The table around a given attention."""
    return Kernels(
        name=name,
        rms_norm=triton_rows.rms_norm,
        add_rms_norm=triton_rows.add_rms_norm,
        silu_and_mul=triton_rows.silu_and_mul,
        linear=triton_linear.linear,
        linear_parts=triton_linear.linear_parts,
        route=triton_router.route,
        experts_flat=triton_experts.experts_tiled,
        expert_rows=None,
        experts_masked=triton_experts.experts_masked,
        gqa_inputs=triton_cache.gqa_inputs,
        mla_inputs=triton_cache.mla_inputs,
        heads_linear=triton_cache.heads_linear,
        plan_attention=attention.plan,
        gqa_attention=attention.gqa,
        mla_attention=attention.mla,
        gqa_decode=attention.gqa_decode,
        part_maxima=triton_sampling.part_maxima,
        record_tokens=triton_sampling.record_tokens,
        keeps_fp8=True,
        keeps_int4=True,
    )
