"""What every layer's constructor needs beside its own sizes; an argument, never a global."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from minserve.kernels.interface import Kernels
from minserve.models.formats import Format, Formats
from minserve.models.layers.dispatcher import Dispatcher
from minserve.models.layers.placement import ExpertPlacement


@dataclasses.dataclass(frozen=True, slots=True)
class BuildContext:
    """How the parameters are stored, where, and which kernels read them."""

    formats: Formats
    kernels: Kernels
    dtype: torch.dtype
    """Of plain parameters and of the computation."""
    device: torch.device
    dispatcher: Dispatcher
    placement: ExpertPlacement | None = None
    """None: each expert in the slot of its own number."""
    placements: Mapping[int, ExpertPlacement] = dataclasses.field(default_factory=dict)
    """By layer, where it differs from `placement`."""
    fuse_shared: bool = False
    """Shared experts become always-on slots of the routed ones."""

    def placement_of(self, prefix: str) -> ExpertPlacement | None:
        """The placement of the experts named `model.layers.N.` and so on."""
        return self.placements.get(int(prefix.split(".")[2]), self.placement)

    def kept_format(self, weight_names: list[str]) -> Format:
        """The format that all of these have and that the kernels read from memory; otherwise plain: they are widened at load."""
        kinds = {self.formats.of(name) for name in weight_names}
        if kinds == {"fp8_block"} and self.kernels.keeps_fp8:
            return "fp8_block"
        return "int4_group" if kinds == {"int4_group"} and self.kernels.keeps_int4 else "plain"
