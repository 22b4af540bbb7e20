"""FP8 kept in memory where a stack can use it, widened at load where it cannot: both say the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from logit_comparison import assert_same_logits, prompt
from paged_steps import PagedSteps, load
from tiny_checkpoints import ALIGNED, write_checkpoint

from minserve.kernels import reference
from tools.quantize_fp8 import quantize_checkpoint

KEPT = dataclasses.replace(reference.cpu(), name="fp8", keeps_fp8=True)


def _twin(name, tmp_path):
    write_checkpoint(name, tmp_path / "plain", **ALIGNED.get(name, {}))
    quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8")
    return tmp_path / "fp8"


def _formats(model):
    return {name.removesuffix(".weight"): p.dtype for name, p in model.named_parameters() if not name.endswith("scale")}


@pytest.mark.parametrize("name", [*sorted(ALIGNED), "deepseek_v2", "qwen3_moe_tied"])
def test_kept_and_widened_agree(name, tmp_path):
    directory = _twin(name, tmp_path)
    kept, widened = load(directory, KEPT), load(directory)
    assert torch.float8_e4m3fn in _formats(kept).values()
    assert torch.float8_e4m3fn not in _formats(widened).values()
    tokens = prompt(40, seed=1)
    assert_same_logits(*(PagedSteps(model).step([("r", tokens)])[0] for model in (kept, widened)))


@pytest.mark.parametrize("name", sorted(ALIGNED))
def test_rows_quantised_where_they_are_made_are_the_same(name, tmp_path):
    """A layer that quantises its rows and one that is handed them in FP8, so far as their width has whole blocks."""
    handed, plain = [], reference.fp8_rows(torch.float32)

    def takes(rows, dtype, weight, by_parts):
        assert not by_parts  # the table has no such product
        handed.append(plain.takes(rows, dtype, weight, by_parts))
        return handed[-1]

    def quantising(x, weight, bias):
        if plain.takes(x.shape[0], x.dtype, weight, False):
            return plain.linear(reference.quantize(x), weight, bias)
        return KEPT.linear(x, weight, bias)

    directory = _twin(name, tmp_path)
    one = load(directory, dataclasses.replace(KEPT, linear=quantising))
    other = load(directory, dataclasses.replace(KEPT, linear=quantising, fp8_rows=dataclasses.replace(plain, takes=takes)))
    tokens = prompt(40, seed=1)
    assert torch.equal(*(PagedSteps(model).step([("r", tokens)])[0] for model in (one, other)))
    assert any(handed)


def test_what_stays_fp8(tmp_path):
    """All projections that the kernels multiply with; the router, the head and the absorbed kv_b are plain."""
    model = load(_twin("deepseek_v3", tmp_path), KEPT)
    kept = {name.split(".", 2)[-1] for name, dtype in _formats(model).items() if dtype == torch.float8_e4m3fn}
    attention = {"attention.down", "attention.q_b", "attention.output"}
    assert kept == attention | {"mlp.gate_up", "mlp.down", "mlp.experts.w13", "mlp.experts.w2"} | {
        "mlp.shared.gate_up",
        "mlp.shared.down",
    }
    layer = model.layers[1]
    # 128 rows of q_a and 576 of the latent: one whole block and four and a half.
    assert layer.attention.down.weight.shape == (704, 256)
    assert layer.attention.down.scale.shape == (6, 2)
    assert layer.mlp.experts.w13_scale.shape == (16, 2, 2)
    assert layer.mlp.experts.w2_scale.shape == (16, 2, 1)
    assert layer.attention.kv_b.weight.dtype == torch.float32


def test_blocks_that_would_span_two_parts_are_widened(tmp_path):
    """Gate and up rows of width 48 or 32, or queries of 96 rows, would share a block."""
    model = load(_twin("deepseek_v2", tmp_path), KEPT)
    dtypes = _formats(model)
    assert dtypes["layers.1.mlp.experts.w13"] == dtypes["layers.1.mlp.experts.w2"] == torch.float32
    assert dtypes["layers.1.attention.down"] == torch.float32
    assert dtypes["layers.1.mlp.shared.gate_up"] == torch.float32
    assert dtypes["layers.1.mlp.shared.down"] == torch.float8_e4m3fn
    assert dtypes["layers.1.attention.output"] == torch.float8_e4m3fn
