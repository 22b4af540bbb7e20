"""When two models' logits count as the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tiny_checkpoints import TinyCheckpoint

TOLERANCE = 1e-4
"""Of a position's largest logit."""


def prompt(length: int, seed: int, vocab_size: int = 256) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


def reference_logits(checkpoint: TinyCheckpoint, tokens: list[int]) -> Tensor:
    """transformers' logits fp32 [tokens, vocab]."""
    with torch.inference_mode():
        return checkpoint.reference(torch.tensor([tokens]), use_cache=False).logits[0]


def assert_same_logits(got: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    """Each position's error is within the tolerance of its largest logit, and its best token is the same where the best two
    differ by more than that."""
    assert got.shape == wanted.shape
    largest = wanted.abs().amax(-1)
    error = (got - wanted).abs().amax(-1) / largest
    assert bool((error <= tolerance).all()), f"relative error {float(error.max()):.2e} at position {int(error.argmax())}"
    best = wanted.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > tolerance * largest
    assert torch.equal(got.argmax(-1)[clear], wanted.argmax(-1)[clear])
