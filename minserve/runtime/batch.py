"""A step as tensors: laid out on the host in one pass, copied to the device in two pieces.

The device buffers never move, and a padded decode batch of a given size always lies at the same addresses, so a captured
graph can read it there. Knows the scheduler's rows; nothing of models.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minserve.kernels.interface import AttentionMetadata
from minserve.runtime.page_allocator import DUMMY_PAGE
from minserve.runtime.step import ScheduledRow, ScheduledStep

_ALIGNMENT = 32
"""Elements to which each part of a buffer is aligned: 128 bytes and more, for kernels that load vectors."""

Ints64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """One step's tensors on the device. T tokens, R rows, N rows that sample; padding counts in all of them.

    In a "decode" batch T = R = N and each row's token is its slot's last sampled one. In a "mixed" batch the first
    `num_decode_rows` tokens are such, the others are in `token_ids`.
    """

    step_kind: Literal["decode", "mixed"]
    num_rows: int
    """Rows of requests. Those beyond are padding: dummy page, position 0, the sampler's scratch slot."""
    num_decode_rows: int
    token_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T]"""
    sample_index: Tensor
    """int64 [N]: the token whose logits each sampling row needs."""
    sample_slots: Tensor
    """int64 [N]: those rows' slots."""
    attention: AttentionMetadata
    num_tokens: Tensor | None
    """int32 [1]: tokens that are no padding; None in a batch without a padded size."""
    rows_per_rank: int | None
    """Tokens that each rank of the group has room for in this step; None: as many as here."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """Where the parts of a step lie in the two buffers; a function of the four sizes alone."""

    tokens: int
    rows: int
    sampling: int
    width: int
    """Columns of the page table."""

    def long_parts(self) -> list[slice]:
        """token_ids, positions, slot_mapping, sample_index, sample_slots."""
        return _parts([self.tokens, self.tokens, self.tokens, self.sampling, self.sampling])

    def short_parts(self) -> list[slice]:
        """query_start_loc, seq_lens, num_tokens, page_table."""
        return _parts([self.rows + 1, self.rows, 1, self.rows * self.width])


def _parts(sizes: list[int]) -> list[slice]:
    parts, start = [], 0
    for size in sizes:
        parts.append(slice(start, start + size))
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return parts


@dataclasses.dataclass(frozen=True, slots=True)
class StagedBatch:
    """A step laid out on the host, in one of the two staging buffers; `to_device` must run before the next but one."""

    step_kind: Literal["decode", "mixed"]
    num_rows: int
    num_decode_rows: int
    layout: _Layout
    long: Tensor
    short: Tensor
    query_starts: tuple[int, ...]
    """Each row's first token."""
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    padded: bool
    rows_per_rank: int | None


class BatchBuilder:
    """Owns the page tables on the host, the staging buffers and their place on the device.

    Two staging buffers take turns: a step is laid out while the copy of the one before it may still be on its way.
    """

    def __init__(
        self, *, max_slots: int, max_rows: int, max_tokens: int, max_pages: int, page_size: int, device: torch.device
    ) -> None:
        """max_rows: the largest batch, padding included; max_pages: of one request."""
        self.page_size = page_size
        self.max_pages = max_pages
        self.mixed_rows = max_slots + 1
        """Rows of each padded mixed step. One at least is empty, so that it never passes for a step of decode rows alone."""
        self._scratch_slot = max_slots
        self._tables = np.full((max_slots + 1, max_pages), DUMMY_PAGE, dtype=np.int32)
        most = _Layout(tokens=max_tokens, rows=max(max_rows, self.mixed_rows), sampling=max_rows, width=max_pages)
        sizes = most.long_parts()[-1].stop, most.short_parts()[-1].stop
        pinned = device.type == "cuda"
        self._staging = [
            (
                torch.zeros(sizes[0], dtype=torch.int64, pin_memory=pinned),
                torch.zeros(sizes[1], dtype=torch.int32, pin_memory=pinned),
            )
            for _ in range(2)
        ]
        self._device_long = torch.zeros(sizes[0], dtype=torch.int64, device=device)
        self._device_short = torch.zeros(sizes[1], dtype=torch.int32, device=device)

    def padding(self, rows: int) -> ScheduledStep:
        """A decode step of the scratch slot alone: what a graph is warmed up and recorded with. Reads and writes page 0 only."""
        row = ScheduledRow(request_id=0, slot=self._scratch_slot, start=0, num_tokens=1, write_from=1, samples=True)
        return ScheduledStep.of(0, (row,) * rows, rows)

    def padding_prompts(self, tokens: int) -> ScheduledStep:
        """The same for a mixed step: prompts of the scratch slot, so many tokens together or as many as fit."""
        longest = self.max_pages * self.page_size
        lengths = [min(longest, tokens - start) for start in range(0, tokens, longest)][: self._scratch_slot]
        slot = self._scratch_slot
        return ScheduledStep.of(
            0,
            [
                ScheduledRow(request_id=0, slot=slot, start=0, num_tokens=count, token_ids=(0,) * count, write_from=count)
                for count in lengths
            ],
        )

    def stage(
        self, step: ScheduledStep, padded: int | None = None, *, rows_per_rank: int | None = None, masked: bool = False
    ) -> StagedBatch:
        """Lay a step out on the host. `padded` fills a step of decode rows alone up to so many rows, a mixed one up to so many
        tokens and to `mixed_rows` rows; `masked` makes padding of all rows, which no expert computes."""
        rows = step.rows
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        self._update_tables(step)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        lengths = np.array([row.num_tokens for row in rows], dtype=np.int64)
        ends = np.cumsum(lengths)
        row_of = np.repeat(np.arange(len(rows)), lengths)
        positions = starts[row_of] + np.arange(step.num_tokens) - (ends - lengths)[row_of]
        samples = np.array([row.samples for row in rows], dtype=bool)
        decode_only = step.decodes_only
        padded_rows = len(rows) if padded is None else padded if decode_only else self.mixed_rows
        padding, tokens = padded_rows - len(rows), step.num_tokens if padded is None else padded
        if padding < 0 or tokens < step.num_tokens:
            raise ValueError(f"a step of {step.num_tokens} tokens in {len(rows)} rows cannot be padded to {padded}")
        each = int(decode_only)  # tokens of a padding row
        seq_lens = starts + lengths
        width = self.max_pages if padded is not None else max(1, -(-int(seq_lens.max()) // self.page_size))
        layout = _Layout(tokens, padded_rows, int(samples.sum()) + each * padding, width)
        self._staging.reverse()
        long, short = self._staging[0]
        pad = np.zeros(padding, dtype=np.int64)
        token_ids = np.zeros(step.num_tokens, dtype=np.int64)
        token_ids[step.num_decode_rows :] = [token for row in rows for token in row.token_ids]
        sample_index = np.concatenate((ends[samples] - 1, step.num_tokens + np.arange(each * padding)))
        sample_slots = np.concatenate((slots[samples], pad[: each * padding] + self._scratch_slot))
        slot_mapping = self._slot_mapping(step, slots[row_of], positions, row_of)
        values = (token_ids, positions, slot_mapping)
        for part, value in zip(layout.long_parts(), (*values, sample_index, sample_slots), strict=True):
            _fill(long[part], value)
        _fill(short[layout.short_parts()[0]], np.concatenate(([0], ends, ends[-1] + each * (1 + np.arange(padding)))))
        _fill(short[layout.short_parts()[1]], np.concatenate((seq_lens, pad + each)))
        _fill(short[layout.short_parts()[2]], np.array([0 if masked else step.num_tokens]))
        _fill(short[layout.short_parts()[3]], self._tables[np.concatenate((slots, pad + self._scratch_slot)), :width].ravel())
        filling = (each,) * padding
        return StagedBatch(
            step_kind="decode" if decode_only else "mixed",
            num_rows=len(rows),
            num_decode_rows=step.num_decode_rows,
            layout=layout,
            long=long,
            short=short,
            query_starts=tuple((ends - lengths).tolist()),
            query_lens=(*lengths.tolist(), *filling),
            seq_lens=(*seq_lens.tolist(), *filling),
            padded=padded is not None,
            rows_per_rank=rows_per_rank,
        )

    def _update_tables(self, step: ScheduledStep) -> None:
        for row in step.rows:
            if row.new_pages:
                table = self._tables[row.slot]
                if row.table_offset == 0:
                    table[:] = DUMMY_PAGE
                table[row.table_offset : row.table_offset + len(row.new_pages)] = row.new_pages

    def _slot_mapping(self, step: ScheduledStep, token_slots: Ints64, positions: Ints64, row_of: Ints64) -> Ints64:
        """page * page_size + offset of each token; what lies in shared pages already is written to the dummy page instead."""
        offsets = positions % self.page_size
        pages = self._tables[token_slots, positions // self.page_size].astype(np.int64)
        write_from = np.array([row.write_from for row in step.rows], dtype=np.int64)[row_of]
        pages[positions < write_from] = DUMMY_PAGE
        return pages * self.page_size + offsets

    def to_device(self, staged: StagedBatch) -> Batch:
        """Copy on the current stream, without waiting for it. The batch is good until the next call."""
        layout = staged.layout
        long_parts, short_parts = layout.long_parts(), layout.short_parts()
        self._device_long[: long_parts[-1].stop].copy_(staged.long[: long_parts[-1].stop], non_blocking=True)
        self._device_short[: short_parts[-1].stop].copy_(staged.short[: short_parts[-1].stop], non_blocking=True)
        token_ids, positions, slot_mapping, sample_index, sample_slots = (self._device_long[part] for part in long_parts)
        query_start_loc, seq_lens, num_tokens, page_table = (self._device_short[part] for part in short_parts)
        attention = AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            page_table=page_table.view(layout.rows, layout.width),
            slot_mapping=slot_mapping,
            page_size=self.page_size,
            query_lens_host=staged.query_lens,
            seq_lens_host=staged.seq_lens,
            graph=staged.padded,
        )
        return Batch(
            step_kind=staged.step_kind,
            num_rows=staged.num_rows,
            num_decode_rows=staged.num_decode_rows,
            token_ids=token_ids,
            positions=positions,
            sample_index=sample_index,
            sample_slots=sample_slots,
            attention=attention,
            num_tokens=num_tokens if staged.padded else None,
            rows_per_rank=staged.rows_per_rank,
        )


def _fill(part: Tensor, values: npt.NDArray[np.signedinteger[Any]]) -> None:
    """Write the first elements of a staging part; the rest, a padded batch's, is zero."""
    view = part.numpy()
    view[: len(values)] = values
    view[len(values) :] = 0
