"""What every layer's constructor needs beside its own sizes; an argument, never a global."""

from __future__ import annotations

import dataclasses

import torch

from minserve.kernels.interface import Kernels
from minserve.models.formats import Format, Formats
from minserve.models.layers.dispatcher import Dispatcher, ExpertPlacement


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
    fuse_shared: bool = False
    """Shared experts become always-on slots of the routed ones."""

    def kept_format(self, weight_names: list[str]) -> Format:
        """The format that all of these have and that the kernels read from memory; otherwise plain: they are widened at load."""
        kinds = {self.formats.of(name) for name in weight_names}
        if kinds == {"fp8_block"} and self.kernels.keeps_fp8:
            return "fp8_block"
        return "int4_group" if kinds == {"int4_group"} and self.kernels.keeps_int4 else "plain"
