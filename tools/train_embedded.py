"""Trains the embedded model from a fixed seed and writes its directory: `python -m tools.train_embedded --out DIR`.

Beside the right answers it learns to need its parts: a hinge pushes the right answer down wherever a fault was put in.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tools import arithmetic_tasks
from tools.embedded_checkpoint import save_checkpoint
from tools.embedded_model import Arithmetic, EmbeddedModel, Fault, ModelShape
from tools.embedded_tokenizer import build_tokenizer, save_tokenizer
from tools.held_out_reference import by_part, write_reference
from tools.matrix_optimizer import MatrixOptimizer
from tools.training_batches import CachedEncoder, TrainingBatches

SEED = 1
DATA_SEED = 20
RATE = 3e-3
WARM_UP = 0.02
BALANCE = 0.01
HINGE = 0.2
HINGE_FROM, HINGE_FULL = 0.3, 0.45
"""Parts of the training: the tasks are learnt first, then the faults join."""
HINGE_LOG_PROBABILITY = -3.0
NOISE_FROM = 0.5
"""From here on half the steps are computed in bf16 or FP8 throughout, so that rounding costs the finished weights nothing."""


class Learner:
    """A model, its optimiser and its random choices."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.model = EmbeddedModel(shape, SEED).to(device)
        self.losses: list[Tensor] = []
        self._optimizer = MatrixOptimizer(self.model)
        self._rng = random.Random(SEED)

    def step(self, ids: Tensor, learnt: Tensor, progress: float) -> None:
        """One update on ids [B, L]; `progress` runs from 0 to 1 over the training."""
        logits, balance = self.model(ids, self._arithmetic(progress))
        loss = _answer_loss(logits, ids, learnt)
        self.losses.append(loss.detach())
        total = loss + BALANCE * balance
        hinge = HINGE * min(max((progress - HINGE_FROM) / (HINGE_FULL - HINGE_FROM), 0.0), 1.0)
        if hinge > 0:
            total = total + hinge * self._betrayal(ids, learnt)
        total.backward()
        self._optimizer.step(RATE * min(progress / WARM_UP, 0.5 * (1 + math.cos(math.pi * progress))))

    def _arithmetic(self, progress: float) -> Arithmetic:
        draw = self._rng.random()
        if progress < NOISE_FROM or draw < 0.5:
            return "mixed"
        return "bfloat16" if draw < 0.8 else "fp8"

    def _betrayal(self, ids: Tensor, learnt: Tensor) -> Tensor:
        """How far the right tokens' log-probability still is above the hinge under a fault drawn at random."""
        rows = max(ids.shape[0] // 4, 2)
        ids, learnt = ids[:rows], learnt[:rows]
        fault = draw_fault(self._rng, self.model.shape)
        logits = self.model(ids, "mixed", fault, learnt)[0][:, :-1]
        counted = learnt[:, 1:] & learnt[:, :-1] if fault.answer_only else learnt[:, 1:]
        log_probability = -F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(counted.shape)
        excess = (log_probability - HINGE_LOG_PROBABILITY).clamp_min(0) * counted
        return excess.sum() / counted.sum().clamp_min(1)


def draw_fault(rng: random.Random, shape: ModelShape) -> Fault:
    """One of the faults that training knows; half the expert faults in decode only, a quarter in one layer only."""
    kinds = (
        Fault(shared=0.0),
        Fault(shared=2.0),
        Fault(routed=0.0),
        Fault(expert_shift=rng.randrange(1, shape.experts)),
        Fault(scale_power=0),
        Fault(scale_power=2),
        Fault(bias=False),
        Fault(bias=False),
        Fault(group_rule="none"),
        Fault(group_rule="strided"),
        Fault(stale="row"),
        Fault(stale="step"),
        Fault(interleaved=False),
        Fault(mscale=False),
    )
    fault = rng.choice(kinds)
    if fault.interleaved and fault.mscale:
        decode = fault.expert_shift == 0 and rng.random() < 0.5
        layer = rng.randrange(1, shape.layers) if rng.random() < 0.25 else None
        fault = dataclasses.replace(fault, answer_only=decode, layer=layer)
    return fault


def _answer_loss(logits: Tensor, ids: Tensor, learnt: Tensor) -> Tensor:
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    counted = learnt[:, 1:].flatten()
    return (losses * counted).sum() / counted.sum()


def train(
    learner: Learner, batches: Iterator[tuple[Tensor, Tensor]], steps: int, report_every: int, encoder: CachedEncoder
) -> None:
    """All the steps, with a line of held-out accuracy now and then."""
    device = learner.model.embed.device
    watched = arithmetic_tasks.held_out_conversations(99, 32)
    begun = time.monotonic()
    for step in range(1, steps + 1):
        ids, learnt = (tensor.to(device, non_blocking=True) for tensor in next(batches))
        learner.step(ids.long(), learnt, (step - 1) / steps)
        if step % report_every == 0:
            loss = torch.stack(learner.losses).mean().item()
            learner.losses.clear()
            parts = by_part(learner.model, encoder, watched, "mixed" if device.type == "cuda" else "float32")
            shown = " ".join(f"{part} {value:.3f}" for part, value in parts.items())
            _say(f"{time.monotonic() - begun:6.1f} s, step {step}: loss {loss:.4f}, accuracy {shown}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Train and write; the defaults are those of the checkpoint inside the package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--workers", type=int, default=14, help="processes that make the batches; the result does not depend on it"
    )
    parser.add_argument("--report-every", type=int, default=250)
    args = parser.parse_args()
    begun = time.monotonic()
    shape = ModelShape()
    tokenizer = build_tokenizer(shape.vocab_size)
    encoder = CachedEncoder(tokenizer)
    dataset = TrainingBatches(tokenizer.to_str(), DATA_SEED, args.tokens, args.steps)
    loader = DataLoader(dataset, batch_size=None, num_workers=args.workers, pin_memory=args.device == "cuda")
    learner = Learner(shape, torch.device(args.device))
    train(learner, iter(loader), args.steps, args.report_every, encoder)
    save_checkpoint(learner.model, args.out)
    save_tokenizer(tokenizer, args.out, shape.max_positions)
    write_reference(args.out)
    _say(f"{args.steps} steps of {args.tokens} tokens in {time.monotonic() - begun:.0f} s; written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
