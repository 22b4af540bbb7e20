"""Every start says what was predicted of it: on a CPU the weights, which a plan counts to the byte."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from release_checkpoints import write_release
from tiny_checkpoints import VARIANTS

from minserve.config import Config
from minserve.errors import DoesNotFit
from minserve.kernels import reference
from minserve.kernels.interface import Kernels
from minserve.models.load_report import LoadReport
from minserve.models.registry import load_model_config
from minserve.plan import Plan
from minserve.runtime import assembly
from minserve.runtime.assembly import assemble
from minserve.runtime.device_memory import compare, forecast, sentence
from minserve.runtime.kv_cache import KVPlan
from minserve.runtime.startup import Timeline

TinyDir = Callable[[str], Path]


def weights_of_a_start(directory: Path, **settings: object) -> dict[str, float]:
    config = Config(model=str(directory), device="cpu", num_pages=8, max_num_seqs=2, **settings)  # type: ignore[arg-type]
    info = assemble(config, Timeline(lambda _: None, "import")).info
    assert info["memory_forecast"].keys() == {"weights"}
    row: dict[str, float] = info["memory_forecast"]["weights"]
    assert row["measured"] == info["memory"]["weights_bytes"]
    return row


@pytest.mark.parametrize("name", VARIANTS)
def test_every_architectures_weights_are_predicted_to_the_byte(name: str, tiny_dir: TinyDir) -> None:
    row = weights_of_a_start(tiny_dir(name))
    assert row["predicted"] == row["measured"]


@pytest.mark.parametrize("name", ["Kimi-K2-Thinking", "Kimi-K2.5", "Kimi-K2.5-NVFP4", "DeepSeek-V3"])
def test_formats_are_predicted_as_this_stack_keeps_them(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    release, _ = write_release(name, tmp_path)
    with caplog.at_level(logging.INFO, "minserve.runtime"):
        row = weights_of_a_start(release)
    assert row["predicted"] == row["measured"]
    assert "measured (+0.0 %)" in caplog.text
    row = weights_of_a_start(release, dtype="bfloat16")
    assert row["predicted"] == row["measured"]


def planned(tiny_dir: TinyDir, kernels: Kernels, device_bytes: int = 10**9) -> Plan:
    config = load_model_config(tiny_dir("moonlight"))
    return forecast(Config(max_num_seqs=8, gpu_memory_utilization=0.5), config, kernels, torch.bfloat16, device_bytes)


def test_on_a_gpu_buffers_are_what_neither_weights_nor_cache_could_have(tiny_dir: TinyDir) -> None:
    plan = planned(tiny_dir, reference.cpu())
    assert plan.usable == 5e8
    weights = round(sum(plan.weights.values()))
    report = LoadReport(None, 0, 0, 0, weights, {}, 0, {}, (), 1.0)
    size = KVPlan(num_pages=1, page_size=64, page_bytes=1, max_model_len=9, limited_by="x", memory_bytes=300_000_000)
    rows = compare(plan, report, size, on_gpu=True)
    assert rows["buffers"]["measured"] == 500_000_000 - 300_000_000 - weights
    assert rows["buffers"]["predicted"] == round(sum(plan.buffers.values()))
    assert rows["weights"]["predicted"] == rows["weights"]["measured"] == weights
    assert "weights" in sentence(rows) and "; buffers " in sentence(rows)


def test_the_sentence() -> None:
    rows = {"weights": {"predicted": 2_000_000_000, "measured": 2_100_000_000}, "buffers": {"predicted": 0, "measured": 5}}
    assert sentence(rows) == (
        "weights 2.0 GB predicted, 2.1 GB measured (+5.0 %); buffers 0 bytes predicted, 5 bytes measured (+0.0 %)"
    )


def test_where_int4_is_widened_a_refusal_of_memory_says_so(
    tiny_dir: TinyDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError("2.0 TB")

    monkeypatch.setattr(assembly, "build_model", refuse)
    release, _ = write_release("Kimi-K2-Thinking", tmp_path)
    widening = dataclasses.replace(reference.cpu(), name="torch-gpu", keeps_int4=False)
    monkeypatch.setattr("minserve.kernels.stacks.build", lambda *_, **__: widening)
    words = r"no memory for the model's weights \(the torch-gpu stack cannot read INT4, so they are widened\): 2\.0 TB"
    with pytest.raises(DoesNotFit, match=words):
        weights_of_a_start(release)
    with pytest.raises(DoesNotFit, match=r"no memory for the model's weights: 2\.0 TB"):
        weights_of_a_start(tiny_dir("moonlight"))
