"""How a checkpoint stores each weight. Knows names and formats, no bytes: weights.py decides, layers ask."""

from __future__ import annotations

from typing import Literal, Protocol

WeightFormat = Literal["plain", "fp8_block"]
"""plain: values as they are; fp8_block: float8_e4m3fn with one `<name>_scale_inv` value per 128 x 128 block."""


class Formats(Protocol):
    """Decided per module from the tensors present, since configs tell it in too many ways."""

    def of(self, weight_name: str) -> WeightFormat:
        """The format of one checkpoint weight, by its canonical name (`model.layers.0.self_attn.o_proj.weight`)."""
        ...


class PlainFormats:
    """Nothing is quantised: bf16, fp16 and fp32 checkpoints, and weights made on the spot."""

    def of(self, weight_name: str) -> WeightFormat:  # noqa: ARG002 the protocol's signature
        return "plain"
