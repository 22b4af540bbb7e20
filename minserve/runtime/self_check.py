"""Proves captured steps before the first request: each replay equals an eager run bit for bit, on few streams.

For each size the unused cache, the padding rows and the graph's outputs are filled with NaN, the inputs are new ones, and the
graph is replayed twice. Works on pages and slots that nobody has yet, and leaves none of it behind. Reductions here are
deterministic, so any difference is a fault: a stale pointer, a missed join, padding that leaks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
import torch.autograd.profiler
from torch import Tensor
from torch._C._autograd import DeviceType

from minserve.errors import SelfCheckFailed
from minserve.models.decoder import Decoder
from minserve.models.model import Model
from minserve.models.sampler import SamplerState, Variant
from minserve.request import SamplingParams
from minserve.runtime.batch import Batch
from minserve.runtime.cuda_graph import VARIANTS, StepGraphs
from minserve.runtime.model_runner import ModelRunner, Sampled
from minserve.runtime.scheduler import Limits
from minserve.runtime.step import ScheduledRow, ScheduledStep

MOST_STREAMS = 3
"""At replay, whatever the number of layers: main, alt, and one that a library may own."""
_ROW_PAGES = 4
_LONG_ROW_TOKENS = 2048
_STATE = ("output_index", "last_tokens", "broken_rows", "token_counts")
"""What sampling writes."""
_UNCOUNTED = ("Memcpy", "Memset", "nccl")
"""No kernels, or NCCL's, which branches off for each of its own."""
_MARK = "spin_kernel"
"""What the profiler calls the kernel of torch.cuda._sleep."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One comparison."""

    size: int
    variant: Variant
    real: int
    """Rows, or tokens of a mixed step, that are no padding."""
    seed: int
    kind: Literal["decode", "mixed"] = "decode"

    def __str__(self) -> str:
        if self.kind == "mixed":
            return f"the mixed graph of {self.size} tokens ({self.real} filled)"
        return f"the decode graph of batch size {self.size} ({self.variant} sampling, {self.real} rows filled)"


@dataclasses.dataclass(frozen=True, slots=True)
class GraphVerdict:
    """What was proven. A failure is an exception."""

    comparisons: int
    streams: dict[int, int]
    """Size to streams at replay; empty where no profiler could see the device."""


def check_graphs(
    runner: ModelRunner, level: Literal["fast", "full"], on_progress: Callable[[float], None] = lambda _: None
) -> GraphVerdict:
    """Every captured size of the runner, before it has served anything. Raises SelfCheckFailed saying what differed."""
    graphs = runner.graphs
    if graphs is None:
        return GraphVerdict(0, {})
    trials = list(_trials(graphs.sizes, level, min(runner.limits.max_num_seqs, runner.limits.num_pages)))
    if runner.mixed_graphs is not None:
        sizes = _replayed(runner.mixed_graphs.sizes, runner.limits)
        trials += [Trial(size, "argmax", size - size // 8, len(trials) + size, "mixed") for size in sizes]
    before = _copies(runner.sampler, (*_STATE[:-1], "reals", "integers"))
    try:
        _poison(runner, ...)
        with _poisoned_token(runner.model) as poison:
            for done, trial in enumerate(trials):
                on_progress(done / len(trials))
                _check(runner, trial, poison)
        streams = _count_all_streams(runner, graphs) if runner.device.type == "cuda" else {}
    finally:
        for layer in runner.kv_cache:
            layer.zero_()
        _put_back(runner.sampler, before)
        runner.sampler.token_counts.zero_()
        runner.sampler.in_prompt.zero_()
    on_progress(1.0)
    return GraphVerdict(len(trials), streams)


def _trials(sizes: tuple[int, ...], level: Literal["fast", "full"], most_rows: int) -> list[Trial]:
    trials: list[Trial] = []
    for size in sizes:
        for variant in VARIANTS:
            # Sampling does not depend on padding, so one variant takes the padded batch and the other the full one.
            few = max(1, size - size // 3) if variant == "argmax" else size
            reals = {1, size // 2 + 1, size} if level == "full" else {few}
            for real in sorted({min(real, most_rows) for real in reals}):
                trials.append(Trial(size, variant, real, seed=len(trials)))
    return trials


def _replayed(sizes: tuple[int, ...], limits: Limits) -> list[int]:
    """Those that a step may need: a cache too small for a step that the size before would not hold leaves the others unused, and
    they could only be checked with fewer tokens than they are ever replayed with."""
    most = min(limits.num_pages * limits.page_size, limits.max_num_seqs * limits.max_model_len)
    return [size for before, size in zip((0, *sizes), sizes, strict=False) if before < most]


@torch.inference_mode()
def _check(runner: ModelRunner, trial: Trial, poison: int | None) -> None:
    dice = random.Random(trial.seed)
    decodes = trial.kind == "decode"
    step = (_random_step if decodes else _random_mixed_step)(runner, trial, dice)
    trial = dataclasses.replace(trial, real=step.num_tokens)
    graphs: StepGraphs[Any] | None = runner.graphs if decodes else runner.mixed_graphs
    assert graphs is not None
    slots = torch.tensor([row.slot for row in step.rows], device=runner.device)
    _set_up_slots(runner.sampler, step, trial.variant, dice)
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
    _fill_cache(runner, step, trial.seed)
    where = _places(runner, batch.attention.slot_mapping[: trial.real])

    def outcome(run: Callable[[], Sampled | tuple[Tensor]]) -> dict[str, Tensor]:
        _put_back(runner.sampler, start)
        _poison(runner, where)
        return _results(run(), runner, where, slots, trial.real)

    def replay() -> Sampled | tuple[Tensor]:
        for tensor in graphs.result(trial.size, trial.variant):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        result: Sampled | tuple[Tensor] = graphs.replay(trial.size, trial.variant)
        return result

    def eager() -> Sampled | tuple[Tensor]:
        return runner.forward_and_sample(batch, plan, trial.variant) if decodes else (runner.forward(batch, plan),)

    first = outcome(replay)
    _compare(trial, "replayed twice with the same inputs, it does not repeat itself", first, outcome(replay))
    _compare(trial, "it does not equal an eager run of the same batch", first, outcome(eager))
    for name, values in first.items():
        broken = (~values.isfinite()).reshape(len(values), -1).any(1)
        if bool(broken.any()):
            raise SelfCheckFailed(f"{trial}: {name} of {_rows(broken)} are not numbers; padding or unused cache reaches them")
    _poison(runner, torch.tensor([page for row in step.rows for page in row.new_pages], device=runner.device))


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
    pages = dice.sample(range(1, limits.num_pages + 1), limits.num_pages)
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
        tokens = () if decodes else tuple(dice.randrange(limits.vocab_size - 1) for _ in range(length))
        row = ScheduledRow(
            request_id=len(rows), slot=slots.pop(), start=start, num_tokens=length, token_ids=tokens, new_pages=own, samples=True
        )
        rows.append(row)
        left -= length
    return ScheduledStep.of(0, rows, min(num_decode_rows, len(rows)))


def _set_up_slots(sampler: SamplerState, step: ScheduledStep, variant: Variant, dice: random.Random) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {3: 2.5}},
    ]
    for index, row in enumerate(step.rows):
        params = SamplingParams(max_tokens=8, seed=index, **(kinds[0] if variant == "argmax" else kinds[index % 4]))
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


def _fill_cache(runner: ModelRunner, step: ScheduledStep, seed: int) -> None:
    """Random numbers where the rows' earlier tokens lie, NaN in the rest of their pages and in the dummy page."""
    page_size, shape = runner.limits.page_size, runner.model.attention_shape
    pages, lengths = [0], [0]
    for row in step.rows:
        pages += row.new_pages
        lengths += [min(max(row.start - page * page_size, 0), page_size) for page in range(len(row.new_pages))]
    where = torch.tensor(pages, device=runner.device)
    unused = torch.arange(page_size, device=runner.device) >= torch.tensor(lengths, device=runner.device).unsqueeze(1)
    mask = unused[:, :, None] if shape.kind == "mla" else unused[:, None, :, None, None]
    generator = torch.Generator(runner.device).manual_seed(seed)
    for layer in runner.kv_cache:
        values = torch.empty((len(pages), *layer.shape[1:]), dtype=layer.dtype, device=layer.device)
        layer[where] = values.normal_(generator=generator).masked_fill_(mask, torch.nan)


def _places(runner: ModelRunner, slot_mapping: Tensor) -> tuple[Any, ...]:
    """Where in each layer of the cache a step writes its tokens' entries."""
    pages, offsets = slot_mapping // runner.limits.page_size, slot_mapping % runner.limits.page_size
    return (pages, offsets) if runner.model.attention_shape.kind == "mla" else (pages, slice(None), offsets)


def _poison(runner: ModelRunner, where: Any) -> None:
    for layer in runner.kv_cache:
        layer[where] = torch.nan


def _results(left: Sampled | tuple[Tensor], runner: ModelRunner, where: Any, slots: Tensor, real: int) -> dict[str, Tensor]:
    """Copies of all that the step left for its real rows, each [real, ...]."""
    entries = {"KV entries": torch.stack([layer[where].flatten(1) for layer in runner.kv_cache], dim=1)}
    if not isinstance(left, Sampled):
        return {"hidden": left[0][:real].clone()} | entries
    last = {"last tokens": runner.sampler.last_tokens[slots], "output index": runner.sampler.output_index[slots]}
    return {name: getattr(left, name)[:real].clone() for name in ("hidden", "logits", "tokens")} | entries | last


def _compare(trial: Trial, how: str, first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name, values in first.items():
        other = second[name]
        different = (_bytes(values) != _bytes(other)).any(1)
        if bool(different.any()):
            distance = (values.double() - other.double()).abs().max().item()
            raise SelfCheckFailed(f"{trial}: {how}: {name} differ in {_rows(different)} (by {distance:.3g} at most)")


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(values.shape[0], -1).view(torch.uint8)


def _rows(flags: Tensor) -> str:
    found = flags.nonzero().flatten().tolist()
    shown = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
    return f"{'row' if len(found) == 1 else 'rows'} {shown}"


def _copies(sampler: SamplerState, names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: getattr(sampler, name).clone() for name in names}


def _put_back(sampler: SamplerState, copies: dict[str, Tensor]) -> None:
    for name, values in copies.items():
        getattr(sampler, name).copy_(values)


# streams


def _count_all_streams(runner: ModelRunner, graphs: StepGraphs[Sampled]) -> dict[int, int]:
    def replays() -> Iterator[Callable[[], object]]:
        for size in graphs.sizes:
            runner.prepare_padding(size)
            yield functools.partial(graphs.replay, size, "argmax")

    found = kernel_streams(replays())
    counts = {size: len(set(streams)) for size, streams in zip(graphs.sizes, found, strict=False)}
    for size, count in counts.items():
        if count > MOST_STREAMS:
            raise SelfCheckFailed(
                f"the decode graph of batch size {size} runs on {count} streams, more than {MOST_STREAMS}: a side block is "
                "recorded before the main one, or a fork has no work; each layer then pays for a change of stream"
            )
    return counts


def kernel_streams(runs: Iterable[Callable[[], object]]) -> list[list[int]]:
    """Of each run the streams of the kernels that it launches; empty when the profiler sees nothing.

    Only replays show them: during capture there is one stream for each that the program names. All runs share one trace, which
    costs more than a replay. What `runs` itself launches between them is not counted. torch.profiler would import half of
    torch's compiler.
    """
    with torch.autograd.profiler.profile(use_device="cuda", use_cpu=False, use_kineto=True) as profile:
        for run in runs:
            torch.cuda._sleep(1)  # a kernel that can be told from all others
            run()
            torch.cuda._sleep(1)
        torch.cuda.synchronize()
    found: list[list[int]] = []
    inside = False
    events = [] if profile.kineto_results is None else profile.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if _MARK in event.name():
            inside = not inside
            if inside:
                found.append([])
        elif inside and event.device_type() == DeviceType.CUDA and not event.name().startswith(_UNCOUNTED):
            found[-1].append(event.device_resource_id())
    return found
