"""Tests of the GPU kernels: fresh random inputs each run, every result against the plain-torch reference in fp32."""

from __future__ import annotations

import os
import random
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from gpu.kernel_samples import DEVICE, INTERPRETED

from minserve.kernels.interface import Kernels

if INTERPRETED:
    from gpu import interpreter

    interpreter.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pytest hands over the items of the whole run; only this folder's are meant."""
    for item in (item for item in items if Path(__file__).parent in item.path.parents):
        item.add_marker(pytest.mark.gpu)
        if INTERPRETED and item.get_closest_marker("interpreted") is None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, not Triton's interpreter"))
        elif not INTERPRETED and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seed() -> int:
    """A new seed each time; a failure's report shows it, and MINSERVE_TEST_SEED brings it back."""
    value = int(os.environ.get("MINSERVE_TEST_SEED", secrets.randbelow(1 << 31)))
    torch.manual_seed(value)
    random.seed(value)
    sys.stdout.write(f"MINSERVE_TEST_SEED={value}\n")
    return value


@pytest.fixture(params=["torch-gpu"] if INTERPRETED else ["torch-gpu", "hopper"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if INTERPRETED:
        from minserve.kernels.torch_gpu import torch_gpu

        return torch_gpu(DEVICE)
    from minserve.kernels import stacks

    return stacks.build(request.param, DEVICE)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that torch.empty hands out holds NaN, or the largest integer, until the end of the test."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)
