"""Real `minserve launch` processes on a GPU: one that may not serve does not, and a second start compiles nothing."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest
import server_process

TESTS = Path(__file__).parents[1]
COMPILERS = {"TRITON_CACHE_DIR": "triton", "DG_JIT_CACHE_DIR": "deep_gemm", "FLASHINFER_WORKSPACE_BASE": "flashinfer"}
COMPILE_SECONDS = 200.0
SMALL = ("--device", "cuda", "--max-num-seqs", "4", "--num-pages", "500", "--max-model-len", "2048")


@pytest.mark.parametrize("flag", ["off", "on"])
@pytest.mark.parametrize("plan", ["serial", "overlap"])
def test_a_disposing_kernel_keeps_the_server_from_readiness(plan: str, flag: str, tmp_path: Path) -> None:
    """The same engine is let through when the capture flag reaches its kernel."""
    folders = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": folders, "MINSERVE_TEST_FLAG": flag}
    words = [*SMALL, "--stack", "torch-gpu", "--shared-expert", plan]
    server = server_process.ServerProcess(words, tmp_path / "log", environment, engine_module="gpu.faulty_engine")
    try:
        if flag == "on":
            server.wait_ready()
            return
        seen = set()
        end = time.monotonic() + server_process.START_SECONDS
        while server.process.poll() is None and time.monotonic() < end:
            seen.add(server.status("/ready"))
            time.sleep(0.02)
        assert server.process.wait(10) == 7, server.log
        assert 503 in seen
        assert 200 not in seen
        sentence = r"^\S+ ERROR minserve.server: the (decode|mixed) graph of .*\d+ .*does not equal an eager run"
        assert re.search(sentence, server.log, re.MULTILINE), server.log
    finally:
        server.end()


def files(folder: Path) -> dict[str, int]:
    """Every file below it, and when it was written."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("stack", ["torch-gpu", "hopper"])
def test_a_second_start_compiles_nothing(stack: str, tmp_path: Path) -> None:
    """Compiled kernels that the machine has already are brought along: FlashInfer's modules take minutes each."""
    cache = tmp_path / "kernels"
    for variable, name in COMPILERS.items():
        if variable in os.environ:
            shutil.copytree(os.environ[variable], cache / name, copy_function=os.link)
    if stack == "hopper" and not (cache / "flashinfer").exists():
        pytest.skip("FLASHINFER_WORKSPACE_BASE names no compiled modules")
    environment = {variable: str(cache / name) for variable, name in COMPILERS.items()}
    words = [*SMALL, "--stack", stack, "--kernel-cache", str(cache)]
    seconds = []
    for start in range(2):
        before = files(cache)
        began = time.monotonic()
        with server_process.start(*words, log=tmp_path / f"log{start}", environment=environment) as server:
            server.wait_ready(COMPILE_SECONDS)
            seconds.append(time.monotonic() - began)
            question = {"model": "embedded", "messages": [{"role": "user", "content": "What is 23 + 58?"}], "temperature": 0}
            assert server.request("POST", "/v1/chat/completions", question)[1]["choices"][0]["message"]["content"] == "81"
    after = files(cache)
    print(stack, "seconds to ready:", [round(value, 1) for value in seconds], len(after), "files kept")  # noqa: T201
    written = sorted(path for path, when in after.items() if before.get(path) != when and "/remembered/" not in path)
    assert not written, f"of {len(after)} files the second start wrote {sorted({Path(path).name for path in written})}"
    assert any("/remembered/" in path for path in after)
