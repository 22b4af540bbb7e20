"""Where checkpoint tensors go: what a layer declares and the loader obeys. Knows no files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from minserve.models.formats import Format, Formats, stored_names


class Destination(NamedTuple):
    """The place of one checkpoint tensor, or of one quantised weight that is widened at load.

    `target` is a view into a parameter and has exactly the tensor's shape, or the weight's; the loader copies (and casts) into
    it. Layers together declare every element of every parameter exactly once; the loader proves that.
    """

    name: str
    """Canonical checkpoint name, without wrapper prefixes: `model.layers.3.mlp.experts.7.gate_proj.weight`."""
    target: Tensor
    widen_from: Format = "plain"
    """How the weight is stored; what the loader multiplies out. plain copies the tensor of this name as it is."""


def weight_destinations(name: str, values: Tensor, scale: Tensor | None, formats: Formats) -> Iterable[Destination]:
    """Of a weight that keeps its stored format in `values` and `scale`, or is plain in `values`, widened if need be."""
    if scale is None:
        return (Destination(name, values, formats.of(name)),)
    return map(Destination, stored_names(name, formats.of(name)), (values, scale))
