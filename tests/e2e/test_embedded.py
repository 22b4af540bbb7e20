"""The server that starts when nothing is said, measured with its own eval."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, serving
from waiting import PATIENCE


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(log=tmp_path_factory.mktemp("embedded") / "log") as server:
        yield server


def test_the_log_says_how_to_curl_it_and_that_command_works(embedded: ServerProcess) -> None:
    (line,) = (line for line in embedded.log.splitlines() if "try: curl" in line)
    command = line.partition("try: ")[2]
    assert "What is 23 + 58?" in command
    if shutil.which("curl") is None:  # the command is then taken apart and sent as it stands
        url, body = command.split()[1], command.split(" -d '")[1].rstrip("'")
        status, answer = embedded.request("POST", url.removeprefix(embedded.base_url), json.loads(body))
        assert status == 200
    else:
        done = subprocess.run(
            ["sh", "-c", command.replace("curl", "curl -sS", 1)], capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
    assert answer["model"] == "embedded"
    assert answer["choices"][0]["message"]["content"] == "81"
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("form", ["json_object", "schema", "tool"])
def test_an_answer_held_to_a_form_comes_to_the_point(embedded: ServerProcess, form: str) -> None:
    """The model knows neither JSON nor tools, and its vocabulary has a tag of reasoning that its template never uses."""
    schema = {"type": "object", "properties": {"sum": {"enum": [81, 18]}}, "required": ["sum"], "additionalProperties": False}
    body = {"messages": [{"role": "user", "content": "What is 23 + 58?"}], "temperature": 0, "max_tokens": 100}
    if form == "tool":
        body |= {"tools": [{"type": "function", "function": {"name": "answer", "parameters": schema}}]}
        body |= {"tool_choice": "required", "parallel_tool_calls": False}
    elif form == "schema":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    else:
        body["response_format"] = {"type": "json_object"}
    status, answer = embedded.request("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["message"].get("reasoning_content") is None
    if form == "tool":
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["sum"] in (81, 18)
        assert choice["finish_reason"] == "tool_calls"
    elif form == "schema":
        assert json.loads(choice["message"]["content"])["sum"] in (81, 18)
    else:
        assert choice["message"]["content"].lstrip().startswith("{")


def test_the_eval_passes_and_its_last_line_is_the_accuracy(embedded: ServerProcess) -> None:
    command = [sys.executable, "-m", "minserve", "eval", "arithmetic", "--base-url", embedded.base_url]
    done = subprocess.run([*command, "--limit", "16", "--concurrency", "8"], capture_output=True, text=True, timeout=5 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    last = re.fullmatch(r"accuracy (\d\.\d{3})", done.stdout.splitlines()[-1])
    assert last is not None
    assert float(last.group(1)) >= 0.97
    assert len([line for line in done.stdout.splitlines() if "drift 0.0000" in line]) == 4, done.stdout


def test_the_eval_of_no_server_exits_3() -> None:
    command = [sys.executable, "-m", "minserve", "eval", "arithmetic", "--base-url", "http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 3
    assert "cannot reach" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cpu_counts_what_each_expert_gets_beside_a_fused_shared_one(tmp_path: Path) -> None:
    with serving("--shared-expert", "fused", log=tmp_path / "log") as server:
        body = {"prompt": "1 + 2 = ", "max_tokens": 5, "ignore_eos": True}
        assert server.request("POST", "/v1/completions", body)[0] == 200
        (rank,) = server.request("GET", "/server_info")[1]["ranks"]
    loads = rank["now"]["expert_load"].values()
    num_tokens = rank["now"]["stats"]["prefix_cache_queries"] + 4  # the last token drawn is never computed
    assert {len(load) for load in loads} == {16}
    assert {sum(load) for load in loads} == {num_tokens * 4}
