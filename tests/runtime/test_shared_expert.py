"""Which plan runs the shared expert: what was asked for, what cannot be otherwise, or what was fastest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from unsummed_experts import expert_rows

from minserve.capture_flags import EAGER
from minserve.errors import EnvironmentFault
from minserve.kernels import reference
from minserve.kernels.interface import ExpertRows
from minserve.models.formats import Formats
from minserve.models.layers.moe import MixtureOfExperts
from minserve.models.layers.streams import Lanes
from minserve.models.registry import load_model_config
from minserve.remembered import Remembered
from minserve.runtime import shared_expert
from minserve.runtime.shared_expert import Shape, Times

Asked = Literal["auto", "fused", "overlap", "serial"]
Directories = Callable[[str], Path]

NO_LANES = cast(Lanes, None)
EQUAL: Times = {"serial": {1: 100.0, 32: 200.0}, "overlap": {1: 100.0, 32: 199.0}, "fused": {1: 99.9, 32: 199.0}}


def shape_of(directory: Path) -> Shape:
    config = load_model_config(directory)
    return Shape(config, Formats(lambda _: "plain"), reference.cpu(), torch.float32, torch.device("cpu"))


def choose(
    shape: Shape, folder: Path, asked: Asked = "auto", *, captured: bool = True, spread: bool = False
) -> shared_expert.SharedExpertPlan:
    return shared_expert.choose(asked, shape, captured=captured, spread=spread, remembered=Remembered(folder))


@pytest.mark.parametrize(
    ("asked", "variant", "situation", "policy"),
    [
        ("overlap", "qwen2_moe", {}, "overlap"),
        ("serial", "qwen2_moe", {}, "serial"),
        ("auto", "qwen3_moe", {}, "serial"),  # it has no shared expert
        ("overlap", "qwen3_moe", {}, "serial"),
        ("fused", "qwen3_moe", {}, "serial"),
        ("auto", "qwen2_moe", {"captured": False}, "serial"),
        ("overlap", "qwen2_moe", {"captured": False}, "serial"),
        ("fused", "deepseek_v3_small", {"captured": False}, "fused"),
        ("auto", "deepseek_v3_small", {"spread": True}, "overlap"),
        ("serial", "deepseek_v3_small", {"spread": True}, "serial"),
    ],
)
def test_what_needs_no_measuring(
    tiny_dir: Directories,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: Asked,
    variant: str,
    situation: dict[str, bool],
    policy: str,
) -> None:
    monkeypatch.setattr(shared_expert, "measure", lambda _: pytest.fail("nothing is to be measured"))
    assert choose(shape_of(tiny_dir(variant)), tmp_path, asked, **situation).policy == policy


def test_auto_measures_once_a_shape(tiny_dir: Directories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    times: Times = {
        "serial": {1: 90.0, 8: 150.0, 32: 200.0},
        "overlap": {1: 80.0, 8: 140.0, 32: 190.0},
        "fused": {1: 60.0, 8: 130.0, 32: 185.0},
    }
    monkeypatch.setattr(Shape, "key", lambda self: [str(self.config.hidden_size), str(self.dtype)])

    def measure(shape: Shape) -> Times:
        measured.append(shape)
        return times

    monkeypatch.setattr(shared_expert, "measure", measure)
    shape = shape_of(tiny_dir("deepseek_v3_small"))
    first, second = (choose(shape, tmp_path) for _ in range(2))
    assert len(measured) == 1
    assert first.policy == second.policy == "fused"
    rows = "serial 90.0 150.0 and 200.0, overlap 80.0 140.0 and 190.0, fused 60.0 130.0 and 185.0"
    table = f"us a layer at batch 1 8 and 32: {rows}"
    assert first.reason == f"measured, {table}"
    assert second.reason == f"measured by an earlier start, {table}"
    choose(Shape(shape.config, shape.formats, shape.kernels, torch.bfloat16, shape.device), tmp_path)
    assert len(measured) == 2


def test_what_cannot_be_measured_is_overlapped_and_asked_again(
    tiny_dir: Directories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(_: Shape) -> Times:
        raise EnvironmentFault("a kernel does not compile")

    monkeypatch.setattr(Shape, "key", lambda _: ["a shape"])
    monkeypatch.setattr(shared_expert, "measure", measure)
    plan = choose(shape_of(tiny_dir("qwen2_moe")), tmp_path)
    assert plan.policy == "overlap"
    assert "a kernel does not compile" in plan.reason
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "policy"),
    [
        ({}, "serial"),
        ({"overlap": {1: 97.0, 32: 199.0}}, "overlap"),
        ({"overlap": {1: 97.0, 32: 206.0}}, "serial"),
        ({"fused": {1: 80.0, 32: 199.0}}, "fused"),
        ({"overlap": {1: 97.0, 32: 199.0}, "fused": {1: 96.9, 32: 199.0}}, "overlap"),
    ],
)
def test_a_plan_must_be_worth_its_trouble(changes: Times, policy: str) -> None:
    assert shared_expert.fastest(EQUAL | changes) == policy


@pytest.mark.parametrize("policy", ["serial", "fused"])
def test_a_timed_step_holds_the_norm_that_sums(
    tiny_dir: Directories, monkeypatch: pytest.MonkeyPatch, policy: Literal["serial", "fused"]
) -> None:
    """Else a plan that leaves more to the next norm would look faster than it is."""
    steps: list[str] = []

    class Graphs:
        def __init__(self, prepare: Callable[[int], Callable[..., torch.Tensor]], batches: Iterable[int], _: object) -> None:
            self.work = {size: prepare(size) for size in batches}

        def capture(self) -> None:
            for work in self.work.values():
                work(EAGER)

        def destroy(self) -> None:
            pass

    def norm(x: torch.Tensor | ExpertRows, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(x, ExpertRows)
        steps.append("routed" if x.added is None else "routed and shared")
        return reference.add_rms_norm(x, *arguments)

    monkeypatch.setattr(shared_expert, "StepGraphs", Graphs)
    monkeypatch.setattr(shared_expert, "CudaRecorder", lambda _: None)
    monkeypatch.setattr(shared_expert, "_microseconds", lambda *_: 1.0)
    kernels = dataclasses.replace(reference.cpu(), expert_rows=expert_rows, add_rms_norm=norm)
    shape = dataclasses.replace(shape_of(tiny_dir("deepseek_v3_small")), kernels=kernels)
    layer = shared_expert._filled(shape.layer(policy), shape.device)
    assert set(shared_expert._times(layer, shape, policy, NO_LANES)) == set(shared_expert.BATCHES)
    assert steps == ["routed" if policy == "fused" else "routed and shared"] * len(shared_expert.BATCHES)


@pytest.mark.parametrize("variant", ["deepseek_v3_small", "moonlight", "qwen2_moe_sparse_step"])
def test_the_timed_layer_is_the_models_first_with_experts(tiny_dir: Directories, variant: str) -> None:
    shape = shape_of(tiny_dir(variant))
    moe = shape.config.moe
    assert moe is not None
    layer = shared_expert._filled(shape.layer("serial"), shape.device)
    assert isinstance(layer, MixtureOfExperts)
    assert layer.experts.w13.shape == (moe.num_experts, 2 * moe.intermediate_size, shape.config.hidden_size)
    assert all(value.isfinite().all() for value in layer.parameters())
    if not moe.shared_gated:
        fused = shared_expert._filled(shape.layer("fused"), shape.device)
        more = moe.shared_intermediate_size // moe.intermediate_size
        assert fused.experts.w13.shape[0] == moe.num_experts + more
        assert fused.shared is None
