"""Loads a model and drives it step by step over a paged cache, as the runtime does but without choices of its own.

Unwritten cache is NaN and pages are handed out in disorder, so a read of the wrong place shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minserve.capture_flags import EAGER, CaptureFlags
from minserve.kernels import reference
from minserve.kernels.interface import AttentionMetadata, Kernels, kv_page_shape
from minserve.models.decoder import Decoder
from minserve.models.forward_context import ForwardContext
from minserve.models.model_config import ModelConfig
from minserve.models.registry import build_model, load_model_config
from minserve.models.weights import load_weights, open_checkpoint

DUMMY_PAGE = 0


class PagedSteps:
    """One cache and the requests in it."""

    def __init__(self, model: Decoder, kernels: Kernels | None = None, *, page_size: int = 64, num_pages: int = 200) -> None:
        self.model = model
        self.kernels = kernels or reference.cpu()
        self.page_size = page_size
        shape = (num_pages, *kv_page_shape(model.attention_shape, page_size))
        parameter = next(model.parameters())
        self.cache = [torch.full(shape, torch.nan, dtype=parameter.dtype) for _ in range(model.num_layers)]
        self._free = list(range(1, num_pages))
        random.Random(0).shuffle(self._free)
        self._pages: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(
        self,
        rows: Sequence[tuple[str, Sequence[int]]],
        *,
        padding: int = 0,
        rows_per_rank: int | None = None,
        flags: CaptureFlags = EAGER,
    ) -> list[Tensor]:
        """Appends each row's tokens to its request; returns each row's logits fp32 [tokens, vocab].

        `padding` adds rows of one token on the dummy page, as a step of a captured graph has them.
        """
        starts = [self._lengths.get(name, 0) for name, _ in rows]
        for name, tokens in rows:
            self._extend(name, len(tokens))
        metadata = self._metadata(
            [(name, start, len(tokens)) for (name, tokens), start in zip(rows, starts, strict=True)], padding
        )
        token_ids = [token for _, tokens in rows for token in tokens] + [0] * padding
        positions = [start + i for (_, tokens), start in zip(rows, starts, strict=True) for i in range(len(tokens))] + [
            0
        ] * padding
        real = len(token_ids) - padding
        context = ForwardContext(
            attention=metadata,
            attention_plan=self.kernels.plan_attention(metadata, self.model.attention_shape),
            kv_cache=self.cache,
            num_tokens=torch.tensor([real], dtype=torch.int32) if padding else None,
            rows_per_rank=rows_per_rank,
            flags=flags,
        )
        with torch.inference_mode():
            hidden = self.model(torch.tensor(token_ids, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64), context)
            logits = self.model.compute_logits(hidden[:real]).float()
        return list(logits.split([len(tokens) for _, tokens in rows]))

    def free(self, name: str) -> None:
        self._free += self._pages.pop(name)
        del self._lengths[name]

    def _extend(self, name: str, count: int) -> None:
        self._lengths[name] = self._lengths.get(name, 0) + count
        pages = self._pages.setdefault(name, [])
        while len(pages) * self.page_size < self._lengths[name]:
            pages.append(self._free.pop())

    def _metadata(self, rows: list[tuple[str, int, int]], padding: int) -> AttentionMetadata:
        lengths = [count for _, _, count in rows] + [1] * padding
        seq_lens = [start + count for _, start, count in rows] + [1] * padding
        pages = [self._pages[name] for name, _, _ in rows] + [[DUMMY_PAGE]] * padding
        width = max(map(len, pages), default=1)
        slots = [
            pages[row][position // self.page_size] * self.page_size + position % self.page_size
            for row, (length, seq_len) in enumerate(zip(lengths, seq_lens, strict=True))
            for position in range(seq_len - length, seq_len)
        ]
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            page_table=torch.tensor([row + [DUMMY_PAGE] * (width - len(row)) for row in pages], dtype=torch.int32).view(
                -1, width
            ),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            page_size=self.page_size,
            query_lens_host=tuple(lengths),
            seq_lens_host=tuple(seq_lens),
        )


def load(
    directory: Path,
    kernels: Kernels | None = None,
    *,
    config: Callable[[ModelConfig], ModelConfig] = lambda config: config,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Decoder:
    """A checkpoint's model on the CPU, ready to run; `config` may change what config.json said."""
    checkpoint = open_checkpoint(directory)
    model = build_model(
        config(load_model_config(directory)),
        checkpoint.formats,
        kernels or reference.cpu(),
        dtype,
        torch.device("cpu"),
        **options,
    )
    load_weights(model, checkpoint)
    model.finish_load()
    return model
