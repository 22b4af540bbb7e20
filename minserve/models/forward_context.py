"""What a forward needs beside its input and weights; an argument, never a global."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from minserve.capture_flags import EAGER, CaptureFlags
from minserve.kernels.interface import AttentionMetadata


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardContext:
    """Made by the runtime once a step."""

    attention: AttentionMetadata
    attention_plan: Any
    """What the stack's `plan_attention` returned."""
    kv_cache: list[Tensor]
    """One tensor a layer, [num_pages, *kv_page_shape]."""
    num_tokens: Tensor | None = None
    """int32 [1] on the device: real tokens of a padded step; None when nothing is padded."""
    rows_per_rank: int | None = None
    """Tokens that each rank of an expert-parallel group sends room for, agreed by all; None: as many as there are here."""
    flags: CaptureFlags = EAGER
