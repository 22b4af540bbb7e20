"""The tests of our Triton kernels, without a GPU: what of `tests/gpu` runs in Triton's interpreter, in a process of its own.

Whether functions are interpreted or compiled is decided once a process, when Triton is imported.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAST = 150
"""Tests that have to pass: as good as none did where all are skipped."""


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="Triton is not made for this machine")
def test_the_triton_kernels_in_the_interpreter() -> None:
    environment = {
        "MINSERVE_TEST_SEED": "1",
        **os.environ,
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    words = ["-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=short", "tests/gpu"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= LEAST, done.stdout
