"""On how many streams captured steps run when they are replayed, which no capture tells. Compares nothing that they compute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.autograd.profiler
from torch._C._autograd import DeviceType

from minserve.errors import SelfCheckFailed
from minserve.runtime import captured_steps
from minserve.runtime.cuda_graph import StepGraphs
from minserve.runtime.model_runner import ModelRunner, Sampled

MOST_STREAMS = 3
"""At replay, whatever the number of layers: main, alt, and one that a library may own."""
_UNCOUNTED = ("Memcpy", "Memset", "nccl")
"""No kernels, or NCCL's, which branches off for each of its own."""
_MARK = "spin_kernel"
"""What the profiler calls the kernel of torch.cuda._sleep."""


def count_all_streams(runner: ModelRunner, graphs: StepGraphs[Sampled]) -> dict[int, int]:
    """Size to streams at replay; empty where no profiler sees the device. Raises SelfCheckFailed when there are too many."""

    def replays() -> Iterator[Callable[[], object]]:
        for size in graphs.sizes:
            captured_steps.padding(runner, size)
            yield functools.partial(graphs.replay, size)

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
