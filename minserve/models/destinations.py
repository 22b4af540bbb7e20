"""Where checkpoint tensors go: what a layer declares and the loader obeys. Knows no file formats."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Destination:
    """One checkpoint tensor's place.

    `target` is a view into a parameter and has exactly the checkpoint tensor's shape; the loader copies (and casts) into it.
    Layers together declare every element of every parameter exactly once; the loader proves that.
    """

    name: str
    """Canonical checkpoint name, without wrapper prefixes: `model.layers.3.mlp.experts.7.gate_proj.weight`."""
    target: Tensor
    dequantize_with: str | None = None
    """Name of the companion scale when a quantised tensor is widened at load; None copies the tensor as it is."""
