"""Graphs without a GPU: a recorder whose graphs run their work again, over the same buffers, with the plan of their size.

What a CUDA graph would freeze stays frozen here: the batch's tensors, the plan object and the place of the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minserve.capture_flags import CaptureFlags
from minserve.kernels import reference
from minserve.kernels.interface import AttentionMetadata, AttentionShape, Kernels, kv_page_shape
from minserve.runtime import captured_steps
from minserve.runtime.capture_mode import current_flags
from minserve.runtime.model_runner import ModelRunner
from minserve.runtime.scheduler import Limits


class FakeGraph:
    def __init__(self, work: Callable[[], Any], result: Any) -> None:
        self._work = work
        self._result = result
        self.replays = 0
        self.is_reset = False

    @torch.inference_mode()
    def replay(self) -> None:
        assert not self.is_reset
        self.replays += 1
        for place, value in zip(self._result, self._work(), strict=True):
            place.copy_(value)

    def reset(self) -> None:
        self.is_reset = True


@dataclasses.dataclass
class FakeRecorder:
    """Writes down what it was asked for, with the flags of that moment."""

    log: list[tuple[str, CaptureFlags]] = dataclasses.field(default_factory=list)
    graphs: list[FakeGraph] = dataclasses.field(default_factory=list)
    released: int = 0
    failure: BaseException | None = None
    """Raised by the recording number `fails_at`, counted from 0."""
    fails_at: int = 0
    graph_type: type[FakeGraph] = FakeGraph

    def warm_up(self, work: Callable[[], object]) -> None:
        self.log.append(("warm-up", current_flags()))
        work()

    def record(self, work: Callable[[], Any]) -> tuple[FakeGraph, Any]:
        self.log.append(("record", current_flags()))
        result = work()
        if self.failure is not None and len(self.graphs) == self.fails_at:
            raise self.failure
        self.graphs.append(self.graph_type(work, result))
        return self.graphs[-1], result

    def memory(self) -> int:
        return 1000 * len(self.graphs)

    def release(self) -> None:
        self.released += 1


class HeldPlans:
    """The reference's attention with one plan object a captured size, refilled by each step's planning as on a GPU."""

    def __init__(self) -> None:
        self._plans: dict[tuple[bool, int], Any] = {}

    def plan(self, metadata: AttentionMetadata, shape: AttentionShape) -> Any:
        fresh = reference.plan_attention(metadata, shape)
        if not metadata.graph:
            return fresh
        size = metadata.decode_only, metadata.slot_mapping.shape[0]
        held = self._plans.setdefault(size, HeldPlan(fresh.groups))
        held.groups = fresh.groups
        return held

    def forget(self) -> None:
        self._plans.clear()

    def kernels(self, **changes: Any) -> Kernels:
        table = dataclasses.replace(reference.cpu(), plan_attention=self.plan, forget_graphs=self.forget)
        return dataclasses.replace(table, **changes)


@dataclasses.dataclass
class HeldPlan:
    groups: Any


def runner_of(model: Any, kernels: Kernels, limits: Limits) -> ModelRunner:
    shape = (limits.num_pages + 1, *kv_page_shape(model.attention_shape, limits.page_size))
    cache = [torch.zeros(shape) for _ in range(model.num_layers)]
    return ModelRunner(model, kernels, cache, limits, torch.device("cpu"))


def with_graphs(
    runner: ModelRunner,
    sizes: tuple[int, ...],
    recorder: FakeRecorder | None = None,
    mixed_sizes: tuple[int, ...] = (),
) -> ModelRunner:
    captured_steps.capture(runner, recorder or FakeRecorder(), sizes, mixed_sizes)
    return runner


def buffers(runner: ModelRunner) -> dict[str, Tensor]:
    """Copies of all that outlives a step."""
    sampler = runner.sampler
    copies = {name: value.clone() for name, value in vars(sampler).items() if isinstance(value, Tensor)}
    return copies | {f"cache {index}": layer.clone() for index, layer in enumerate(runner.kv_cache)}
