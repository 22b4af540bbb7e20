"""A model for the real runner whose next token is a hash of the whole prefix, read from the paged cache.

It goes through slot_mapping, page_table and seq_lens as a real one does, so a wrong entry in any of them changes tokens.
"""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import torch
from runtime.scripted import VOCAB, next_token
from torch import Tensor
from waiting import PATIENCE

from minserve.kernels import reference
from minserve.kernels.interface import AttentionShape
from minserve.models.forward_context import ForwardContext
from minserve.runtime.model_runner import ModelRunner
from minserve.runtime.scheduler import Limits

SHAPE = AttentionShape(kind="mla", num_heads=1, num_kv_heads=1, head_dim=1, rope_dim=1, scale=1.0)
LOGIT = 3.0


class PrefixModel:
    """A cache entry is (position, token). The hidden state of a token is the id that follows it."""

    attention_shape = SHAPE
    num_layers = 1

    def __init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=4096)
        self.forwards = 0
        self.held_at: int | None = None
        """When set, the forward of this number waits for `go_on`: an engine's loop stands still there."""
        self.held, self.go_on = threading.Event(), threading.Event()
        self.head_rows: list[int] = []
        self.poisoned: set[int] = set()
        """A token that makes the hidden states of its row NaN from there on."""

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        self.forwards += 1
        if self.forwards == self.held_at:
            self.held.set()
            assert self.go_on.wait(PATIENCE)
        attention, cache = ctx.attention, ctx.kv_cache[0]
        assert token_ids.shape == positions.shape == attention.slot_mapping.shape
        cache.view(-1, 2)[attention.slot_mapping] = torch.stack((positions, token_ids), dim=1).to(cache.dtype)
        hidden = torch.zeros(token_ids.shape[0], 1)
        starts = attention.query_start_loc.tolist()
        assert attention.query_lens_host == tuple(b - a for a, b in itertools.pairwise(starts))
        assert attention.seq_lens_host == tuple(attention.seq_lens.tolist())
        for row, seq_len in enumerate(attention.seq_lens.tolist()):
            places = torch.arange(seq_len)
            entries = cache[attention.page_table[row].long()[places // attention.page_size], places % attention.page_size]
            prefix = [(int(position), int(token)) for position, token in entries.tolist()]
            for index in range(starts[row], starts[row + 1]):
                end = seq_len - (starts[row + 1] - 1 - index)
                bad = any(token in self.poisoned for _, token in prefix[:end])
                hidden[index] = torch.nan if bad else next_token(prefix[:end])
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self.head_rows.append(hidden.shape[0])
        logits = torch.zeros(hidden.shape[0], VOCAB)
        logits.scatter_(1, hidden.nan_to_num().long(), LOGIT)
        return logits + (hidden - hidden)  # NaN stays NaN


def make_runner(limits: Limits, model: PrefixModel | None = None) -> ModelRunner:
    # What is not written yet reads as another prefix.
    cache = torch.full((limits.num_pages + 1, limits.page_size, 2), -1.0)
    return ModelRunner(model or PrefixModel(), reference.cpu(), [cache], limits, torch.device("cpu"))
