"""What torch loads when a kind of kernel is first used, loaded while libraries import and weights come. Knows no model, no step.

The library of matrix products and torch's own kernels take tenths of a second, nearly all of it outside of Python.
"""

from __future__ import annotations

import contextlib
import sys
import threading

import torch
from torch.nn import functional as F

from minserve.models.sampler import ROWS_AT_ONCE, SamplerState, gather_logprobs, sample

_SWITCH_SECONDS = 0.0005
"""The imports hold the interpreter's lock; with the usual 5 ms each launch would wait that long for it."""


class FirstUses:
    """They run in a thread of their own. Whoever measures time or memory waits for them first."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
        """Nothing on a CPU."""
        if device.type == "cuda":
            self._thread = threading.Thread(target=_run, args=(device, dtype, vocab_size), daemon=True)
            self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


def _run(device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        with contextlib.suppress(RuntimeError):  # a GPU that cannot do this will say so to whoever needs it
            use(device, dtype, vocab_size)
    finally:
        sys.setswitchinterval(usual)


@torch.inference_mode()
def use(device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
    """Products and every way to sample, then what loads, plans and checks compute with, once; draws no random number."""
    for kind, rows, columns in ((dtype, ROWS_AT_ONCE, 256), (torch.float32, ROWS_AT_ONCE, 256), (dtype, 128, vocab_size)):
        F.linear(torch.zeros(rows, 256, dtype=kind, device=device), torch.zeros(columns, 256, dtype=kind, device=device))
    state = SamplerState(1, vocab_size, device)
    logits = torch.zeros(ROWS_AT_ONCE, vocab_size, dtype=dtype, device=device)
    slots = torch.ones(ROWS_AT_ONCE, dtype=torch.int64, device=device)
    tokens = sample(logits, slots, state, "general")
    gather_logprobs(logits, tokens, min(20, vocab_size))
    few, ids = torch.zeros(2, 256, device=device), torch.arange(4, device=device)
    for order in (2, torch.inf):
        torch.linalg.vector_norm(few, order, dim=-1)
    torch.equal(few @ few.T, F.silu(few).mean(-1, keepdim=True))
    torch.logical_and(ids // 2 > 0, ids % 2 > 0)
    torch.pow(0.5, ids)
    torch.cat((few, few))
