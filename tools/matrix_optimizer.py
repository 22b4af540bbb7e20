"""The optimiser of the embedded model's training: AdamW, with orthogonalised momentum for the matrices inside the layers.

The second is Muon (Jordan et al. 2024), its steps scaled to AdamW's size as in Moonlight's report (arXiv 2502.16982).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
DECAY = 0.05


class MatrixOptimizer:
    """Gradients are clipped to norm 1, applied and dropped by `step`."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        inner = [name for name, value in named.items() if value.ndim > 1 and "blocks" in name and "router" not in name]
        self._all = list(named.values())
        by_shape: dict[tuple[int, int], list[Tensor]] = {}
        for name in inner:
            by_shape.setdefault((named[name].shape[-2], named[name].shape[-1]), []).append(named[name])
        self._groups = list(by_shape.values())
        self._momenta = [[torch.zeros_like(value) for value in group] for group in self._groups]
        rest = [value for name, value in named.items() if name not in inner]
        self._adam = torch.optim.AdamW(
            [
                {"params": [value for value in rest if value.ndim > 1], "weight_decay": DECAY},
                {"params": [value for value in rest if value.ndim == 1], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.98),
            fused=True,
        )

    @torch.no_grad()
    def step(self, rate: float) -> None:
        nn.utils.clip_grad_norm_(self._all, 1.0, foreach=True)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        for values, momenta in zip(self._groups, self._momenta, strict=True):
            gradients = [value.grad for value in values if value.grad is not None]
            torch._foreach_mul_(momenta, MOMENTUM)
            torch._foreach_add_(momenta, gradients)
            ahead = torch._foreach_add(gradients, momenta, alpha=MOMENTUM)
            rows, columns = values[0].shape[-2:]
            flat = orthogonalised(torch.cat([one.reshape(-1, rows, columns) for one in ahead]))
            updates = flat.split([value.numel() // (rows * columns) for value in values])
            torch._foreach_mul_(values, 1 - rate * DECAY)
            sized = [update.view_as(value) for update, value in zip(updates, values, strict=True)]
            torch._foreach_add_(values, sized, alpha=-rate * 0.2 * math.sqrt(max(rows, columns)))
        for value in self._all:
            value.grad = None


def orthogonalised(matrices: Tensor) -> Tensor:
    """[N, R, C] -> about U V^T of each, by five Newton-Schulz steps in bf16."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    result: Tensor = x.mT if tall else x
    return result.float()
