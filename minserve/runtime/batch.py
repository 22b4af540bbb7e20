"""A step as tensors: laid out on the host in one pass, copied to the device in two pieces.

The device buffers never move, and a padded decode batch of a given size always lies at the same addresses, so a captured
graph can read it there. Knows the scheduler's rows; nothing of models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minserve.kernels.interface import AttentionMetadata
from minserve.runtime.page_allocator import DUMMY_PAGE
from minserve.runtime.step import ScheduledRow, ScheduledStep

_ALIGNMENT = 32
"""Elements to which each part of a buffer is aligned: 128 bytes and more, for kernels that load vectors."""

Ints = npt.NDArray[np.signedinteger[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """One step's tensors on the device. T tokens, R rows, N rows that sample; padding counts in all of them.

    In a batch that decodes only T = R = N and each row's token is its slot's last sampled one. In a mixed one the first
    `num_decode_rows` tokens are such, the others are in `token_ids`.
    """

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

    @property
    def decodes_only(self) -> bool:
        return self.num_decode_rows == self.num_rows


class StagedBatch(NamedTuple):
    """A step laid out on the host, in one of the two staging buffers; `to_device` must run before the next but one."""

    batch: Batch
    """What it will be on the device."""
    copies: tuple[tuple[Tensor, Tensor], ...]
    """There, from here."""


def _long_sizes(tokens: int, sampling: int) -> list[int]:
    """Of token_ids, positions, slot_mapping, sample_index, sample_slots."""
    return [tokens, tokens, tokens, sampling, sampling]


def _short_sizes(rows: int, width: int) -> list[int]:
    """Of query_start_loc, seq_lens, num_tokens, page_table (of `width` columns)."""
    return [rows + 1, rows, 1, rows * width]


def _parts(sizes: list[int]) -> list[slice]:
    parts, start = [], 0
    for size in sizes:
        parts.append(slice(start, start + size))
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return parts


def _lay_out(
    values: Sequence[Ints], sizes: list[int], host: Tensor, device: Tensor
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Write values to the host's buffer: their places on the device, and the copy that fills them. The rest of a part, a padded
    batch's, is zero."""
    parts, numbers = _parts(sizes), host.numpy()  # cut in numpy, which takes a tenth of torch's time for it
    for part, value in zip(parts, values, strict=True):
        view = numbers[part]
        view[: len(value)] = value
        view[len(value) :] = 0
    end = parts[-1].stop
    return [device[part] for part in parts], (device[:end], host[:end])


class BatchBuilder:
    """Owns the page tables on the host, the staging buffers and their place on the device.

    Two staging buffers take turns: a step is laid out while the copy of the one before it may still be on its way.
    """

    def __init__(self, *, max_slots: int, max_tokens: int, max_pages: int, page_size: int, device: torch.device) -> None:
        """max_slots: also the largest batch of decode rows, padding included; max_pages: of one request."""
        self.page_size = page_size
        self.max_pages = max_pages
        self.mixed_rows = max_slots + 1
        """Rows of each padded mixed step. One at least is empty, so that it never passes for a step of decode rows alone."""
        self._scratch_slot = max_slots
        self._tables = np.full((max_slots + 1, max_pages), DUMMY_PAGE, dtype=np.int32)
        sizes = [
            _parts(_long_sizes(max_tokens, max_slots))[-1].stop,
            _parts(_short_sizes(self.mixed_rows, max_pages))[-1].stop,
        ]
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
        return ScheduledStep.of(0, [self._padding_row(1, samples=True)] * rows, rows)

    def padding_prompts(self, tokens: int) -> ScheduledStep:
        """The same for a mixed step: prompts of the scratch slot, so many tokens together or as many as fit."""
        longest = self.max_pages * self.page_size
        lengths = [min(longest, tokens - start) for start in range(0, tokens, longest)][: self._scratch_slot]
        return ScheduledStep.of(0, [self._padding_row(length, (0,) * length) for length in lengths])

    def _padding_row(self, num_tokens: int, token_ids: tuple[int, ...] = (), *, samples: bool = False) -> ScheduledRow:
        return ScheduledRow(
            request_id=0, slot=self._scratch_slot, start=0, num_tokens=num_tokens, token_ids=token_ids, write_from=num_tokens,
            samples=samples,
        )  # fmt: skip

    def stage(
        self,
        step: ScheduledStep,
        padded: int | None = None,
        *,
        sampling: int = 0,
        rows_per_rank: int | None = None,
        masked: bool = False,
    ) -> StagedBatch:
        """Lay a step out on the host. `padded` fills a step of decode rows alone up to so many rows, a mixed one up to so many
        tokens and to `mixed_rows` rows, of which so many as `sampling` sample, if that is more than do; `masked` makes padding
        of all rows, which no expert computes."""
        rows = step.rows
        self._update_tables(step)
        numbers = [(row.slot, row.start, row.num_tokens, row.write_from, row.samples) for row in rows]
        slots, starts, lengths, write_from, samples = np.array(numbers, dtype=np.int64).T
        ends, samples, seq_lens = np.cumsum(lengths), samples.astype(bool), starts + lengths
        row_of = np.repeat(np.arange(len(rows)), lengths)
        positions = starts[row_of] + np.arange(step.num_tokens) - (ends - lengths)[row_of]
        padded_rows = len(rows) if padded is None else padded if step.decodes_only else self.mixed_rows
        padding, tokens = padded_rows - len(rows), step.num_tokens if padded is None else padded
        if padding < 0 or tokens < step.num_tokens:
            raise ValueError(f"a step of {step.num_tokens} tokens in {len(rows)} rows cannot be padded to {padded}")
        each = int(step.decodes_only)  # tokens of a padding row
        width = self.max_pages if padded is not None else max(1, -(-int(seq_lens.max()) // self.page_size))
        self._staging.reverse()
        filler = np.full(padding, self._scratch_slot)
        token_ids = np.zeros(step.num_tokens, dtype=np.int64)
        token_ids[step.num_decode_rows :] = [token for row in rows for token in row.token_ids]
        # Padding rows that sample: all of a decode step; those of a mixed one draw from its first token.
        idle = each * padding or max(0, sampling - int(samples.sum()))
        sample_index = np.concatenate((ends[samples] - 1, each * (step.num_tokens + np.arange(idle))))
        sample_slots = np.concatenate((slots[samples], np.full(idle, self._scratch_slot)))
        slot_mapping = self._slot_mapping(slots[row_of], positions, write_from[row_of])
        long, first = _lay_out(
            (token_ids, positions, slot_mapping, sample_index, sample_slots),
            _long_sizes(tokens, len(sample_slots)), self._staging[0][0], self._device_long,
        )  # fmt: skip
        query_starts = np.concatenate(([0], ends, ends[-1] + each * (1 + np.arange(padding))))
        table = self._tables[np.concatenate((slots, filler)), :width]
        count = np.array([0 if masked else step.num_tokens])
        short, second = _lay_out(
            (query_starts, np.concatenate((seq_lens, np.full(padding, each))), count, table.ravel()),
            _short_sizes(padded_rows, width), self._staging[0][1], self._device_short,
        )  # fmt: skip
        filling = (each,) * padding
        attention = AttentionMetadata(
            query_start_loc=short[0],
            seq_lens=short[1],
            page_table=short[3].view(padded_rows, width),
            slot_mapping=long[2],
            page_size=self.page_size,
            query_lens_host=(*lengths.tolist(), *filling),
            seq_lens_host=(*seq_lens.tolist(), *filling),
            graph=padded is not None,
        )
        batch = Batch(
            num_rows=len(rows),
            num_decode_rows=step.num_decode_rows,
            token_ids=long[0],
            positions=long[1],
            sample_index=long[3],
            sample_slots=long[4],
            attention=attention,
            num_tokens=None if padded is None else short[2],
            rows_per_rank=rows_per_rank,
        )
        return StagedBatch(batch, (first, second))

    def _update_tables(self, step: ScheduledStep) -> None:
        for row in step.rows:
            if row.new_pages:
                table = self._tables[row.slot]
                if row.table_offset == 0:
                    table[:] = DUMMY_PAGE
                table[row.table_offset : row.table_offset + len(row.new_pages)] = row.new_pages

    def _slot_mapping(self, token_slots: Ints, positions: Ints, write_from: Ints) -> Ints:
        """page * page_size + offset of each token; what lies in shared pages already is written to the dummy page instead."""
        offsets = positions % self.page_size
        pages = self._tables[token_slots, positions // self.page_size].astype(np.int64)
        pages[positions < write_from] = DUMMY_PAGE
        return pages * self.page_size + offsets

    def to_device(self, staged: StagedBatch) -> Batch:
        """Copy on the current stream, without waiting for it. The batch is good until the next call."""
        for there, here in staged.copies:
            there.copy_(here, non_blocking=True)
        return staged.batch
