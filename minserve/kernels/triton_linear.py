"""Linear layers of the torch-gpu stack: plain weights by torch, FP8 block-scaled weights by a Triton kernel.

FP8 weights meet unquantised activations, as in triton_experts.py.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from minserve.kernels.interface import LinearWeight
from minserve.kernels.triton_grouping import FP8_BLOCK


@triton.jit
def _fp8_linear_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    m_size,
    n_size,
    k_size,
    x_stride,
    scale_columns,
    m_blocks,
    biased: tl.constexpr,
    whole_k: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    program = tl.program_id(0)
    m = program % m_blocks * block_m + tl.arange(0, block_m)
    n = program // m_blocks * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    in_m, in_n = m < m_size, n < n_size
    inputs = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
    weights = weight + n[:, None].to(tl.int64) * k_size + k[None, :]
    scales = scale + n // 128 * scale_columns
    acc = tl.zeros([block_m, block_n], tl.float32)
    for start in range(0, k_size, block_k):
        columns = start + k < k_size
        if whole_k:
            columns = k < block_k
        a = tl.load(inputs + start, mask=in_m[:, None] & columns[None, :], other=0.0)
        w = tl.load(weights + start, mask=in_n[:, None] & columns[None, :], other=0.0)
        row_scale = tl.load(scales + start // 128, mask=in_n, other=0.0)
        acc += tl.dot(a, tl.trans(w.to(a.dtype)), input_precision="ieee") * row_scale[None, :]
    if biased:
        acc += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    flat = m[:, None].to(tl.int64) * n_size + n[None, :]
    tl.store(out + flat, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]."""
    if weight.scale is None:
        return F.linear(x, weight.weight, bias)
    n_size, k_size = weight.weight.shape
    out = torch.empty(*x.shape[:-1], n_size, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, k_size)
    m_size = rows.shape[0]
    if m_size == 0:
        return out
    block_m = 16 if m_size <= 16 else 32 if m_size <= 32 else 64 if m_size <= 256 else 128
    block_n = (16 if n_size <= 4096 else 32) if block_m <= 32 else 64
    m_blocks = triton.cdiv(m_size, block_m)
    _fp8_linear_kernel[(m_blocks * triton.cdiv(n_size, block_n),)](
        rows,
        weight.weight,
        weight.scale,
        rows if bias is None else bias,
        out,
        m_size,
        n_size,
        k_size,
        rows.stride(0),
        weight.scale.stride(0),
        m_blocks,
        biased=bias is not None,
        whole_k=k_size % FP8_BLOCK == 0,
        block_m=block_m,
        block_n=block_n,
        block_k=FP8_BLOCK,
        num_warps=8 if block_m == 128 else 4,
        num_stages=4 if block_m <= 32 else 3,
    )
    return out
