"""What our Triton kernels do to values in registers in more than one place: gated activation, halves, FP8 with its scale,
turned heads.

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


@triton.jit
def fp8_columns(width: tl.constexpr):
    """0 to width, for addresses of FP8 values. The compiler stores eight of them at once, not sixteen: it would lay out what they
    come from otherwise than for bf16, and sums of it would be added up in another order."""
    return tl.max_contiguous(tl.arange(0, width), 8)


@triton.jit
def rotation(dims, rot: tl.constexpr, interleaved: tl.constexpr):
    """For each dim of a head: its angle's number, the dim it turns with, and the sign of that one's share."""
    half: tl.constexpr = rot // 2
    if interleaved:
        first = dims % 2 == 0
        return dims // 2, tl.where(first, dims + 1, dims - 1), tl.where(first, -1.0, 1.0)
    first = dims < half
    partner = tl.where(first, dims + half, dims - half)
    if half % 8 == 0:
        # Eight neighbours' partners are neighbours too, which the compiler cannot know: else it loads them one by one.
        partner = tl.max_contiguous(tl.multiple_of(partner, 8), 8)
    return dims % half, partner, tl.where(first, -1.0, 1.0)


@triton.jit
def turned(own, other, gain, partner_gain, cos, sin, eps, head_dim: tl.constexpr, normed: tl.constexpr):
    """Heads [M, D], normed and turned; `other` has each dim's partner in its place, `partner_gain` that one's gain."""
    if normed:
        factor = tl.rsqrt(tl.sum(own * own, axis=1) / head_dim + eps)[:, None]
        own = own * factor * gain
        other = other * factor * partner_gain
    return own * cos[None, :] + other * sin[None, :]
