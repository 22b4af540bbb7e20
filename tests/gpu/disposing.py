"""The fault that took big servers' accuracy: a routed kernel that gives its input's memory away while a graph records it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from minserve.capture_flags import CaptureFlags
from minserve.kernels.interface import Kernels
from minserve.runtime import capture_mode
from minserve.runtime.capture_mode import current_flags


def disposing(kernels: Kernels) -> Kernels:
    """Routed experts that hand their input's memory back while it is recorded, unless the flags forbid it: the side block
    then records a pointer to something else."""
    trash = torch.full((1 << 23,), float("nan"), dtype=torch.bfloat16, device="cuda")

    def experts_flat(x: Tensor, slot_ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        out = kernels.experts_flat(x, slot_ids, weights, experts)
        flags = current_flags()
        if flags.phase == "record" and not flags.disable_dispose_tensor:
            x.set_(trash.untyped_storage(), 0, x.shape, x.stride())
        return out

    return dataclasses.replace(kernels, experts_flat=experts_flat, expert_rows=None)


@contextlib.contextmanager
def without_dispose_flag(*arguments: Any, **options: Any) -> Iterator[CaptureFlags]:
    with capture_mode.capture_mode(*arguments, **options) as flags:
        without = dataclasses.replace(flags, disable_dispose_tensor=False)
        token = capture_mode._current.set(without)
        try:
            yield without
        finally:
            capture_mode._current.reset(token)
