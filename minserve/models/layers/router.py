"""Chooses each token's experts. Knows logits and masks; how logits become a choice is the `route` kernel's business."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minserve.models.build_context import BuildContext
from minserve.models.destinations import Destination
from minserve.models.layers.linear import parameter
from minserve.models.model_config import MoeConfig


class Router(nn.Module):
    """[T, H] -> (expert ids int32 [T, k], weights fp32 [T, k]). All in fp32: a bias rounded to bf16 changes choices."""

    def __init__(self, prefix: str, hidden_size: int, config: MoeConfig, build: BuildContext) -> None:
        super().__init__()
        self.prefix = prefix
        self.config = config.router
        self.kernels = build.kernels
        self.dtype = build.dtype
        self.weight = parameter((config.num_experts, hidden_size), torch.float32, build.device)
        self.correction_bias = parameter((config.num_experts,), torch.float32, build.device) if config.correction_bias else None

    def finish_load(self) -> None:
        """A gate that was stored in bf16, as most published ones are, is read as such by rows of that type: the same numbers."""
        if self.dtype != torch.bfloat16 or self.weight.is_meta:
            return
        narrow = self.weight.to(torch.bfloat16)
        if torch.equal(narrow.float(), self.weight):
            self.weight = nn.Parameter(narrow, requires_grad=False)

    def forward(self, hidden: Tensor, num_tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows at and beyond num_tokens (int32 [1] on the device; None: all rows are real) get id -1 and weight 0."""
        return self.kernels.route(hidden, self.weight, self.correction_bias, self.config, num_tokens)

    def destinations(self) -> Iterator[Destination]:
        yield Destination(f"{self.prefix}.weight", self.weight)
        if self.correction_bias is not None:
            yield Destination(f"{self.prefix}.e_score_correction_bias", self.correction_bias)
