"""Large scratch buffers that their maker may free before Python would. Never touches a tensor that it did not allocate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minserve.capture_flags import CaptureFlags


class OwnedBuffer:
    """A tensor made here, so that freeing it can hurt nobody's caller. There is no way to wrap a foreign tensor."""

    __slots__ = ("tensor",)

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor: Tensor = torch.empty(tuple(shape), dtype=dtype, device=device)


def dispose_tensor(buffer: OwnedBuffer, flags: CaptureFlags) -> None:
    """Frees the buffer's memory now, views of it included.

    Does nothing while capturing: a graph records pointers, and whatever is launched later would read freed memory at every
    replay. Raises TypeError for anything but an OwnedBuffer.
    """
    if not isinstance(buffer, OwnedBuffer):
        raise TypeError(f"only an OwnedBuffer can be disposed, not {type(buffer).__name__}: other tensors belong to their makers")
    if flags.disable_dispose_tensor:
        return
    buffer.tensor.untyped_storage().resize_(0)
