"""What passes between the scheduler and the model runner: one step's choices, and what came of them.

Plain values, fixed once made: the runner may read them while the scheduler already prepares the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from minserve.request import SamplingParams, TokenLogprobs


class SlotSetup(msgspec.Struct, frozen=True, gc=False):
    """Told with a request's first row: how its slot shall sample."""

    sampling: SamplingParams
    prompt_token_ids: list[int]


class ScheduledRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request's part of a step: the tokens at positions `start` to `start + num_tokens - 1`."""

    request_id: int
    slot: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    """The tokens. Empty for a decode row: its single token is the slot's last sampled one, known on the device only."""
    table_offset: int = 0
    """Where in the request's page table `new_pages` go; 0 starts the table afresh."""
    new_pages: tuple[int, ...] = ()
    write_from: int = 0
    """Positions before this one have their KV in shared pages already: they are computed but not written."""
    samples: bool = False
    """The last token's logits choose the next token."""
    logprobs: int | None = None
    """Top alternatives to report with the sampled token; None reports nothing."""
    scored_ids: tuple[int, ...] = ()
    """Prompt tokens whose log-probability is asked for, predicted by consecutive positions of this row."""
    scored_offset: int = 0
    """The row's token, counted from its first, that predicts `scored_ids[0]`."""
    scored_top: int = 0
    """Top alternatives to report with each scored token."""
    setup: SlotSetup | None = None


class ScheduledStep(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's choice. Decode rows come first, then rows that read prompt tokens."""

    number: int
    """Counts up from 1; 0 is a step of padding alone."""
    rows: tuple[ScheduledRow, ...]
    num_decode_rows: int
    num_tokens: int

    @classmethod
    def of(cls, number: int, rows: Sequence[ScheduledRow], num_decode_rows: int = 0) -> ScheduledStep:
        """All rows, of which the first `num_decode_rows` decode."""
        num_tokens = sum(row.num_tokens for row in rows)
        return cls(number=number, rows=tuple(rows), num_decode_rows=num_decode_rows, num_tokens=num_tokens)

    @property
    def decodes_only(self) -> bool:
        return self.num_decode_rows == len(self.rows)

    @property
    def is_dummy(self) -> bool:
        """Padding alone, of no request: run because other ranks have work."""
        return self.number == 0


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """What a step produced for one row."""

    token_id: int | None = None
    """The sampled token, None where the row did not sample."""
    logprobs: TokenLogprobs | None = None
    scored: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    """Set when this request alone failed; nothing else of the row counts then."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results in the order of the step's rows."""

    rows: tuple[RowResult, ...]
    nan_rows: int = 0
    """Rows whose logits were not finite; each has its `error` set."""
    eager_reason: str | None = None
    """Why a step of decode rows alone ran without a graph; None for a replay and for mixed steps."""
    graph_size: int | None = None
    """The padded batch size of the graph that was replayed; None for an eager and for a mixed step."""
    seconds: float | None = None
    """From its first kernel to its last, whatever the host was late for."""
