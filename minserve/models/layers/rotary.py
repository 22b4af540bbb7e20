"""Rotary position embedding: the table of angles, plain or stretched by YaRN."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minserve.kernels.interface import RotaryTable
from minserve.models.build_context import BuildContext
from minserve.models.model_config import RopeConfig, YarnConfig


class Rotary(nn.Module):
    """The angles by which queries and keys turn. One table serves all layers."""

    cos_sin: Tensor
    """fp32 [max_positions, rotary_dim] = cat(cos, sin)"""

    def __init__(self, config: RopeConfig, max_positions: int, build: BuildContext) -> None:
        super().__init__()
        self.interleaved = config.interleaved
        host = build.device if build.device.type == "meta" else torch.device("cpu")
        positions = torch.arange(max_positions, dtype=torch.float32, device=host)
        angles = positions.unsqueeze(1) * inverse_frequencies(config).to(host)
        scale = config.yarn.attention_factor if config.yarn else 1.0
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
        self.register_buffer("cos_sin", table.to(build.device), persistent=False)

    @property
    def table(self) -> RotaryTable:
        return RotaryTable(self.cos_sin, self.interleaved)


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Radians a position for each pair of dims: fp32 [rotary_dim / 2]."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    plain = 1.0 / config.theta**exponents
    if config.yarn is None:
        return plain
    low, high = _ramp_ends(config.yarn, config.rotary_dim, config.theta)
    ramp = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (1.0 - ramp) + plain / config.yarn.factor * ramp


def _ramp_ends(yarn: YarnConfig, dim: int, theta: float) -> tuple[float, float]:
    """The pairs of dims that turn beta_fast and beta_slow times over the original context."""

    def pair_that_turns(rotations: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high if high != low else high + 0.001
