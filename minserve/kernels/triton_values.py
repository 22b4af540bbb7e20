"""What our Triton kernels do to values in registers in more than one place: gated activation, halves, FP8 with its scale.

Knows no layout.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_and_gate(gate, up):
    """silu(gate) * up"""
    return gate * tl.sigmoid(gate) * up


@triton.jit
def as_half(values):
    """fp16, held at its largest numbers; NaN stays NaN."""
    return tl.clamp(values.to(tl.float32), -65504.0, 65504.0, tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def fp8_scale(values, fp8_max: tl.constexpr):
    """What to divide each row of values by to fit FP8: its amax, at least 1e-4, over fp8_max."""
    return tl.maximum(tl.max(tl.abs(values), axis=1), 1e-4) / fp8_max


@triton.jit
def fp8_groups(values, fp8_max: tl.constexpr, block: tl.constexpr):
    """Rows of values [M, N] over the FP8 scale of each `block` columns, and those scales [M, N / block]."""
    rows: tl.constexpr = values.shape[0]
    groups: tl.constexpr = values.shape[1] // block
    grouped = tl.reshape(values, [rows * groups, block])
    scale = fp8_scale(grouped, fp8_max)
    return tl.reshape(grouped / scale[:, None], [rows, groups * block]), tl.reshape(scale, [rows, groups])
