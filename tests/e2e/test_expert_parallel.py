"""Servers of several ranks on one machine: the tokens of one rank, idle ranks that serve, and ends that name who it was."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_process import ServerProcess, serving, start
from waiting import PATIENCE, once_within, port_is_free, until, unused_port

Checkpoint = Callable[[str], Path]
PROMPTS = ["a", "The quick brown fox", "x" * 70, "0123456789 " * 9, "What?", "zz " * 33, "b", "Hello, world"]
SAMPLED = {"temperature": 1.0, "seed": 7, "top_p": 0.9}


def ask(server: ServerProcess, prompt: str, **more: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
    status, answer = server.request("POST", "/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["text"]


def ask_all(server: ServerProcess) -> list[str]:
    """All prompts at once, of different lengths in and out, greedy and sampled."""
    with ThreadPoolExecutor(len(PROMPTS) * 2) as pool:
        greedy = [pool.submit(ask, server, prompt, max_tokens=5 + 3 * i) for i, prompt in enumerate(PROMPTS)]
        sampled = [pool.submit(ask, server, prompt, **SAMPLED) for prompt in PROMPTS]
        return [answer.result() for answer in greedy + sampled]


def ranks(server: ServerProcess) -> list[dict[str, Any]]:
    status, info = server.request("GET", "/server_info")
    assert status == 200
    return info["ranks"]


def stats(server: ServerProcess) -> list[dict[str, Any]]:
    return [rank["now"]["stats"] for rank in ranks(server)]


def engines(server: ServerProcess) -> list[psutil.Process]:
    """In order of rank."""
    return [psutil.Process(rank["info"]["pid"]) for rank in ranks(server)]


def at_rest(server: ServerProcess) -> list[dict[str, Any]]:
    """The ranks' counts once the last step has been counted by all."""
    counts = stats(server)

    def stay() -> bool:
        nonlocal counts
        before, counts = counts, stats(server)
        return counts == before

    until(stay, "ranks at rest", pause=0.1)
    return counts


@pytest.fixture(scope="module")
def one(tiny_dir: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """What one rank answers."""
    known: dict[str, list[str]] = {}

    def answers(name: str) -> list[str]:
        if name not in known:
            with serving(
                str(tiny_dir(name)), "--chunked-prefill-size", "48", log=tmp_path_factory.mktemp(name) / "log"
            ) as server:
                known[name] = ask_all(server)
        return known[name]

    return answers


def end_in_order(server: ServerProcess) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0, server.log
    assert "ended" not in server.log


def end_by_the_parents_death(server: ServerProcess) -> None:
    """The ranks are gone, and so is the port."""
    processes, port = engines(server), server.port
    server.process.kill()
    assert not psutil.wait_procs(processes, PATIENCE)[1]
    until(lambda: port_is_free(port), "a free port")


def seconds_to_end_by_a_ranks_death(server: ServerProcess) -> float:
    """In the middle of an answer of another rank: the rank is named, and all leave with code 6."""
    processes = engines(server)
    with busy(server):
        victim = len(processes) - 1
        killed = time.monotonic()
        os.kill(processes[victim].pid, signal.SIGKILL)
        assert server.process.wait(PATIENCE) == 6
        took = time.monotonic() - killed
    assert f"engine {victim} (pid {processes[victim].pid}) was killed by SIGKILL" in server.log
    assert not psutil.wait_procs(processes, PATIENCE)[1]
    return took


@contextlib.contextmanager
def busy(server: ServerProcess) -> Iterator[None]:
    """A long answer is under way."""
    steps = max(count["steps"] for count in stats(server))
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": "abc", "max_tokens": 1900, "ignore_eos": True}
        pool.submit(server.request, "POST", "/v1/completions", body)
        until(lambda: max(count["steps"] for count in stats(server)) >= steps + 4, "steps of the long answer")
        yield
        server.end()


@pytest.mark.parametrize(
    ("name", "num_ranks", "end"),
    [
        ("deepseek_v3_small", 2, end_in_order),
        ("qwen2_moe", 2, end_by_the_parents_death),
        ("deepseek_v3_small", 4, None),
    ],
)
def test_ranks_give_the_tokens_of_one(
    tiny_dir: Checkpoint, tmp_path: Path, one: Any, name: str, num_ranks: int, end: Callable[[ServerProcess], None] | None
) -> None:
    flags = ["--ep-size", str(num_ranks), "--chunked-prefill-size", "48", "--max-num-seqs", "6"]
    with serving(str(tiny_dir(name)), *flags, log=tmp_path / "server.log") as server:
        # One request alone: the other ranks have no token and step along.
        assert ask(server, PROMPTS[1], max_tokens=8) == one(name)[1]
        counts = at_rest(server)
        assert sorted(count["steps"] > 0 for count in counts) == [False] * (num_ranks - 1) + [True]
        most = max(count["steps"] for count in counts)
        assert all(count["steps"] + count["dummy_steps"] == most for count in counts)
        # All at once: every rank is busy, with requests of other lengths than its neighbours'.
        assert ask_all(server) == one(name)
        counts = at_rest(server)
        assert all(count["steps"] > 0 for count in counts)
        assert len({count["steps"] + count["dummy_steps"] for count in counts}) == 1
        # Idle again: nobody steps, and the processes sleep.
        before = [process.cpu_times().user for process in engines(server)]
        time.sleep(0.7)
        assert stats(server) == counts
        assert all(process.cpu_times().user - was < 0.3 for process, was in zip(engines(server), before, strict=True))
        check_what_ranks_show(server, num_ranks)
        status, flushed = server.request("POST", "/flush_cache")
        assert status == 200 and len(flushed["ranks"]) == num_ranks
        if end is not None:
            end(server)
            return
        took = [seconds_to_end_by_a_ranks_death(server)]

    def once_more() -> float:
        if not took:
            with serving(str(tiny_dir(name)), *flags, log=tmp_path / "server.log") as server:
                took.append(seconds_to_end_by_a_ranks_death(server))
        return took.pop()

    once_within(2.0, once_more)


def check_what_ranks_show(server: ServerProcess, num_ranks: int) -> None:
    shown = ranks(server)
    assert [rank["info"]["effective"]["rank"] for rank in shown] == [f"{rank} of {num_ranks}" for rank in range(num_ranks)]
    assert all("an expert of another rank" in rank["info"]["load_report"] for rank in shown)
    # The experts of all ranks together had every token of every rank as often as each token chooses.
    by_layer: dict[str, list[int]] = {}
    for rank in shown:
        for layer, counts in rank["now"]["expert_load"].items():
            by_layer.setdefault(layer, []).extend(counts)
    totals = {sum(counts) for counts in by_layer.values()}
    page = server.request("GET", "/metrics")[1]
    ratios = re.findall(r'^minserve:ep_imbalance_ratio\{layer="(\d+)".*\} (\S+)$', page, re.MULTILINE)
    assert {layer for layer, _ in ratios} == set(by_layer)
    assert all(1 <= float(ratio) <= num_ranks for _, ratio in ratios)
    assert len(by_layer) >= 2 and len(totals) == 1 and totals.pop() > 100
    for rank in range(num_ranks):
        assert re.search(rf'^minserve:rank_steps_total\{{.*rank="{rank}"\}} [1-9]', page, re.MULTILINE), page


def test_a_measured_load_places_experts_and_answers_stay(tiny_dir: Checkpoint, tmp_path: Path, one: Any) -> None:
    """The way of an operator: serve, save /server_info, start again with it and with copies of the busiest experts."""
    model = str(tiny_dir("qwen3_moe"))
    saved = tmp_path / "load.json"
    with serving(model, "--ep-size", "2", log=tmp_path / "first.log") as server:
        assert ask_all(server) == one("qwen3_moe")
        saved.write_text(json.dumps(server.request("GET", "/server_info")[1]))
    flags = ["--ep-size", "2", "--redundant-experts", "2", "--expert-load", str(saved)]
    with serving(model, *flags, log=tmp_path / "second.log") as server:
        assert ask_all(server) == one("qwen3_moe")
        assert "placed for balance" in ranks(server)[0]["info"]["effective"]["experts"]
    with start(model, "--ep-size", "2", "--expert-load", str(tmp_path / "none"), log=tmp_path / "third.log") as server:
        assert server.process.wait(PATIENCE) == 2 and "--expert-load" in server.log


def test_a_stuck_rank_is_named_by_the_one_that_waits(tiny_dir: Checkpoint, tmp_path: Path) -> None:
    flags = ["--ep-size", "2", "--watchdog-timeout", "4"]
    with serving(str(tiny_dir("qwen3_moe")), *flags, log=tmp_path / "server.log") as server:
        processes = engines(server)
        with busy(server):
            os.kill(processes[1].pid, signal.SIGSTOP)
            assert server.process.wait(PATIENCE) == 6
        named = r"rank 1 (took no part in|did not come to) step \d+ \(rank 0's part: (decode|idle), \d tokens\)"
        assert re.search(named, server.log), server.log
        assert not psutil.wait_procs(processes, PATIENCE)[1]


def test_two_launchers_are_one_group(tiny_dir: Checkpoint, tmp_path: Path, one: Any) -> None:
    """Each serves its own clients with half of the experts; when one leaves, the other cannot go on and says why."""
    port = unused_port()
    flags = [str(tiny_dir("qwen2_moe")), "--ep-size", "2", "--nnodes", "2", "--master-port", str(port)]
    with (
        start(*flags, "--node-rank", "0", log=tmp_path / "log0") as first,
        start(*flags, "--node-rank", "1", log=tmp_path / "log1") as second,
    ):
        hosts = (first, second)
        for host in hosts:
            host.wait_ready()
        assert [ask(host, PROMPTS[i], max_tokens=5 + 3 * i) for i, host in enumerate(hosts)] == one("qwen2_moe")[:2]
        totals = [[count["steps"] + count["dummy_steps"] for count in at_rest(host)] for host in hosts]
        assert totals[0] == totals[1] and len(totals[0]) == 1
        assert all(stats(host)[0]["dummy_steps"] > 0 for host in hosts)
        assert first.request("POST", "/flush_cache")[0] == 200
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(PATIENCE) == 0, second.log
        assert first.process.wait(PATIENCE) == 6, first.log
        assert "another host's ranks were told to stop" in first.log
