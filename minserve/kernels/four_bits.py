"""Weights of four bits, widened with plain torch. Knows the two formats' bit layouts, no kernel and no checkpoint.

Both pack along the last dimension, the low nibble first.
"""

from __future__ import annotations

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def widen_int4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """int32 [..., N, K/8], values stored with 8 added, and scale [..., N, K/32] as `dtype` [..., N, K]."""
    values = _nibbles(packed.view(torch.uint8)).to(torch.float32) - 8.0
    return _scaled(values, scale.to(torch.float32)).to(dtype)


def widen_nvfp4(packed: Tensor, scale: Tensor, scale_2: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., N, K/2], float8_e4m3fn scale [..., N, K/16] and one fp32 scale_2 as `dtype` [..., N, K]."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device=packed.device)
    values = table[_nibbles(packed).long()]
    return _scaled(values, scale.to(torch.float32) * scale_2.reshape(())).to(dtype)


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., M] as uint8 [..., 2M], values 0 to 15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Each scale times its share of the last dimension."""
    grouped: Tensor = values.unflatten(-1, (scale.shape[-1], -1))
    return (grouped * scale.unsqueeze(-1)).flatten(-2)
