"""What every layer's constructor needs beside its own sizes; an argument, never a global."""

from __future__ import annotations

import dataclasses

import torch

from minserve.kernels.interface import Kernels
from minserve.models.formats import Formats
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

    def keeps_fp8(self, weight_names: list[str]) -> bool:
        """True when all of these stay FP8 in memory; otherwise the FP8 ones among them are widened at load."""
        return self.kernels.keeps_fp8 and all(self.formats.of(name) == "fp8_block" for name in weight_names)
