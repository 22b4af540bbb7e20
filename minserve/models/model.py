"""What the runtime may ask of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from minserve.kernels.interface import AttentionShape
from minserve.models.forward_context import ForwardContext
from minserve.models.model_config import ModelConfig


class Model(Protocol):
    """One rank's model, loaded."""

    config: ModelConfig
    attention_shape: AttentionShape

    @property
    def num_layers(self) -> int: ...

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """token_ids and positions int64 [T] -> hidden states after the final norm [T, H]; writes the step's cache entries."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> logits [N, vocab_size], in the type of the product: who computes with them casts what it needs."""
        ...
