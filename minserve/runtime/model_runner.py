"""Runs steps: owns the model, its KV cache and the sampler's state, and hands results over when they are asked for.

`launch` never waits for the device. What it launches on a GPU runs behind the host's back; on a CPU the same work is done
when the result is asked for, so that the engine sees one order of events everywhere. Knows rows and slots; nothing of queues.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minserve.capture_flags import EAGER, CaptureFlags
from minserve.kernels.interface import Kernels
from minserve.models.forward_context import ForwardContext
from minserve.models.model import Model
from minserve.models.sampler import Logprobs, SamplerState, Variant, gather_logprobs, needs_general, sample, sample_again
from minserve.runtime import step_outcome
from minserve.runtime.batch import Batch, BatchBuilder, StagedBatch
from minserve.runtime.cuda_graph import StepGraphs
from minserve.runtime.grammar import TokenMasks
from minserve.runtime.scheduler import Limits
from minserve.runtime.step import ScheduledRow, ScheduledStep, StepResult
from minserve.runtime.step_outcome import Moment, Outcome, mark

SCORING_LOGITS_BYTES = 64 << 20
"""Prompt scoring goes through the head in pieces of this many bytes of logits."""
NO_GRAPHS = "no graphs"
BESIDE_PROMPTS = "another rank reads a long prompt"
"""Why a step that all ranks take together is no captured one."""

log = logging.getLogger("minserve.runtime")


class Sampled(NamedTuple):
    """What a batch's forward leaves on the device. N: rows that sample."""

    tokens: Tensor
    """int64 [N]"""
    logits: Tensor
    """[N, vocab], in the model's type."""
    hidden: Tensor
    """[T, hidden]"""


@dataclasses.dataclass(frozen=True, slots=True)
class _Forwarded:
    """A step whose rows have sampled, whatever they may sample."""

    batch: Batch
    sampled: Sampled
    refused: dict[int, str]
    begun: Moment
    graph_size: int | None


class InFlight:
    """A launched step. Its results leave the device when it is finished, which waits for the masks of a step that has any."""

    def __init__(
        self,
        step: ScheduledStep,
        finish: Callable[[TokenMasks | None], Outcome],
        read: Callable[[Outcome], StepResult],
        *,
        finish_late: bool,
    ) -> None:
        """`finish_late`: not before the result is asked for."""
        self.step = step
        self._finish: Callable[[TokenMasks | None], Outcome] | None = finish
        self._read = read
        self._finish_late = finish_late
        self._masks: TokenMasks | None = None
        self._outcome: Outcome | None = None

    def constrain(self, masks: TokenMasks | None) -> None:
        """What the rows of a step launched with `awaits_masks` may sample; at most once, and before the next launch."""
        self._masks = masks
        if not self._finish_late:
            self._outcome = self._finished()

    def _finished(self) -> Outcome:
        """Lets go of the forward's tensors: the next step's take their place."""
        assert self._finish is not None
        finish, self._finish = self._finish, None
        return finish(self._masks)

    def result(self) -> StepResult:
        """Wait for the step; call it once. Raises what the step raised."""
        return self._read(self._finished() if self._outcome is None else self._outcome)


class ModelRunner:
    """All of its methods belong to one thread, and all its GPU work to that thread's current stream."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        kv_cache: list[Tensor],
        limits: Limits,
        device: torch.device,
    ) -> None:
        """kv_cache: one tensor a layer."""
        self.model = model
        self.kernels = kernels
        self.kv_cache = kv_cache
        self.limits = limits
        self.device = device
        self.sampler = SamplerState(limits.max_num_seqs, limits.vocab_size, device, kernels)
        self.batches = BatchBuilder(
            max_slots=limits.max_num_seqs,
            max_tokens=limits.max_step_tokens,
            max_pages=-(-limits.max_model_len // limits.page_size),
            page_size=limits.page_size,
            device=device,
        )
        self.graphs: StepGraphs[Sampled] | None = None
        """Replayed for every step of decode rows alone; None runs them eagerly."""
        self.sampling_graphs: StepGraphs[tuple[Tensor]] | None = None
        """Replayed after a decode graph some of whose rows want another token than the argmax."""
        self.mixed_graphs: StepGraphs[tuple[Tensor]] | None = None
        """Replayed for every other step, up to the logits of those that no other rank takes part in; None: eager as well."""
        self.eager_reason = device.type if device.type == "cpu" else NO_GRAPHS
        """Why decode steps run without a graph, where they do."""
        self.low_latency_rows: int | None = None
        """Where several ranks share the experts: while none has more tokens in a step, each may replay a graph of its own size;
        None: they replay the same size, in steps of decode rows alone."""
        self._general = [False] * (limits.max_num_seqs + 1)  # the scratch slot is argmax for ever
        pinned = device.type == "cuda"
        self._landing = [
            (
                torch.zeros(limits.max_num_seqs, dtype=torch.int64, pin_memory=pinned),
                torch.zeros_like(self.sampler.broken_rows, device="cpu", pin_memory=pinned),
            )
            for _ in range(2)
        ]
        """Where two steps' numbers come to the host: pinned memory that is asked for between steps may wait for the device."""
        self._told_eager = device.type == "cpu"  # there is nothing else on a CPU

    @property
    def runs_behind_host(self) -> bool:
        """Whether a launched step goes on by itself, instead of when its result is asked for."""
        return self.device.type != "cpu"

    def launch(
        self,
        step: ScheduledStep,
        *,
        awaits_masks: bool = False,
        rows_per_rank: int | None = None,
        all_decode: bool = True,
    ) -> InFlight:
        """Start a step. Steps run in the order of their launch; each result must be taken before the next but one is launched.

        With `awaits_masks` its forward runs on the device while the host still finds out what its rows may sample: `constrain`.
        `rows_per_rank`: where several ranks share the experts, the most tokens that any of them has in this step; `all_decode`:
        none of them reads a prompt.
        """
        padded, sampling = None, 0
        if step.decodes_only:
            padded = self._decode_graph(len(step.rows), rows_per_rank, all_decode)
        elif self.mixed_graphs is not None and self._in_graphs(rows_per_rank):
            padded = self.mixed_graphs.size_for(step.num_tokens)
            sampling = self._sampling_size(step)
        rows_per_rank = rows_per_rank if padded is None else None  # a graph has its own
        staged = self.batches.stage(step, padded, sampling=sampling, rows_per_rank=rows_per_rank)
        return self._start(step, staged, padded, awaits_masks)

    def launch_dummy(self, rows_per_rank: int, *, all_decode: bool = True) -> InFlight:
        """Start a step of padding rows, so that this rank's experts serve the other ranks' tokens."""
        step = self.batches.padding(1)
        padded = self._decode_graph(1, rows_per_rank, all_decode)
        rows = rows_per_rank if padded is None else None
        return self._start(
            step, self.batches.stage(step, padded or 1, rows_per_rank=rows, masked=True), padded, awaits_masks=False
        )

    def _decode_graph(self, rows: int, rows_per_rank: int | None, all_decode: bool) -> int | None:
        """The size to replay for so many decode rows; None: no graph, or not in a step as the ranks agreed on."""
        if self.graphs is None:
            return None
        if rows_per_rank is not None and self.low_latency_rows is None:
            return self.graphs.size_for(rows_per_rank) if all_decode else None
        return self.graphs.size_for(rows) if self._in_graphs(rows_per_rank) else None

    def _sampling_size(self, step: ScheduledStep) -> int:
        """Rows that sample in a mixed step, as many as in some captured decode step: each other number would load kernels of its
        own when it first comes, and all rows would wait for that. None stays none."""
        rows = sum(row.samples for row in step.rows)
        if not rows or self.graphs is None:
            return 0
        return self.graphs.size_for(rows) or 0

    def _in_graphs(self, rows_per_rank: int | None) -> bool:
        """Whether each rank may replay what fits its own part of the step."""
        return rows_per_rank is None or rows_per_rank <= (self.low_latency_rows or 0)

    def _start(self, step: ScheduledStep, staged: StagedBatch, padded: int | None, awaits_masks: bool) -> InFlight:
        beside_prompts = staged.batch.rows_per_rank is not None and self.graphs is not None
        read = functools.partial(self._read, step, BESIDE_PROMPTS if beside_prompts else self.eager_reason)
        if self.device.type == "cpu":
            return InFlight(
                step, lambda masks: self._finish(step, self._run(step, staged, padded), masks), read, finish_late=True
            )
        launched = InFlight(step, functools.partial(self._finish, step, self._run(step, staged, padded)), read, finish_late=False)
        if not awaits_masks:
            launched.constrain(None)
        return launched

    # on the device, in the order of the steps

    @torch.inference_mode()
    def _run(self, step: ScheduledStep, staged: StagedBatch, graph_size: int | None) -> _Forwarded:
        refused = self._set_up_slots(step)
        batch = self.batches.to_device(staged)
        variant = self._variant(row for row in step.rows if row.samples)
        plan = self.plan(batch)
        if not batch.decodes_only:
            self.fill_in_tokens(batch)
        begun = mark(self.device)
        if graph_size is None:
            sampled = self.forward_and_sample(batch, plan, variant)
        elif not batch.decodes_only:
            assert self.mixed_graphs is not None
            sampled = self.sample(batch, self.mixed_graphs.replay(graph_size)[0], variant)
        else:
            assert self.graphs is not None and self.sampling_graphs is not None
            sampled = self.graphs.replay(graph_size)
            if variant == "general":
                sampled = sampled._replace(tokens=self.sampling_graphs.replay(graph_size)[0])
        return _Forwarded(batch, sampled, refused, begun, graph_size)

    @torch.inference_mode()
    def _finish(self, step: ScheduledStep, forwarded: _Forwarded, masks: TokenMasks | None) -> Outcome:
        batch, sampled = forwarded.batch, forwarded.sampled
        if masks is not None:
            self._sample_again(step, batch, sampled, masks)
        firsts = itertools.accumulate((row.num_tokens for row in step.rows), initial=0)
        scored = {
            index: self._score(sampled.hidden[first + row.scored_offset :][: len(row.scored_ids)], row)
            for index, (row, first) in enumerate(zip(step.rows, firsts, strict=False))
            if row.scored_ids
        }
        tokens, broken_rows = self._land(sampled.tokens, self.sampler.broken_rows)
        return Outcome(
            tokens=tokens,
            broken_rows=broken_rows,
            logprobs=self._sampled_logprobs(step, sampled),
            scored=scored,
            refused=forwarded.refused,
            begun=forwarded.begun,
            done=mark(self.device),
            graph_size=forwarded.graph_size,
        )

    def _variant(self, rows: Iterable[ScheduledRow]) -> Variant:
        return "general" if any(self._general[row.slot] for row in rows) else "argmax"

    def _sample_again(self, step: ScheduledStep, batch: Batch, sampled: Sampled, masks: TokenMasks) -> None:
        """Constrained rows draw a second time, now that their masks are known; no graph and no other row knows of it."""
        sampling = [row for row in step.rows if row.samples]
        variant = self._variant(sampling[place] for place in masks.rows)
        rows = self._to_device(torch.tensor(masks.rows, dtype=torch.int64))
        slots, allowed = batch.sample_slots[rows], self._to_device(masks.bits)
        tokens = sample_again(sampled.logits[rows], slots, sampled.tokens[rows], allowed, self.sampler, variant)
        sampled.tokens.index_copy_(0, rows, tokens)

    def plan(self, batch: Batch) -> Any:
        """Attention's host work for this batch: before its forward and before its graph's replay alike."""
        return self.kernels.plan_attention(batch.attention, self.model.attention_shape)

    def forward_and_sample(self, batch: Batch, plan: Any, variant: Variant, flags: CaptureFlags = EAGER) -> Sampled:
        """The whole step on the device, as a function of the batch's tensors, the KV cache and the sampler's state.

        For a decode batch this is what a graph captures: no host reads, no shapes that depend on values.
        """
        return self.sample(batch, self.forward(batch, plan, flags), variant)

    def forward(self, batch: Batch, plan: Any, flags: CaptureFlags = EAGER) -> Tensor:
        """The layers: [T, hidden]. Capturable for any padded batch."""
        context = ForwardContext(
            attention=batch.attention,
            attention_plan=plan,
            kv_cache=self.kv_cache,
            num_tokens=batch.num_tokens,
            rows_per_rank=batch.rows_per_rank,
            flags=flags,
        )
        token_ids = self.sampler.last_tokens[batch.sample_slots] if batch.decodes_only else batch.token_ids
        return self.model.forward(token_ids, batch.positions, context)

    def fill_in_tokens(self, batch: Batch) -> None:
        """The decode rows' tokens, which only the device knows, into a mixed batch."""
        decoding = batch.num_decode_rows
        batch.token_ids[:decoding] = self.sampler.last_tokens[batch.sample_slots[:decoding]]

    def sample(self, batch: Batch, hidden: Tensor, variant: Variant) -> Sampled:
        """The head and the next tokens, from the layers' output [T, hidden]. Of a decode batch, which has a row for each token,
        capturable."""
        wanted = hidden if batch.decodes_only else hidden[batch.sample_index]
        if wanted.shape[0] == 0:  # only parts of prompts: the head would read all its weights for nothing
            nothing = batch.sample_slots
            return Sampled(nothing, hidden.new_empty((0, self.limits.vocab_size)), hidden)
        logits = self.model.compute_logits(wanted)
        tokens = sample(logits, batch.sample_slots, self.sampler, variant)
        return Sampled(tokens, logits, hidden)

    def _set_up_slots(self, step: ScheduledStep) -> dict[int, str]:
        """Tell the sampler of new requests. One that it cannot serve runs on, unheard, until the scheduler drops it."""
        refused = {}
        for index, row in enumerate(step.rows):
            if row.setup is None:
                continue
            self.sampler.broken_rows[row.slot].zero_()
            try:
                self.sampler.set_slot(row.slot, row.setup.sampling, row.setup.prompt_token_ids, ())
                self._general[row.slot] = needs_general(row.setup.sampling)
            except Exception as error:
                log.exception("request %d: its sampling parameters were refused", row.request_id)
                refused[index] = f"the sampling parameters could not be applied: {error}"
                self.sampler.clear_slot(row.slot)
                self._general[row.slot] = False
        return refused

    def _score(self, hidden: Tensor, row: ScheduledRow) -> list[Logprobs]:
        """Log-probabilities of the prompt tokens that `hidden` [n, H] predicts, in pieces that bound the memory of logits."""
        piece = max(1, SCORING_LOGITS_BYTES // (4 * self.limits.vocab_size))
        scores = []
        for start in range(0, len(row.scored_ids), piece):
            targets = torch.tensor(row.scored_ids[start : start + piece], dtype=torch.int64)
            logits = self.model.compute_logits(hidden[start : start + piece])
            scores.append(self._host_logprobs(gather_logprobs(logits, self._to_device(targets), row.scored_top)))
        return scores

    def _sampled_logprobs(self, step: ScheduledStep, sampled: Sampled) -> Logprobs | None:
        asked = [row.logprobs for row in step.rows if row.samples]
        wanted = [index for index, count in enumerate(asked) if count is not None]
        if not wanted:
            return None
        logits, tokens = sampled.logits[: len(asked)], sampled.tokens[: len(asked)]
        if len(wanted) < len(asked):
            chosen = self._to_device(torch.tensor(wanted, dtype=torch.int64))
            logits, tokens = logits[chosen], tokens[chosen]
        return self._host_logprobs(gather_logprobs(logits, tokens, max(count or 0 for count in asked)))

    # to and from the device

    def _to_device(self, values: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return values
        return values.pin_memory().to(self.device, non_blocking=True)

    def _land(self, tokens: Tensor, broken_rows: Tensor) -> tuple[Tensor, Tensor]:
        """A step's numbers on their way to the host; good until the next but one."""
        self._landing.reverse()
        there = self._landing[0]
        return there[0][: len(tokens)].copy_(tokens, non_blocking=True), there[1].copy_(broken_rows, non_blocking=True)

    def _to_host(self, values: Tensor) -> Tensor:
        """A copy that is under way; its pinned memory is not reused before the copy has run."""
        if self.device.type == "cpu":
            return values
        return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)

    def _host_logprobs(self, values: Logprobs) -> Logprobs:
        return Logprobs(*(self._to_host(value) for value in values))

    # on the host

    def _read(self, step: ScheduledStep, eager_reason: str, outcome: Outcome) -> StepResult:
        result = step_outcome.read(step, outcome, eager_reason)
        if result.eager_reason is not None and not self._told_eager and eager_reason != BESIDE_PROMPTS:
            self._told_eager = True
            log.warning("decode steps run eagerly (%s); counted in the step statistics", eager_reason)
        return result
