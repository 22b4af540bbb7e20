"""Token ids to vectors, and vectors to logits, with one matrix or two."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from minserve.kernels.interface import LinearWeight
from minserve.models.build_context import BuildContext
from minserve.models.destinations import Destination
from minserve.models.layers.linear import parameter

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Embedding(nn.Module):
    """Token ids int64 [T] -> [T, H]."""

    def __init__(self, vocab_size: int, hidden_size: int, build: BuildContext) -> None:
        super().__init__()
        self.weight = parameter((vocab_size, hidden_size), build.dtype, build.device)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)

    def destinations(self) -> Iterator[Destination]:
        yield Destination(EMBEDDING, self.weight)


class LMHead(nn.Module):
    """Hidden states [N, H] -> logits [N, vocab_size], of one type. Tied, it reads the embedding's matrix and loads nothing."""

    def __init__(self, embedding: Embedding, build: BuildContext, *, tied: bool) -> None:
        super().__init__()
        self.kernels = build.kernels
        self.tied = tied
        self.weight = embedding.weight if tied else parameter(embedding.weight.shape, build.dtype, build.device)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.kernels.linear(hidden, LinearWeight(self.weight), None)

    def destinations(self) -> Iterator[Destination]:
        if not self.tied:
            yield Destination(HEAD, self.weight)
