"""`minserve bench serve` against a server of known pace, against faults, and its arithmetic."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from server_process import ServerProcess, serving
from waiting import PATIENCE

from minserve.clients import bench_report, bench_serve
from minserve.clients.bench_report import Sample
from minserve.clients.bench_serve import Load
from minserve.errors import EnvironmentFault, UsageError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving("--mock-engine", "100", log=tmp_path_factory.mktemp("bench") / "log") as running:
        yield running


def bench(server: ServerProcess, *words: str) -> tuple[dict[str, Any], str]:
    """The last line, and everything."""
    command = [sys.executable, "-m", "minserve", "bench", "serve", "--base-url", server.base_url, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def test_fixed_lengths_at_a_known_pace(server: ServerProcess, tmp_path: Path) -> None:
    picture = tmp_path / "load.png"
    plot = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    report, text = bench(server, "--num-prompts", "10", "--concurrency", "5", "--input-len", "33", "--output_len", "20", *plot)
    assert (report["completed"], report["failed"]) == (10, 0)
    assert (report["total_prompt_tokens"], report["total_output_tokens"]) == (330, 200)
    assert report["tpot_ms_p50"] > 8.0, "100 tokens a second are 10 ms each"
    assert 19 * report["tpot_ms_p50"] < report["e2e_ms_max"]
    assert 0.0 < report["ttft_ms_p50"] <= report["ttft_ms_p90"] <= report["ttft_ms_p99"] <= report["ttft_ms_max"]
    assert report["e2e_ms_mean"] > 19 * 8.0
    assert report["output_tokens_per_second"] == pytest.approx(200 / report["seconds"])
    assert "time to first token" in text
    assert picture.exists() == bool(plot)


def test_a_file_of_prompts_at_a_rate(server: ServerProcess, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        json.dumps({"messages": [{"role": "user", "content": "What is 1 + 2?"}], "max_tokens": 3}),
        json.dumps({"prompt": "1 + 2 = ", "max_tokens": 5}),
        "just a line of text",
    ]
    prompts.write_text("\n".join(lines) + "\n\n")
    report, _ = bench(server, "--prompts", str(prompts), "--num-prompts", "6", "--rate", "50", "--output-len", "4")
    assert (report["completed"], report["total_output_tokens"]) == (6, 2 * (3 + 5 + 4))


def test_requests_that_fail_are_counted_with_their_reason(server: ServerProcess, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x", "temperature": 9}) + "\n" + json.dumps({"prompt": "1 + 2", "max_tokens": 2}))
    report, text = bench(server, "--prompts", str(prompts), "--num-prompts", "4")
    assert (report["completed"], report["failed"]) == (2, 2)
    assert "2 failed: " in text
    assert "temperature must be" in text


@pytest.mark.parametrize(("tokens", "error"), [(1, None), (0, "the stream ended without a token")])
def test_a_token_without_text_has_come_by_the_answer_s_end(tokens: int, error: str | None) -> None:
    """An end that is to be ignored has no text, and may be all of an answer of one token."""

    class Stream:
        async def events(self, *_: object) -> AsyncIterator[bytes]:
            yield json.dumps({"choices": [{"text": "", "finish_reason": "length"}]}).encode()
            yield json.dumps({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}).encode()

    sample = asyncio.run(bench_serve._send(cast(Any, Stream()), "/completions", b""))
    assert (sample.error, sample.output_tokens, len(sample.arrivals)) == (error, tokens, tokens)


def test_no_server_is_a_sentence() -> None:
    with pytest.raises(EnvironmentFault, match="is the server up"):
        asyncio.run(bench_serve.run("http://127.0.0.1:9", Load()))


def test_a_plot_without_matplotlib_is_a_sentence_before_any_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'minserve\[plot\]'"):
        asyncio.run(bench_serve.run("http://127.0.0.1:9", Load(), plot=tmp_path / "x.png"))


def test_a_prompts_file_that_says_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(UsageError, match=name):
            bench_serve._file_bodies(Load(prompts=tmp_path / name))


def test_random_prompts_are_the_same_for_a_seed_and_within_the_vocabulary() -> None:
    load = Load(num_prompts=3, input_len=50, seed=4)
    bodies = bench_serve._random_bodies(load, 300)
    assert bodies == bench_serve._random_bodies(load, 300)
    assert all(len(body["prompt"]) == 50 and 10 <= min(body["prompt"]) <= max(body["prompt"]) < 300 for body in bodies)
    assert bodies[0] != bodies[1]


def test_the_numbers_of_a_report() -> None:
    sample = Sample(begun=10.0, ended=10.6, arrivals=[10.1, 10.2, 10.5], prompt_tokens=7, output_tokens=3)
    report = bench_report.summarize([sample, Sample(begun=0.0, error="no")], 2.0)
    flat = report.as_json()
    assert (report.completed, report.failed, report.errors) == (1, 1, {"no": 1})
    assert flat["ttft_ms_p50"] == pytest.approx(100)
    assert flat["tpot_ms_mean"] == pytest.approx(200)
    assert flat["itl_ms_max"] == pytest.approx(300)
    assert flat["itl_ms_p50"] == pytest.approx(200)
    assert flat["e2e_ms_p99"] == pytest.approx(600)
    assert flat["total_tokens_per_second"] == pytest.approx(5)
    assert bench_report.percentile([1.0, 2.0, 3.0, 4.0], 50) == pytest.approx(2.5)
    assert bench_report.percentile([5.0], 99) == 5.0
