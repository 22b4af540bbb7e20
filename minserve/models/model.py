"""What the runtime may ask of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from minserve.kernels.interface import AttentionShape
from minserve.models.config_types import ModelConfig
from minserve.models.destinations import Destination
from minserve.models.forward_context import ForwardContext


class Model(Protocol):
    """One rank's model. Built with its parameters' memory, then loaded through `destinations`, then `finish_load`."""

    config: ModelConfig
    attention_shape: AttentionShape

    @property
    def num_layers(self) -> int: ...

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """token_ids and positions int64 [T] -> hidden states after the final norm [T, H]; writes the step's cache entries."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> fp32 [N, vocab_size]"""
        ...

    def destinations(self) -> Iterator[Destination]:
        """Every checkpoint tensor that the model needs, each once; together they cover every parameter."""
        ...

    def ignored(self, name: str) -> str | None:
        """Why a checkpoint tensor outside `destinations` may be left out, or None when it may not be there at all."""
        ...

    def finish_load(self) -> None:
        """After the last copy, before the first forward."""
        ...
