"""Two hosts of one group, each in a network namespace of its own: nothing of the other's loopback or sockets can be reached."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import START_SECONDS, ServerProcess, serving
from waiting import PATIENCE

PROMPTS = ["The quick brown fox", "0123456789 " * 9]
ASK = """
import sys, urllib.request
url, body = sys.argv[1], sys.argv[2].encode() or None
try:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    sys.stdout.write(urllib.request.urlopen(request, timeout=60).read().decode())
except OSError as error:
    sys.exit(str(error))
"""


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, joined by a cable: 10.99.0.1 and 10.99.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2's `ip`")
    names = tuple(f"minserve-{os.getpid()}-{index}" for index in (0, 1))
    with contextlib.ExitStack() as made:
        for name in names:
            try:
                run("ip", "netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this user may not make network namespaces: {error.stderr.strip()}")
            made.callback(run, "ip", "netns", "delete", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
        for index, name in enumerate(names):
            run("ip", "-n", name, "address", "add", f"10.99.0.{index + 1}/24", "dev", f"cable{index}")
            run("ip", "-n", name, "link", "set", f"cable{index}", "up")
        yield names[0], names[1]


class Host(ServerProcess):
    """A server in a namespace, asked from inside of it."""

    def __init__(self, namespace: str, arguments: list[str], log: Path) -> None:
        self.inside = ["ip", "netns", "exec", namespace]
        super().__init__(arguments, log, before=self.inside)

    def fetch(self, path: str, body: Any = None) -> Any:
        words = [f"{self.base_url}{path}", "" if body is None else json.dumps(body)]
        done = subprocess.run([*self.inside, sys.executable, "-c", ASK, *words], capture_output=True, text=True, timeout=PATIENCE)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        self.wait_for_log("minserve.server: ready: ", timeout)


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


def test_two_hosts_are_one_group_and_a_dead_one_is_named(
    hosts: tuple[str, str], tiny_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = str(tiny_dir("qwen3_moe"))
    bodies = [{"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True} for prompt in PROMPTS]
    with serving(model, log=tmp_path / "alone.log") as alone:
        expected = [text_of(alone.request("POST", "/v1/completions", body)[1]) for body in bodies]
    flags = [model, "--ep-size", "2", "--nnodes", "2", "--master-addr", "10.99.0.1", "--master-port", "29511"]
    group = [Host(name, [*flags, "--node-rank", str(index)], tmp_path / f"host{index}.log") for index, name in enumerate(hosts)]
    try:
        for host in group:
            host.wait_ready()
        assert [text_of(host.fetch("/v1/completions", body)) for host, body in zip(group, bodies, strict=True)] == expected
        rank = group[1].fetch("/server_info")["ranks"][0]
        os.kill(rank["info"]["pid"], signal.SIGKILL)
        assert [host.process.wait(PATIENCE) for host in group] == [6, 6], group[0].log + group[1].log
        assert "rank 1" in group[0].log
    finally:
        for host in group:
            host.end()
