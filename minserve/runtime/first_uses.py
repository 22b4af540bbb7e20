"""What torch loads when a kind of kernel is first used, loaded while the kernel libraries import. Knows no model and no step.

A GPU's context, the library of matrix products and the kernels of sampling take tenths of a second, nearly all of it outside
of Python.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from minserve.models.sampler import ROWS_AT_ONCE, SamplerState, gather_logprobs, sample

_SWITCH_SECONDS = 0.0005
"""The imports hold the interpreter's lock; with the usual 5 ms each launch would wait that long for it."""


@contextlib.contextmanager
def beside(device: torch.device, dtype: torch.dtype, vocab_size: int) -> Iterator[None]:
    """Around imports: the first uses run in a thread meanwhile, and have ended when this has. Nothing on a CPU."""
    if device.type != "cuda":
        yield
        return

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # a GPU that cannot do this will say so to whoever needs it
            use(device, dtype, vocab_size)

    thread = threading.Thread(target=run, daemon=True)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        sys.setswitchinterval(usual)


@torch.inference_mode()
def use(device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
    """Products and every way to sample, once; draws no random number."""
    for kind in (dtype, torch.float32):
        F.linear(torch.zeros(ROWS_AT_ONCE, 256, dtype=kind, device=device), torch.zeros(256, 256, dtype=kind, device=device))
    state = SamplerState(1, vocab_size, device)
    logits = torch.zeros(ROWS_AT_ONCE, vocab_size, dtype=dtype, device=device)
    slots = torch.ones(ROWS_AT_ONCE, dtype=torch.int64, device=device)
    tokens = sample(logits, slots, state, "general")
    gather_logprobs(logits, tokens, min(20, vocab_size))
