"""What a step left behind: on its way to the host, then as the plain values that the scheduler takes in. Knows no model."""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import Tensor

from minserve.models.sampler import Logprobs
from minserve.request import TokenLogprobs
from minserve.runtime.step import RowResult, ScheduledStep, StepResult

NOT_FINITE = "the model's output for this request was not a number; the request was ended"

Moment = torch.cuda.Event | float
"""On a GPU when its stream gets there; on a CPU seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """A step's results on their way to the host; readable once `done` has happened."""

    tokens: Tensor
    """int64 [N] on the host."""
    broken_rows: Tensor
    """int32 [slots + 1] on the host: how often each slot's logits were not finite since its request came."""
    logprobs: Logprobs | None
    """Of the sampling rows that asked, in their order."""
    scored: dict[int, list[Logprobs]]
    """Row to the pieces of its prompt's scores."""
    refused: dict[int, str]
    """Row to the reason why its request could not be set up."""
    begun: Moment
    done: Moment
    graph_size: int | None
    """Padded batch size of the graph that ran; None for an eager step."""


def mark(device: torch.device) -> Moment:
    """Now, on the device's stream."""
    if device.type == "cpu":
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def read(step: ScheduledStep, outcome: Outcome, eager_reason: str) -> StepResult:
    """Waits for the step. `eager_reason`: why it ran without a graph, if it did."""
    seconds = _wait(outcome.begun, outcome.done)
    tokens, broken_rows = outcome.tokens.tolist(), outcome.broken_rows.tolist()
    logprobs = iter(() if outcome.logprobs is None else _as_tuples(outcome.logprobs))
    results, sampling, nan_rows = [], 0, 0
    for index, row in enumerate(step.rows):
        error = outcome.refused.get(index)
        token_id, own = None, None
        if row.samples:
            token_id, broken = tokens[sampling], broken_rows[row.slot] > 0
            sampling += 1
            nan_rows += broken
            own = _token_logprobs(token_id, next(logprobs), row.logprobs) if row.logprobs is not None else None
            error = error or (NOT_FINITE if broken else None)
        scores = [entry for piece in outcome.scored.get(index, ()) for entry in _as_tuples(piece)]
        scored = tuple(_token_logprobs(token, entry, row.scored_top) for token, entry in zip(row.scored_ids, scores, strict=True))
        results.append(RowResult(token_id=token_id, logprobs=own, scored=scored, error=error))
    eager = step.decodes_only and outcome.graph_size is None
    return StepResult(
        rows=tuple(results),
        nan_rows=nan_rows,
        eager_reason=eager_reason if eager else None,
        graph_size=outcome.graph_size if step.decodes_only else None,
        seconds=seconds,
    )


def _wait(begun: Moment, done: Moment) -> float:
    """Until `done` has happened; the seconds between the two."""
    if isinstance(begun, torch.cuda.Event) and isinstance(done, torch.cuda.Event):
        done.synchronize()
        return float(begun.elapsed_time(done)) / 1e3
    assert isinstance(begun, float) and isinstance(done, float)
    return done - begun


_Entry = tuple[float, int, list[int], list[float]]


def _as_tuples(values: Logprobs) -> list[_Entry]:
    """(logprob, rank, top ids, top logprobs) of each row."""
    return list(zip(*(value.tolist() for value in values), strict=True))


def _token_logprobs(token_id: int, entry: _Entry, num_top: int) -> TokenLogprobs:
    logprob, rank, top_ids, top_logprobs = entry
    return TokenLogprobs(token_id, logprob, rank, tuple(top_ids[:num_top]), tuple(top_logprobs[:num_top]))
