"""The `hopper` stack: FlashInfer attention, DeepGEMM products, Triton for the rest. Imports both vendor libraries."""

from __future__ import annotations

import dataclasses
import functools

import torch

from minserve.kernels import torch_gpu, triton_cache, triton_rows
from minserve.kernels.deep_gemm_products import DeepGemmProducts
from minserve.kernels.expert_choices import ExpertChoices
from minserve.kernels.flashinfer_attention import FlashInferAttention
from minserve.kernels.interface import Fp8RowKernels, Kernels
from minserve.kernels.triton_attention import TritonAttention
from minserve.kernels.triton_exchange import quantize_rows
from minserve.kernels.triton_grouping import fp8_rows


def hopper(
    device: torch.device, name: str = "hopper", choices: ExpertChoices | None = None, *, whole_gpu: bool = True
) -> Kernels:
    """The stack's table for one device; owns FlashInfer's workspaces, so make one a process. bf16 models only gain by it.

    whole_gpu: no other rank has the same device.
    """
    triton = TritonAttention(device)
    attention, products = FlashInferAttention(device, triton, whole_gpu=whole_gpu), DeepGemmProducts(choices)
    return dataclasses.replace(
        torch_gpu.build(name, triton),
        linear=products.linear,
        linear_parts=products.linear_parts,
        experts_flat=products.experts_flat,
        expert_rows=products.expert_rows,
        experts_masked=products.experts_masked,
        quantize_rows=quantize_rows,
        fp8_rows=Fp8RowKernels(
            takes=products.takes_fp8,
            linear=products.linear_fp8,
            rms_norm=triton_rows.rms_norm_fp8,
            add_rms_norm=triton_rows.add_rms_norm_fp8,
            silu_and_mul=functools.partial(fp8_rows, gated=True),
            heads_linear=triton_cache.heads_linear_fp8,
            gqa_attention=attention.gqa_fp8,
            gqa_decode=attention.by_triton(triton.gqa_decode_fp8),
        ),
        plan_attention=attention.plan,
        gqa_attention=attention.gqa,
        gqa_decode=attention.by_triton(triton.gqa_decode),
        mla_attention=attention.mla,
        forget_graphs=attention.forget_graphs,
    )
