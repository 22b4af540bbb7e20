"""Every Triton kernel of ours compiles for an H200, without one: what the interpreter does not show. In a process of its own."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_SHARED = 227 << 10
"""Bytes of shared memory that a program may have on compute capability 9.0."""


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="Triton is not made for this machine")
def test_every_kernel_compiles_for_an_h200(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(Path(__file__).parent / "compile_for_h200.py")]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    sources = (ROOT / "minserve" / "kernels").glob("*.py")
    written = {
        f"{path.stem}.{name}" for path in sources for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert set(report) == written
    assert max(row["shared"] for row in report.values()) <= MOST_SHARED
