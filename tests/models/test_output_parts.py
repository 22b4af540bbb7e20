"""Attention's output projection that leaves its sum, in parts, to the norm that reads it: the same logits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from logit_comparison import assert_same_logits, prompt
from paged_steps import PagedSteps, load
from tiny_checkpoints import ALIGNED, write_checkpoint

from minserve.kernels import reference
from minserve.kernels.interface import Fp8Rows, PartialSums
from tools.quantize_fp8 import quantize_checkpoint


def in_halves(x, weight):
    """An entry for `Kernels.linear_parts`: the first columns' product, and the others'."""
    wide = reference.widen(weight.weight, weight.scale, torch.float32)
    half = x.shape[1] // 2
    return PartialSums(torch.stack([x[:, :half] @ wide[:, :half].t(), x[:, half:] @ wide[:, half:].t()], dim=1))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "moonlight", "deepseek_v3"])
def test_the_next_norm_adds_up_the_parts(name, tmp_path):
    write_checkpoint(name, tmp_path)
    called = []

    def counted(x, weight):
        called.append(tuple(weight.weight.shape))
        return in_halves(x, weight)

    table = dataclasses.replace(reference.cpu(), linear_parts=counted)
    tokens = prompt(40, seed=1)
    whole, parted = load(tmp_path), load(tmp_path, table)
    assert_same_logits(*(PagedSteps(model).step([("r", tokens)])[0] for model in (parted, whole)))
    output = parted.layers[0].attention.output.weight
    assert called == [tuple(output.shape)] * parted.num_layers


def test_a_bias_is_added_by_the_whole_product(tmp_path):
    write_checkpoint("qwen3_moe", tmp_path, attention_bias=True)

    def refused(*_):
        raise AssertionError("the bias would be lost")

    tokens = prompt(20, seed=1)
    one, other = load(tmp_path), load(tmp_path, dataclasses.replace(reference.cpu(), linear_parts=refused))
    assert one.layers[0].attention.output.bias is not None
    assert torch.equal(*(PagedSteps(model).step([("r", tokens)])[0] for model in (one, other)))


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_attention_quantises_its_rows_where_the_parts_take_fp8(name, tmp_path):
    """Although the whole product would not: only the layer that leaves its sum says that it does."""
    write_checkpoint(name, tmp_path / "plain", **ALIGNED[name])
    quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8")
    plain, kinds = reference.fp8_rows(torch.float32), []

    def takes(rows, dtype, weight, by_parts):
        return by_parts and plain.takes(rows, dtype, weight, by_parts)

    def parts(x, weight):
        kinds.append(type(x))
        return in_halves(x.values.float() * x.scales.repeat_interleave(128, dim=1), weight)

    table = dataclasses.replace(reference.cpu(), name="fp8", keeps_fp8=True, linear_parts=parts)
    one = load(tmp_path / "fp8", dataclasses.replace(table, linear_parts=lambda x, weight: parts(reference.quantize(x), weight)))
    other = load(tmp_path / "fp8", dataclasses.replace(table, fp8_rows=dataclasses.replace(plain, takes=takes)))
    tokens = prompt(40, seed=1)
    assert torch.equal(*(PagedSteps(model).step([("r", tokens)])[0] for model in (one, other)))
    assert kinds == [Fp8Rows] * (2 * other.num_layers)
