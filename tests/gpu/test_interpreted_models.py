"""Whole tiny models on the kernels of the torch-gpu stack, in Triton's interpreter: the tokens of the cpu stack, step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu.kernel_samples import INTERPRETED, distance
from paged_steps import PagedSteps, load

from minserve.config import EMBEDDED_DIRECTORY
from minserve.kernels.interface import Kernels
from tools.quantize_fp8 import quantize_checkpoint

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(not INTERPRETED, reason="on a GPU whole models run in the tests of graphs and of the server"),
]
FIRST, SECOND = [0, 20, 31, 57, 40, 63, 22], [0, 45, 46]


def answers(directory: Path, kernels: Kernels | None, dtype: torch.dtype, steps: int) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens and logits: a prompt alone, a second one beside the first's token, then tokens of both."""
    paged = PagedSteps(load(directory, kernels, dtype=dtype, shared_expert="serial"), kernels)
    logits = paged.step([("a", FIRST)])
    seen, tokens = [logits[0][-1]], [int(logits[0][-1].argmax())]
    rows = [("a", tokens[-1:]), ("b", SECOND)]
    for _ in range(steps):
        logits = paged.step(rows)
        last = [row[-1] for row in logits]
        seen += last
        tokens += [int(row.argmax()) for row in last]
        rows = [("a", tokens[-2:-1]), ("b", tokens[-1:])]
    return tokens, seen


def assert_same_answers(directory: Path, kernels: Kernels, dtype: torch.dtype, steps: int, error: float) -> None:
    wanted, true_logits = answers(directory, None, torch.float32, steps)
    tokens, logits = answers(directory, kernels, dtype, steps)
    assert tokens == wanted
    assert max(distance(one, truth) for one, truth in zip(logits, true_logits, strict=True)) < error


def test_the_embedded_model(kernels: Kernels) -> None:
    assert_same_answers(EMBEDDED_DIRECTORY, kernels, torch.float32, 1, 1e-4)


def test_the_embedded_model_in_fp8(kernels: Kernels, tmp_path: Path) -> None:
    """In bf16, so that the kernels for few rows and for one token take part."""
    quantize_checkpoint(EMBEDDED_DIRECTORY, tmp_path / "fp8")
    assert_same_answers(tmp_path / "fp8", kernels, torch.bfloat16, 1, 3e-2)


def test_a_tiny_qwen3(kernels: Kernels, tiny_dir: Callable[[str], Path]) -> None:
    assert_same_answers(tiny_dir("qwen3_moe"), kernels, torch.float32, 1, 1e-4)
