"""What the start resolves before any graph exists: sizes, the shared expert's plan, and what a CPU says of both."""

from __future__ import annotations

import json

import pytest
import torch

from minserve.config import Config
from minserve.errors import UsageError
from minserve.runtime import assembly
from minserve.runtime.assembly import assemble, graph_sizes
from minserve.runtime.startup import Timeline

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_graph_sizes():
    assert graph_sizes(Config(max_num_seqs=12), CUDA) == (1, 2, 4, 8, 12)
    assert graph_sizes(Config(max_num_seqs=12, cuda_graph_bs=(3, 500)), CUDA) == (3, 12)
    assert graph_sizes(Config(max_num_seqs=12, enforce_eager=True), CUDA) == ()
    assert graph_sizes(Config(max_num_seqs=12), CPU) == ()


@pytest.mark.parametrize("asked", ["auto", "fused"])
def test_a_cpu_runs_the_shared_expert_serially_unless_it_is_to_be_fused(tiny_dir, asked):
    config = Config(
        model=str(tiny_dir("deepseek_v3_small")),
        device="cpu",
        num_pages=64,
        max_num_seqs=4,
        max_model_len=512,
        shared_expert=asked,
    )
    parts = assemble(config, Timeline(lambda _: None, "import"))
    wanted = {"auto": "serial (steps are eager)", "fused": "fused (asked for)"}
    assert parts.info["effective"]["shared expert"] == wanted[asked]
    assert parts.model.shared_expert == ("serial" if asked == "auto" else "fused")


def test_a_plan_that_the_model_cannot_have_is_refused_before_a_weight_is_read(tiny_dir, monkeypatch):
    monkeypatch.setattr(assembly, "load_weights", lambda *_: pytest.fail("weights are read"))
    config = Config(model=str(tiny_dir("qwen2_moe")), device="cpu", num_pages=64, shared_expert="fused")
    with pytest.raises(UsageError, match=r"--shared-expert fused.*overlap, serial or auto"):
        assemble(config, Timeline(lambda _: None, "import"))


@pytest.mark.parametrize(("changes", "reason"), [({}, "cpu"), ({"enforce_eager": True}, "--enforce-eager")])
def test_a_cpu_says_that_it_has_no_graphs(tiny_dir, changes, reason):
    timeline = Timeline(lambda _: None, "import")
    config = Config(model=str(tiny_dir("qwen3_moe")), device="cpu", num_pages=64, max_num_seqs=4, max_model_len=512, **changes)
    parts = assemble(config, timeline)
    assert parts.runner.graphs is None
    assert parts.runner.eager_reason == reason
    assert parts.info["self_check"] == {"verdict": "no graphs on a CPU"}
    assert parts.info["captured_batch_sizes"] == []
    assert parts.info["effective"]["decode graphs"] == "none"
    assert parts.info["effective"]["self check"] == "no graphs on a CPU"
    assert json.loads(json.dumps(parts.info["self_check"]))
    assert list(timeline.finish()) == ["import", "config", "stack", "checkpoint", "build", "load", "kv cache"]


def test_the_first_uses_have_ended_before_anything_is_timed_or_measured(tiny_dir, monkeypatch):
    said = []

    class Uses:
        def start(self, *_):
            said.append("started")

        def wait(self):
            said.append("waited")

    def choose(*inputs, on_measure, **others):
        on_measure()
        said.append("timed")
        return shared_expert_choose(*inputs, **others)

    def plan_cache(*inputs):
        said.append("measured")
        return own_plan_cache(*inputs)

    shared_expert_choose, own_plan_cache = assembly.shared_expert.choose, assembly._plan_cache
    monkeypatch.setattr(assembly, "FirstUses", Uses)
    monkeypatch.setattr(assembly.shared_expert, "choose", choose)
    monkeypatch.setattr(assembly, "_plan_cache", plan_cache)
    config = Config(model=str(tiny_dir("qwen2_moe")), device="cpu", num_pages=64, max_num_seqs=4, max_model_len=512)
    assemble(config, Timeline(lambda _: None, "import"))
    assert said == ["started", "waited", "timed", "waited", "measured"]
