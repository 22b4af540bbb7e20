"""The one owner of the capture flags: enters them for warm-up and recording, restores what was before. Records nothing itself."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Literal

from minserve.capture_flags import EAGER, CaptureFlags, GraphKind

_current: contextvars.ContextVar[CaptureFlags] = contextvars.ContextVar("capture_flags", default=EAGER)


def current_flags() -> CaptureFlags:
    """The flags of this thread and context; plain eager ones outside any capture."""
    return _current.get()


@contextlib.contextmanager
def capture_mode(
    phase: Literal["warm-up", "record"],
    *,
    padded_batch_size: int,
    kind: GraphKind = "decode",
) -> Iterator[CaptureFlags]:
    """Everything inside runs, or is recorded, under capture rules.

    Warm-up and record differ in `phase` and in `allow_jit` alone, so that kernels take the same branches in both: what compiles
    or allocates does so in warm-up, for which a model runs only as many layers as that takes. Leaving restores the earlier flags,
    nested or not, whatever was raised; other threads never see them.
    """
    flags = CaptureFlags(
        capturing=True,
        phase=phase,
        kind=kind,
        padded_batch_size=padded_batch_size,
        disable_dispose_tensor=True,
        allow_overlap=True,
        allow_inplace=False,
        allow_host_sync=False,
        allow_jit=phase == "warm-up",
    )
    token = _current.set(flags)
    try:
        yield flags
    finally:
        _current.reset(token)
