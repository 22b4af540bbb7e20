"""Captured decode steps on a GPU: sound ones pass the self-check, every fault put in on purpose is refused, by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.disposing import disposing, without_dispose_flag
from gpu.kernel_samples import DEVICE
from gpu.runners import capture, small_runner
from torch import Tensor

from minserve.capture_flags import EAGER
from minserve.errors import EnvironmentFault, SelfCheckFailed
from minserve.kernels.interface import Kernels
from minserve.models.decoder import Decoder
from minserve.models.layers import moe
from minserve.models.layers.moe import MixtureOfExperts
from minserve.models.layers.streams import CudaLanes, Lanes
from minserve.runtime import canary, captured_steps, cuda_graph
from minserve.runtime.capture_mode import current_flags
from minserve.runtime.model_runner import ModelRunner
from minserve.runtime.replay_streams import kernel_streams
from minserve.runtime.self_check import check_graphs

SIZES = (1, 5, 8, 40)
SPIN_CYCLES = 2_000_000
"""About a millisecond: what waits for it comes later, what does not comes before."""


@pytest.mark.parametrize("stack", ["torch-gpu", "hopper"])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, policy) for name in ("deepseek-v3", "qwen2-57b-a14b", "qwen3-30b-a3b") for policy in ("overlap", "serial")]
    + [("deepseek-v3", "fused"), ("moonlight-16b-a3b", "fused")],
)
def test_sound_graphs_pass_and_leave_no_trace(name: str, policy: str, fp8: bool, stack: str) -> None:
    runner = small_runner(name, stack, fp8=fp8, policy=policy)
    capture(runner, SIZES)
    verdict = check_graphs(runner, "full")
    assert verdict.comparisons == 20
    assert set(verdict.streams) == set(SIZES)
    assert max(verdict.streams.values()) <= 3
    assert not any(layer.any() for layer in runner.kv_cache)
    assert not runner.sampler.broken_rows.any()
    errors = canary.check_layers(decoder(runner), runner.kernels, torch.bfloat16, 64)
    print(name, policy, "fp8" if fp8 else "bf16", stack, verdict.streams, errors)  # noqa: T201 - part of the log


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen2-57b-a14b"])
def test_streams_do_not_grow_with_layers(name: str) -> None:
    counts = {}
    for layers in (6, 61):
        runner = small_runner(name, layers=layers, max_num_seqs=8)
        graphs = capture(runner)
        [streams] = kernel_streams([functools.partial(graphs.replay, 8)])
        counts[layers] = len(set(streams))
    print(name, counts)  # noqa: T201
    assert counts[6] == counts[61]
    assert counts[61] <= 3


def refusal(runner: ModelRunner) -> str:
    with pytest.raises(SelfCheckFailed) as caught:
        check_graphs(runner, "fast")
    print(caught.value)  # noqa: T201
    return str(caught.value)


# faults put in on purpose


def alt_first(main: Callable[[], Any], side: Callable[[], Any], lanes: Lanes | None) -> tuple[Any, Any]:
    """The lane law broken: the side block recorded before the main one."""
    if lanes is None:
        return main(), side()
    with lanes.alt(lanes.fork()):
        second = side()
    first = main()
    lanes.join()
    return first, second


def test_alt_first_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dependent launches, whose edges are of another kind."""
    monkeypatch.setattr(moe, "side_by_side", alt_first)
    monkeypatch.setattr("minserve.kernels.launch._supported", lambda _: False)
    runner = small_runner("deepseek-v3", layers=24, max_num_seqs=8)
    capture(runner)
    message = refusal(runner)
    assert "streams, more than 3" in message


class OneJoin(CudaLanes):
    """Joins the last recorded layer only: the capture is whole, and each layer before it takes what the alt stream may not
    have."""

    def __init__(self, layers: int) -> None:
        super().__init__(DEVICE)
        self._layers, self._calls = layers, 0

    def join(self) -> None:
        recording = current_flags().phase == "record"
        self._calls += recording
        if not recording or self._calls % self._layers == 0:
            super().join()


class NoJoin(CudaLanes):
    def join(self) -> None:
        pass


class SlowShared(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(SPIN_CYCLES)
        result: Tensor = self.inner(x)
        return result


def decoder(runner: ModelRunner) -> Decoder:
    assert isinstance(runner.model, Decoder)
    return runner.model


def expert_layers(runner: ModelRunner) -> list[MixtureOfExperts]:
    return [module for module in decoder(runner).modules() if isinstance(module, MixtureOfExperts)]


def test_a_missed_join_is_refused() -> None:
    runner = small_runner("deepseek-v3", layers=4, max_num_seqs=8)
    for layer in expert_layers(runner):
        layer.shared = SlowShared(layer.shared)
    decoder(runner).lanes = OneJoin(3)
    capture(runner)
    assert "differ" in refusal(runner)


def test_a_capture_that_is_never_joined_ends_and_the_next_works() -> None:
    runner = small_runner("deepseek-v3", max_num_seqs=8)
    decoder(runner).lanes = NoJoin(DEVICE)
    with pytest.raises(EnvironmentFault, match="batch size 8"):
        capture(runner)
    assert current_flags() == EAGER
    torch.cuda.synchronize()
    decoder(runner).lanes = CudaLanes(DEVICE)
    capture(runner)
    assert check_graphs(runner, "fast").comparisons == 4


def test_an_exception_in_the_side_block_leaves_nothing_behind() -> None:
    runner = small_runner("qwen2-57b-a14b", max_num_seqs=8)
    layer = expert_layers(runner)[1]
    whole = layer.shared

    class Broken(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if current_flags().phase == "record":
                raise RuntimeError("in the middle of the side block")
            result: Tensor = whole(x)
            return result

    used = torch.cuda.memory_allocated()
    layer.shared = Broken()
    with pytest.raises(EnvironmentFault, match="in the middle of the side block"):
        capture(runner)
    assert current_flags() == EAGER
    assert not torch.cuda.is_current_stream_capturing()
    layer.shared = whole
    capture(runner)
    assert check_graphs(runner, "fast").comparisons == 4
    assert torch.cuda.memory_allocated() - used < 1 << 30


@pytest.mark.parametrize("policy", ["overlap", "serial"])
def test_a_routed_kernel_that_disposes_its_input_is_refused_without_the_flag(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = small_runner("deepseek-v3", change=disposing, policy=policy, max_num_seqs=8)
    capture(runner)
    assert check_graphs(runner, "fast").comparisons == 4  # with the flag nothing is disposed
    captured_steps.drop(runner)
    monkeypatch.setattr(cuda_graph, "capture_mode", without_dispose_flag)
    capture(runner)
    assert "does not equal an eager run" in refusal(runner)


def test_in_place_experts_under_overlap_are_refused() -> None:
    """They write over what the shared expert reads. Eagerly it reads the new values, on the alt stream mostly the old ones."""

    def inplace(kernels: Kernels) -> Kernels:
        def experts_flat(x: Tensor, slot_ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
            out = kernels.experts_flat(x, slot_ids, weights, experts)
            torch.cuda._sleep(SPIN_CYCLES)
            return x.copy_(out)

        return dataclasses.replace(kernels, experts_flat=experts_flat, expert_rows=None)

    runner = small_runner("deepseek-v3", change=inplace, max_num_seqs=8)
    capture(runner)
    assert "differ" in refusal(runner)


def test_padding_that_reaches_other_rows_is_refused() -> None:
    def one_scale(kernels: Kernels) -> Kernels:
        def experts_flat(x: Tensor, slot_ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
            scale = x.abs().amax()
            return kernels.experts_flat(x / scale, slot_ids, weights, experts) * scale

        return dataclasses.replace(kernels, experts_flat=experts_flat, expert_rows=None)

    runner = small_runner("qwen3-30b-a3b", change=one_scale, max_num_seqs=8)
    capture(runner)
    assert "are not numbers; padding" in refusal(runner)


def test_weights_that_moved_after_the_capture_are_refused() -> None:
    runner = small_runner("qwen3-30b-a3b", max_num_seqs=8)
    capture(runner)
    weight = expert_layers(runner)[1].experts.w2
    old, weight.data = weight.data, weight.data.clone()
    old.normal_()
    assert "does not equal an eager run" in refusal(runner)


def test_a_wrong_kernel_is_refused_by_the_canary() -> None:
    def unweighted(kernels: Kernels) -> Kernels:
        def experts_flat(x: Tensor, slot_ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
            return kernels.experts_flat(x, slot_ids, torch.ones_like(weights), experts)

        return dataclasses.replace(kernels, experts_flat=experts_flat, expert_rows=None)

    runner = small_runner("deepseek-v3", change=unweighted)
    with pytest.raises(SelfCheckFailed, match="fp32 reference"):
        canary.check_layers(decoder(runner), runner.kernels, torch.bfloat16, 64)
