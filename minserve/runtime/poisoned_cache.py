"""The KV cache under a self-check: NaN wherever no token of the trial lies, and what steps write there.

Knows how a layer is laid out; nothing of graphs or samplers. One launch a layer for whatever is done: the host takes most of a
check's time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minserve.kernels.interface import AttentionShape
from minserve.runtime.page_allocator import DUMMY_PAGE
from minserve.runtime.step import ScheduledStep


class PoisonedCache:
    """The layers [num_pages + 1, *kv_page_shape], all of them NaN from the start; `clear` leaves zeros."""

    def __init__(self, layers: list[Tensor], shape: AttentionShape, page_size: int) -> None:
        self._layers = layers
        self._page_size = page_size
        self._parts = 1 if shape.kind == "mla" else 2
        """Places of a token in a page: one, or its key's and its value's."""
        self._width = layers[0][0].numel() // (self._parts * page_size)
        self._filled = torch.tensor([DUMMY_PAGE], device=layers[0].device)
        for layer in layers:
            layer.fill_(torch.nan)

    def clear(self) -> None:
        for layer in self._layers:
            layer.zero_()

    def fill(self, step: ScheduledStep, seed: int) -> None:
        """Random numbers where the rows' earlier tokens lie, others in each layer; NaN in the rest of these pages and in the
        dummy page."""
        pages, lengths = [DUMMY_PAGE], [0]
        for row in step.rows:
            pages += row.new_pages
            lengths += [min(max(row.start - page * self._page_size, 0), self._page_size) for page in range(len(row.new_pages))]
        first = self._layers[0]
        numbers = torch.tensor([pages, lengths])
        if first.device.type == "cuda":
            numbers = numbers.pin_memory().to(first.device, non_blocking=True)  # else the host would wait for the device
        self._filled, filled = numbers
        unused = torch.arange(self._page_size, device=first.device) >= filled.unsqueeze(1)
        values = torch.empty((len(pages), self._parts, self._page_size, self._width), dtype=first.dtype, device=first.device)
        values.normal_(generator=torch.Generator(first.device).manual_seed(seed))
        values.masked_fill_(unused[:, None, :, None], torch.nan)
        values = values.view(len(pages), *first.shape[1:])
        for index, layer in enumerate(self._layers):
            layer.index_copy_(0, self._filled, values * (1 + index / len(self._layers)))

    def poison_pages(self) -> None:
        """All that were filled last."""
        for layer in self._layers:
            layer.index_fill_(0, self._filled, torch.nan)

    def places(self, slot_mapping: Tensor) -> Tensor:
        """Where tokens' entries lie, as `poison` and `read` want it: int64 [T] -> [parts * T]."""
        pages, offsets = slot_mapping // self._page_size, slot_mapping % self._page_size
        return torch.cat([(pages * self._parts + part) * self._page_size + offsets for part in range(self._parts)])

    def poison(self, places: Tensor) -> None:
        for entries in self._entries():
            entries.index_fill_(0, places, torch.nan)

    def read(self, places: Tensor) -> Tensor:
        """Copies of the tokens' entries: [T, layers, parts, width]."""
        entries = self._entries()
        copies = entries[0].new_empty((len(entries), len(places), entries[0].shape[1]))
        for copy, layer in zip(copies, entries, strict=True):
            torch.index_select(layer, 0, places, out=copy)
        return copies.view(len(entries), self._parts, -1, self._width).permute(2, 0, 1, 3)

    def _entries(self) -> list[Tensor]:
        """Each layer as rows of one entry: [places, width]."""
        return [layer.view(-1, self._width) for layer in self._layers]
