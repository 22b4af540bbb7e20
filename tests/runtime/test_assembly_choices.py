"""What the start resolves before any graph exists: sizes, the shared expert's plan, and what a CPU says of both."""

from __future__ import annotations

import json

import pytest
import torch

from minserve.config import Config
from minserve.errors import UsageError
from minserve.models.model_config import load_model_config
from minserve.runtime import assembly
from minserve.runtime.assembly import assemble, graph_sizes, shared_expert_policy
from minserve.runtime.startup import Timeline

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Lanes:
    def __init__(self, device: torch.device) -> None:
        self.device = device


@pytest.fixture(autouse=True)
def _lanes(monkeypatch):
    monkeypatch.setattr(assembly, "CudaLanes", Lanes)


def test_graph_sizes():
    assert graph_sizes(Config(max_num_seqs=12), CUDA) == (1, 2, 4, 8, 12)
    assert graph_sizes(Config(max_num_seqs=12, cuda_graph_bs=(3, 500)), CUDA) == (3, 12)
    assert graph_sizes(Config(max_num_seqs=12, enforce_eager=True), CUDA) == ()
    assert graph_sizes(Config(max_num_seqs=12), CPU) == ()


@pytest.mark.parametrize(
    ("asked", "variant", "changes", "device", "policy"),
    [
        ("auto", "deepseek_v3_small", {}, CUDA, "overlap"),
        ("overlap", "qwen2_moe", {}, CUDA, "overlap"),
        ("serial", "qwen2_moe", {}, CUDA, "serial"),
        ("auto", "qwen3_moe", {}, CUDA, "serial"),  # it has no shared expert
        ("overlap", "qwen3_moe", {}, CUDA, "serial"),
        ("auto", "qwen2_moe", {"enforce_eager": True}, CUDA, "serial"),
        ("auto", "qwen2_moe", {}, CPU, "serial"),
    ],
)
def test_the_plan_of_the_shared_expert(tiny_dir, asked, variant, changes, device, policy):
    config, model_config = Config(shared_expert=asked, **changes), load_model_config(tiny_dir(variant))
    chosen, lanes = shared_expert_policy(config, model_config, device)
    assert chosen == policy
    assert (lanes is not None) == (policy == "overlap")


def test_a_plan_that_is_not_built_is_refused_in_words(tiny_dir):
    with pytest.raises(UsageError, match=r"--shared-expert fused.*overlap, serial or auto"):
        shared_expert_policy(Config(shared_expert="fused"), load_model_config(tiny_dir("qwen2_moe")), CUDA)


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
    assert list(timeline.finish()) == ["import", "config", "checkpoint", "build", "load", "kv cache"]
