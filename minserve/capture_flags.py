"""The immutable flags that tell models and kernels what a CUDA-graph capture allows. Only capture_mode.py makes new ones."""

from __future__ import annotations

import dataclasses
from typing import Literal

GraphKind = Literal["decode", "mixed", "sampling"]


@dataclasses.dataclass(frozen=True, slots=True)
class CaptureFlags:
    """What the code that runs now may do. The default is plain eager execution."""

    capturing: bool = False
    """True in warm-up and record alike, so that both take the same branches."""
    phase: Literal["none", "warm-up", "record"] = "none"
    kind: Literal["none"] | GraphKind = "none"
    padded_batch_size: int = 0
    disable_dispose_tensor: bool = False
    allow_overlap: bool = False
    allow_inplace: bool = True
    allow_host_sync: bool = True
    allow_jit: bool = True


EAGER = CaptureFlags()
