"""What graphs record of a runner's steps, from padding at each size's addresses: captured, rehearsed and dropped together.

Chooses no sizes, and knows of CUDA no more than a recorder.
"""

from __future__ import annotations

import functools
import itertools
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minserve.capture_flags import CaptureFlags
from minserve.models.sampler import Variant, sample, take_back
from minserve.runtime.batch import Batch
from minserve.runtime.cuda_graph import Recorder, StepGraphs, Work
from minserve.runtime.model_runner import NO_GRAPHS, ModelRunner, Sampled


def padding(runner: ModelRunner, size: int) -> tuple[Batch, Any]:
    """A decode batch of padding at the size's addresses, and attention's plan for it."""
    batch = runner.batches.to_device(runner.batches.stage(runner.batches.padding(size), size))
    return batch, runner.plan(batch)


def decode_graphs(runner: ModelRunner, sizes: Sequence[int], recorder: Recorder) -> StepGraphs[Sampled]:
    """Of whole decode steps, whose tokens are the argmax."""

    def prepare(size: int) -> Work[Sampled]:
        batch, plan = padding(runner, size)

        @torch.inference_mode()
        def work(flags: CaptureFlags) -> Sampled:
            return runner.forward_and_sample(batch, plan, "argmax", flags)

        return work

    return StepGraphs(prepare, sizes, recorder, runner.kernels.forget_graphs)


def sampling_graphs(runner: ModelRunner, decode: StepGraphs[Sampled], recorder: Recorder) -> StepGraphs[tuple[Tensor]]:
    """Of other tokens than the argmax, from the logits that a decode graph of the same size, captured before, leaves."""

    @torch.inference_mode()
    def prepare(size: int) -> Work[tuple[Tensor]]:
        slots = padding(runner, size)[0].sample_slots
        left = decode.result(size)
        left.tokens.zero_()  # nothing was left there yet, and a warm-up takes these tokens back
        left.logits.zero_()

        @torch.inference_mode()
        def work(flags: CaptureFlags) -> tuple[Tensor]:
            del flags
            take_back(slots, left.tokens, runner.sampler)
            return (sample(left.logits, slots, runner.sampler, "general"),)

        return work

    return StepGraphs(prepare, decode.sizes, recorder, kind="sampling")


def mixed_graphs(runner: ModelRunner, sizes: Sequence[int], recorder: Recorder) -> StepGraphs[tuple[Tensor]]:
    """Of the layers of steps that hold prompts, by their tokens."""

    def prepare(tokens: int) -> Work[tuple[Tensor]]:
        batch = runner.batches.to_device(runner.batches.stage(runner.batches.padding_prompts(tokens), tokens))
        plan = runner.plan(batch)

        @torch.inference_mode()
        def work(flags: CaptureFlags) -> tuple[Tensor]:
            return (runner.forward(batch, plan, flags),)

        return work

    return StepGraphs(prepare, sizes, recorder, kind="mixed")


def capture(
    runner: ModelRunner,
    recorder: Recorder,
    sizes: Sequence[int],
    mixed_sizes: Sequence[int] = (),
    on_progress: Callable[[float], None] = lambda _: None,
) -> None:
    """Decode steps of these batch sizes and mixed ones of these tokens, which the runner replays from now on.

    Raises ValueError when a full step would not fit the largest graph, and what `StepGraphs.capture` raises; then there are none.
    """
    if max(sizes) < runner.limits.max_num_seqs:
        raise ValueError(f"the largest graph holds {max(sizes)} rows, and {runner.limits.max_num_seqs} may run at once")
    runner.mixed_graphs = mixed_graphs(runner, mixed_sizes, recorder) if mixed_sizes else None
    runner.graphs = decode_graphs(runner, sizes, recorder)
    runner.sampling_graphs = sampling_graphs(runner, runner.graphs, recorder)
    every: list[StepGraphs[Any]] = [
        graphs for graphs in (runner.mixed_graphs, runner.graphs, runner.sampling_graphs) if graphs is not None
    ]
    total, done = sum(len(graphs.sizes) for graphs in every), 0

    def tell(before: int, count: int, part: float) -> None:
        on_progress((before + part * count) / total)

    try:
        for graphs in every:
            graphs.capture(functools.partial(tell, done, len(graphs.sizes)))
            done += len(graphs.sizes)
    except BaseException:
        drop(runner)
        raise
    runner.eager_reason = f"more rows than the largest graph's {max(sizes)}"


def drop(runner: ModelRunner) -> None:
    """Gives the graphs' memory back; steps run eagerly from now on."""
    for graphs in (runner.sampling_graphs, runner.graphs, runner.mixed_graphs):
        if graphs is not None:
            graphs.destroy()
    runner.graphs = runner.sampling_graphs = runner.mixed_graphs = None
    runner.eager_reason = NO_GRAPHS


@torch.inference_mode()
def rehearse(runner: ModelRunner) -> None:
    """Sample in every size and way as mixed steps do: none of them shall be the first to load a kernel or to ask for memory,
    which waits until the device rests."""
    if runner.graphs is None or runner.mixed_graphs is None:
        return
    tokens = runner.mixed_graphs.sizes[0]
    for size, variant in itertools.product(reversed(runner.graphs.sizes), typing.get_args(Variant)):
        batch = runner.batches.to_device(runner.batches.stage(runner.batches.padding_prompts(1), tokens, sampling=size))
        runner.sample(batch, runner.mixed_graphs.result(tokens)[0], variant).tokens.tolist()  # the staging buffers take turns
