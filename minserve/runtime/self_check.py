"""Proves captured steps before the first request: each replay equals an eager run bit for bit, on few streams.

For each size the unused cache, the padding rows and the graph's outputs are filled with NaN, the inputs are new ones, and most
graphs are replayed twice. Works on pages and slots that nobody has yet, and leaves none of it behind. Reductions here are
deterministic, so any difference is a fault: a stale pointer, a missed join, padding that leaks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from minserve.errors import SelfCheckFailed
from minserve.models.decoder import Decoder
from minserve.models.model import Model
from minserve.models.sampler import SamplerState, Variant
from minserve.request import SamplingParams
from minserve.runtime.batch import Batch
from minserve.runtime.cuda_graph import StepGraphs
from minserve.runtime.model_runner import ModelRunner
from minserve.runtime.poisoned_cache import PoisonedCache
from minserve.runtime.replay_streams import count_all_streams
from minserve.runtime.scheduler import Limits
from minserve.runtime.step import ScheduledRow, ScheduledStep
from minserve.runtime.step_outcome import mark

_ROW_PAGES = 4
_LONG_ROW_TOKENS = 2048
_STATE = ("output_index", "last_tokens", "broken_rows", "token_counts")
"""What sampling writes."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes: two numbers are the same when these are, NaN included."""

log = logging.getLogger("minserve.runtime")


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One batch: its graphs, and one eager run."""

    size: int
    real: int
    """Rows, or tokens of a mixed step, that are no padding."""
    seed: int
    kind: Literal["decode", "mixed"] = "decode"
    replays: int = 2
    """Of each graph."""

    def graph(self, variant: Variant) -> str:
        """For a person."""
        if self.kind == "mixed":
            return f"the mixed graph of {self.size} tokens ({self.real} filled)"
        what = "decode" if variant == "argmax" else "sampling"
        return f"the {what} graph of batch size {self.size} ({self.real} rows filled)"


class _Doubt(NamedTuple):
    """Rows that should have passed a comparison."""

    broken: Tensor
    """bool [real]"""
    sentence: Callable[[], str]


class _Doubts:
    """All of a trial, on their way to the host."""

    def __init__(self, doubts: list[_Doubt]) -> None:
        found = torch.stack([doubt.broken for doubt in doubts]).any(1)
        self._doubts = doubts
        self._found = found.to("cpu", non_blocking=True)
        self._arrived = mark(found.device)

    def settle(self) -> None:
        """Waits for the device. Raises SelfCheckFailed with the first that was right."""
        if isinstance(self._arrived, torch.cuda.Event):
            self._arrived.synchronize()
        for doubt, broken in zip(self._doubts, self._found.tolist(), strict=True):
            if broken:
                raise SelfCheckFailed(doubt.sentence())


@dataclasses.dataclass(frozen=True, slots=True)
class GraphVerdict:
    """What was proven. A failure is an exception."""

    comparisons: int
    streams: dict[int, int]
    """Size to streams at replay; empty where no profiler could see the device."""


def check_graphs(
    runner: ModelRunner, level: Literal["fast", "full"], on_progress: Callable[[float], None] = lambda _: None
) -> GraphVerdict:
    """Every captured size of the runner, before it has served anything. Raises SelfCheckFailed saying what differed.

    `on_progress` hears the fraction that is done, each time while the device works; the longest work is the first.
    """
    graphs = runner.graphs
    if graphs is None:
        return GraphVerdict(0, {})
    trials = _trials(graphs.sizes, level, min(runner.limits.max_num_seqs, runner.limits.num_pages))
    if runner.mixed_graphs is not None:
        sizes = _replayed(runner.mixed_graphs.sizes, runner.limits)
        mixed = [_mixed_trial(size, level, len(trials) + size, smallest=size == sizes[0]) for size in reversed(sizes)]
        # In turns: while the device computes a large batch, the host launches a small one.
        trials = [trial for pair in itertools.zip_longest(mixed, trials) for trial in pair if trial is not None]
    before = _copies(runner.sampler, (*_STATE[:-1], "reals", "integers"))
    cache = PoisonedCache(runner.kv_cache, runner.model.attention_shape, runner.limits.page_size)
    comparisons = 0
    try:
        with _poisoned_token(runner.model) as poison:
            previous: _Doubts | None = None
            for done, trial in enumerate(trials):
                try:
                    compared, launched = _launch(runner, trial, cache, poison)
                    on_progress(done / len(trials))
                except Exception:
                    log.debug("self-check: %s", trial.graph("argmax"), exc_info=True)  # what the one before finds may explain it
                    raise
                finally:
                    if previous is not None:
                        previous.settle()
                previous = launched
                comparisons += compared
            if previous is not None:
                previous.settle()
        streams = count_all_streams(runner, graphs) if runner.device.type == "cuda" else {}
    finally:
        cache.clear()
        _put_back(runner.sampler, before)
        runner.sampler.token_counts.zero_()
        runner.sampler.in_prompt.zero_()
    on_progress(1.0)
    return GraphVerdict(comparisons, streams)


def _trials(sizes: tuple[int, ...], level: Literal["fast", "full"], most_rows: int) -> list[Trial]:
    trials: list[Trial] = []
    for size in sizes:
        # Padding is tried at every size, the last rows of what all sizes share at the largest.
        reals = {1, size // 2 + 1, size} if level == "full" else {_most(size)} | ({size} if size == sizes[-1] else set())
        for real in sorted({min(real, most_rows) for real in reals}):
            trials.append(Trial(size, real, seed=len(trials)))
    return trials


def _mixed_trial(size: int, level: Literal["fast", "full"], seed: int, *, smallest: bool) -> Trial:
    """A large step takes the device longer than its launches take the host. What one replay leaves behind for the next meets the
    next layer first, so the smallest tells it for all."""
    return Trial(size, _most(size), seed, "mixed", replays=2 if smallest or level == "full" else 1)


def _most(size: int) -> int:
    """Of a batch of that size, with some padding behind."""
    return max(1, size - max(1, size // 8))


def _replayed(sizes: tuple[int, ...], limits: Limits) -> list[int]:
    """Those that a step may need: a cache too small for a step that the size before would not hold leaves the others unused, and
    they could only be checked with fewer tokens than they are ever replayed with."""
    most = min(limits.num_pages * limits.page_size, limits.max_num_seqs * limits.max_model_len)
    return [size for before, size in zip((0, *sizes), sizes, strict=False) if before < most]


@torch.inference_mode()
def _launch(runner: ModelRunner, trial: Trial, cache: PoisonedCache, poison: int | None) -> tuple[int, _Doubts]:
    """How many graphs are compared, and with what outcome. Waits for nothing."""
    dice = random.Random(trial.seed)
    decodes = trial.kind == "decode"
    step = (_random_step if decodes else _random_mixed_step)(runner, trial, dice)
    trial = dataclasses.replace(trial, real=step.num_tokens)
    graphs: StepGraphs[Any] | None = runner.graphs if decodes else runner.mixed_graphs
    draws = runner.sampling_graphs
    assert graphs is not None and draws is not None
    _set_up_slots(runner.sampler, step, dice)
    if poison is not None:
        runner.sampler.last_tokens[runner.limits.max_num_seqs].fill_(poison)
    batch = runner.batches.to_device(runner.batches.stage(step, trial.size))
    if decodes:
        batch = _poison_padding(batch, trial.real)
    else:
        runner.fill_in_tokens(batch)
        batch.token_ids[trial.real :].fill_(0 if poison is None else poison)
    plan = runner.plan(batch)
    start = _copies(runner.sampler, _STATE)
    cache.fill(step, trial.seed)
    places = cache.places(batch.attention.slot_mapping[: trial.real])

    def layers(hidden: Tensor) -> dict[str, Tensor]:
        return {"hidden": hidden[: trial.real].clone(), "KV entries": cache.read(places)}

    def sampled(tokens: Tensor) -> dict[str, Tensor]:
        slots = batch.sample_slots[: trial.real]
        left = {"last tokens": runner.sampler.last_tokens[slots], "output index": runner.sampler.output_index[slots]}
        return {"tokens": tokens[: trial.real].clone()} | left

    def replay() -> dict[Variant, dict[str, Tensor]]:
        _put_back(runner.sampler, start)
        cache.poison(places)
        left = _replay_over_nan(graphs, trial.size)
        if not decodes:
            return {"argmax": layers(left[0])}
        tokens = sampled(left.tokens)
        drawn = sampled(_replay_over_nan(draws, trial.size)[0])
        # Read last: a step goes on with what its decode graph has left after both.
        return {"argmax": layers(left.hidden) | {"logits": left.logits[: trial.real].clone()} | tokens, "general": drawn}

    def eager() -> dict[Variant, dict[str, Tensor]]:
        _put_back(runner.sampler, start)
        cache.poison(places)
        hidden = runner.forward(batch, plan)
        results: dict[Variant, dict[str, Tensor]] = {"argmax": layers(hidden)}
        if decodes:
            left = runner.sample(batch, hidden, "argmax")
            results["argmax"] |= {"logits": left.logits[: trial.real]} | sampled(left.tokens)
            _put_back(runner.sampler, start)
            results["general"] = sampled(runner.sample(batch, hidden, "general").tokens)
        return results

    # The graphs first: what they read by mistake must not be what another run of the same batch has just left there.
    first, *again = (replay() for _ in range(trial.replays))
    wanted = eager()
    doubts: list[_Doubt] = []
    for variant, values in first.items():
        what = trial.graph(variant)
        for second in again:
            doubts += _differences(
                f"{what}: replayed twice with the same inputs, it does not repeat itself", values, second[variant]
            )
        doubts += _differences(f"{what}: it does not equal an eager run of the same batch", values, wanted[variant])
        doubts += _not_numbers(what, values)
    cache.poison_pages()
    return len(first), _Doubts(doubts)


def _replay_over_nan(graphs: StepGraphs[Any], size: int) -> Any:
    """What is left in its result is what it has written."""
    for tensor in graphs.result(size):
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    return graphs.replay(size)


def _random_step(runner: ModelRunner, trial: Trial, dice: random.Random) -> ScheduledStep:
    """Rows of random lengths on random pages, the first a long one."""
    limits = runner.limits
    page_size, longest = limits.page_size, limits.max_model_len
    wanted = _ROW_PAGES * trial.real + -(-min(_LONG_ROW_TOKENS, longest) // page_size)
    pages = dice.sample(range(1, limits.num_pages + 1), min(wanted, limits.num_pages))
    slots = dice.sample(range(limits.max_num_seqs), trial.real)
    each = max(1, min(_ROW_PAGES, len(pages) // trial.real, -(-longest // page_size)))
    rows = []
    for index in range(trial.real - 1, -1, -1):
        count = each if index else min(len(pages), -(-min(_LONG_ROW_TOKENS, longest) // page_size))
        own = tuple(pages.pop() for _ in range(count))
        most = min(count * page_size, longest)
        length = dice.randint(1, most) if index else max(1, most - dice.randint(0, page_size - 1))
        rows.append(
            ScheduledRow(request_id=index, slot=slots[index], start=length - 1, num_tokens=1, new_pages=own, samples=True)
        )
    return ScheduledStep.of(0, rows, len(rows))


def _random_mixed_step(runner: ModelRunner, trial: Trial, dice: random.Random) -> ScheduledStep:
    """Some decode rows, then parts of prompts that have read some tokens before, on random pages."""
    limits = runner.limits
    page_size = limits.page_size
    most_pages = -(-trial.real // page_size) + 2 * limits.max_num_seqs  # no row begins on its first page or ends on its last
    pages = dice.sample(range(1, limits.num_pages + 1), min(most_pages, limits.num_pages))
    slots = dice.sample(range(limits.max_num_seqs), limits.max_num_seqs)
    longest = max(1, min(limits.max_model_len - 1, -(-trial.real // 2) + page_size))
    rows: list[ScheduledRow] = []
    left, num_decode_rows = trial.real, min(3, limits.max_num_seqs - 1, limits.num_pages - 1)
    while left and slots and pages:
        decodes = len(rows) < num_decode_rows
        start = dice.randrange(min(page_size, longest))
        most = min(longest - start, len(pages) * page_size - start, left)
        length = 1 if decodes else max(1, most)
        own = tuple(pages.pop() for _ in range(-(-(start + length) // page_size)))
        tokens = () if decodes else tuple(dice.choices(range(limits.vocab_size - 1), k=length))
        row = ScheduledRow(
            request_id=len(rows), slot=slots.pop(), start=start, num_tokens=length, token_ids=tokens, new_pages=own, samples=True
        )
        rows.append(row)
        left -= length
    return ScheduledStep.of(0, rows, min(num_decode_rows, len(rows)))


def _set_up_slots(sampler: SamplerState, step: ScheduledStep, dice: random.Random) -> None:
    """Each row asks for something else; argmax sampling reads none of it, and never gives what the first row's bias gives."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {3: 100.0}},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.5},
        {"temperature": 0.0},
    ]
    for index, row in enumerate(step.rows):
        params = SamplingParams(max_tokens=8, seed=index, **kinds[index % 4])
        known = [dice.randrange(sampler.vocab_size) for _ in range(4)]
        sampler.set_slot(row.slot, params, known[:2], known[2:])
        sampler.last_tokens[row.slot].fill_(dice.randrange(sampler.vocab_size - 1))  # the last id may be poisoned


@contextlib.contextmanager
def _poisoned_token(model: Model) -> Iterator[int | None]:
    """A token whose embedding is NaN meanwhile: padding rows that read it compute NaN in every layer, whatever the kernels do
    with a NaN in the cache. None where the head shares the matrix, and all logits would be NaN with it."""
    if not isinstance(model, Decoder) or model.config.tie_word_embeddings:
        yield None
        return
    token_id = model.config.vocab_size - 1
    row = model.embedding.weight.detach()[token_id]
    values = row.clone()
    row.fill_(torch.nan)
    try:
        yield token_id
    finally:
        row.copy_(values)


def _poison_padding(batch: Batch, real: int) -> Batch:
    """Padding rows read one position beyond the one they write, which is NaN: all that they compute becomes NaN."""
    batch.attention.seq_lens[real:].fill_(2)
    lengths = batch.attention.seq_lens_host
    attention = dataclasses.replace(batch.attention, seq_lens_host=(*lengths[:real], *(2 for _ in lengths[real:])))
    return dataclasses.replace(batch, attention=attention)


def _differences(how: str, first: dict[str, Tensor], second: dict[str, Tensor]) -> Iterator[_Doubt]:
    """What of two runs is not the same bit for bit; each [real, ...]."""
    for name, values in first.items():
        yield _Doubt(
            (_bits(values) != _bits(second[name])).reshape(len(values), -1).any(1),
            functools.partial(_difference, how, name, values, second[name]),
        )


def _difference(how: str, name: str, first: Tensor, second: Tensor) -> str:
    rows = _rows((_bits(first) != _bits(second)).reshape(len(first), -1).any(1))
    distance = (first.double() - second.double()).abs().max().item()
    return f"{how}: {name} differ in {rows} (by {distance:.3g} at most)"


def _not_numbers(what: str, values: dict[str, Tensor]) -> Iterator[_Doubt]:
    for name, some in values.items():
        if some.is_floating_point():
            broken = ~torch.linalg.vector_norm(some, torch.inf, dim=tuple(range(1, some.dim()))).isfinite()
            sentence = functools.partial(_not_a_number, what, name, broken)
            yield _Doubt(broken, sentence)


def _not_a_number(what: str, name: str, broken: Tensor) -> str:
    return f"{what}: {name} of {_rows(broken)} are not numbers; padding or unused cache reaches them"


def _bits(values: Tensor) -> Tensor:
    return values.view(_INTEGERS[values.element_size()])


def _rows(flags: Tensor) -> str:
    found = flags.nonzero().flatten().tolist()
    shown = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
    return f"{'row' if len(found) == 1 else 'rows'} {shown}"


def _copies(sampler: SamplerState, names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: getattr(sampler, name).clone() for name in names}


def _put_back(sampler: SamplerState, copies: dict[str, Tensor]) -> None:
    for name, values in copies.items():
        getattr(sampler, name).copy_(values)
