"""What `minserve tune` would measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minserve.kernels import tune
from minserve.kernels.expert_choices import ExpertShape, by_rule
from minserve.kernels.expert_tiles import OWN_TILES_TOKENS

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"


def shapes(name: str) -> list[ExpertShape]:
    return list(tune._shapes(SHAPES / name))


def test_a_shared_expert_is_measured_among_the_routed_ones_too() -> None:
    moonlight = [ExpertShape("plain", 64, 2048, 1408, 6), ExpertShape("plain", 66, 2048, 1408, 8)]
    assert shapes("moonlight-16b-a3b") == moonlight
    assert shapes("deepseek-v3")[1] == ExpertShape("fp8_block", 257, 7168, 2048, 9)
    assert shapes("kimi-k2-thinking") == [ExpertShape("int4_group", 384, 7168, 2048, 8)]
    assert shapes("qwen2-57b-a14b") == [ExpertShape("plain", 64, 3584, 2560, 8)]  # its shared expert is gated


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-30b-a3b-fp8", "kimi-k2-thinking"])
@pytest.mark.parametrize("tokens", tune.TOKENS)
def test_candidates_fit_the_kernels_and_hold_the_rule(model: str, tokens: int) -> None:
    (shape,) = shapes(model)
    candidates = list(tune._candidates(tokens, shape, True))
    assert len(set(candidates)) == len(candidates)
    assert by_rule(tokens, shape).sizes in [choice.sizes for choice in candidates if choice.path == "tiles"]
    for choice in candidates:
        blocks = (choice.sizes.up, choice.sizes.down)
        assert shape.format != "fp8_block" or all(block.n <= 128 and block.k % 128 == 0 for block in blocks)
        assert shape.format != "int4_group" or choice.path == "tiles"
        assert tokens > OWN_TILES_TOKENS or choice.sizes.rows == OWN_TILES_TOKENS
    assert {choice.path for choice in tune._candidates(tokens, shape, False)} <= {"vector", "tiles"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main([str(SHAPES / "qwen3-30b-a3b")]) == 3
    assert "finds none" in capsys.readouterr().err
