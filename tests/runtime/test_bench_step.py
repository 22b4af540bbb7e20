"""`minserve bench step` on a CPU: its table, its last line, its refusals. Times here say nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest
import torch
from runtime.graph_doubles import FakeRecorder
from tiny_checkpoints import write_checkpoint
from waiting import PATIENCE

from minserve import roofline
from minserve.errors import ExitCode
from minserve.runtime import bench_step


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    directory = write_checkpoint("deepseek_v3_small", tmp_path_factory.mktemp("shape") / "model")
    (directory / "model.safetensors").unlink()  # a config.json is all it takes
    return directory


def test_the_last_line_is_json(shape, capsys):
    words = [str(shape), "--batch", "1", "3", "--context", "70", "--steps", "5", "--modes", "eager", "--device", "cpu"]
    assert bench_step.main(words) == 0
    output = capsys.readouterr().out
    report = json.loads(output.strip().splitlines()[-1])
    assert [(row["batch"], row["mode"]) for row in report["rows"]] == [(1, "eager"), (3, "eager")]
    assert all(str(row["batch"]) in output for row in report["rows"])
    fields = roofline.shape_from_config(json.loads((shape / "config.json").read_text()))
    for row in report["rows"]:
        floor = roofline.step_floor(fields, roofline.H200, row["batch"], 70).seconds * 1e3
        assert row["floor"] == pytest.approx(floor)
        assert row["share"] == pytest.approx(floor / row["step"])
        assert row["step"] > 0
        assert row["device"] is None
    assert report["distinct_experts"]["1"] == 4.0  # one token, four experts, in every layer
    assert 4.0 < report["distinct_experts"]["3"] <= 12.0
    assert report["layers"] == 3


def test_a_step_is_the_decode_graph_alone_and_each_batchs_graphs_are_dropped(shape, monkeypatch, capsys):
    recorders = []
    monkeypatch.setattr(bench_step, "CudaRecorder", lambda _: recorders.append(FakeRecorder()) or recorders[-1])
    words = [str(shape), "--batch", "1", "3", "--context", "70", "--steps", "5", "--modes", "graph", "--device", "cpu"]
    assert bench_step.main([*words, "--shared-expert", "serial"]) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [(row["batch"], row["mode"]) for row in report["rows"]] == [(1, "graph serial"), (3, "graph serial")]
    assert len(recorders) == 2
    for recorder in recorders:
        decode, sampling = recorder.graphs
        assert decode.replays > 5
        assert sampling.replays == 0
        assert decode.is_reset
        assert sampling.is_reset


def test_fewer_layers_where_the_whole_does_not_fit(shape, capsys):
    words = [str(shape), "--batch", "1", "--context", "8", "--steps", "5", "--modes", "eager", "--device", "cpu", "--layers", "2"]
    assert bench_step.main(words) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["layers"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/nowhere", "--device", "cpu"], "has no config.json"),
        (["SHAPE", "--device", "cpu", "--context", "99999"], "--context 99999: the model knows 2048 positions"),
    ],
)
def test_refusals_are_sentences(shape, capsys, words, message):
    words = [str(shape) if word == "SHAPE" else word for word in words]
    assert bench_step.main(words) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_ranks_step_together_and_the_first_one_tells(shape):
    words = [str(shape), "--batch", "2", "--context", "8", "--steps", "3", "--modes", "eager", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "minserve.runtime.bench_step", *words, "--ep-size", "2", "--skew", "1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["ranks"] == 2 and report["dispatcher"] == "torch.distributed (gloo)"
    assert report["busiest_rank"] > 1.5  # popular experts are the first rank's
    assert done.stdout.count('"bench": "step"') == 1


def test_through_the_command_line(shape):
    words = [str(shape), "--batch", "1", "--context", "8", "--steps", "5", "--modes", "eager", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "minserve", "bench", "step", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1])["bench"] == "step"


def test_ranks_ask_for_tokens_of_their_own():
    runner = types.SimpleNamespace(limits=types.SimpleNamespace(max_num_seqs=4, vocab_size=1000), device=torch.device("cpu"))
    first, again, second = (bench_step._random_tokens(runner, rank) for rank in (0, 0, 1))
    assert torch.equal(first, again)
    assert not (first == second).all(1).any()
