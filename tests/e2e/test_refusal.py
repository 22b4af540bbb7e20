"""A server whose graphs are not what they should be: never ready, one sentence, exit code 7."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import server_process


def test_a_graph_with_an_old_plan_keeps_the_server_from_readiness(tiny_dir: Callable[[str], Path], tmp_path: Path) -> None:
    words = [str(tiny_dir("deepseek_v3_small")), "--device", "cpu", "--num-pages", "64", "--max-num-seqs", "4"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    server = server_process.ServerProcess(words, tmp_path / "log", environment, engine_module="refusing_engine")
    try:
        seen = set()
        end = time.monotonic() + server_process.START_SECONDS
        while server.process.poll() is None and time.monotonic() < end:
            seen.add(server.status("/ready"))
            time.sleep(0.02)
        assert server.process.wait(server_process.START_SECONDS) == 7, server.log
        assert 503 in seen
        assert 200 not in seen
        sentence = r"^\S+ ERROR minserve.server: the decode graph of batch size 2 .*: it does not equal an eager run"
        assert re.search(sentence, server.log, re.MULTILINE), server.log
        assert "Traceback" not in server.log
    finally:
        server.end()
