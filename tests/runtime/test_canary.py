"""Layers against fp32 arithmetic, on the CPU: 16-bit rounding passes, a wrong kernel or weight does not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from paged_steps import load
from tiny_checkpoints import write_checkpoint
from unsummed_experts import expert_rows

from minserve.errors import SelfCheckFailed
from minserve.kernels import reference
from minserve.runtime import canary
from minserve.runtime.canary import check_layers
from tools.quantize_fp8 import quantize_checkpoint

BF16 = torch.bfloat16


@pytest.mark.parametrize("variant", ["deepseek_v3", "moonlight", "deepseek_v2_lite", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_rounding_passes(tiny_dir, variant, page_size):
    kernels = reference.cpu()
    model = load(tiny_dir(variant), kernels, dtype=BF16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    errors = check_layers(model, kernels, BF16, page_size)
    dense = {"dense layer prefill", "dense layer decode"} if variant.startswith(("deepseek", "moon")) else set()
    assert set(errors) >= dense | {"expert layer prefill", "expert layer decode", "last layer prefill"}
    assert all(0 < error < 0.03 for error in errors.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.kernels is kernels for module in model.modules() if hasattr(module, "kernels"))


@pytest.mark.parametrize("rows", [None, expert_rows])
def test_the_same_arithmetic_has_no_error(tiny_dir, rows):
    kernels = dataclasses.replace(reference.cpu(), expert_rows=rows)
    errors = check_layers(load(tiny_dir("deepseek_v3_small"), kernels), kernels, torch.float32, 16)
    assert max(errors.values()) < 1e-5


def test_fp8_weights_that_stay_fp8(tmp_path):
    write_checkpoint("qwen3_moe", tmp_path / "plain", hidden_size=256, moe_intermediate_size=128)
    quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8")
    kernels = dataclasses.replace(reference.cpu(), keeps_fp8=True)
    model = load(tmp_path / "fp8", kernels, dtype=torch.float32)
    assert torch.float8_e4m3fn in {parameter.dtype for parameter in model.parameters()}
    assert max(check_layers(model, kernels, torch.float32, 16).values()) < 1e-4


def swapped_silu(x):
    gate, up = x.chunk(2, dim=-1)
    return reference.silu_and_mul(torch.cat((up, gate), dim=-1))


def unweighted(x, slot_ids, weights, experts):
    return reference.experts_flat(x, slot_ids, torch.ones_like(weights), experts)


def no_rotation(q, kv, gain, eps, w_uk, rotary, *rest):
    half = rotary.cos_sin.shape[1] // 2
    still = torch.cat((torch.ones_like(rotary.cos_sin[:, :half]), torch.zeros_like(rotary.cos_sin[:, half:])), dim=1)
    return reference.mla_inputs(q, kv, gain, eps, w_uk, dataclasses.replace(rotary, cos_sin=still), *rest)


def unscaled(x, weight, eps):
    del eps
    return x * weight


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"silu_and_mul": swapped_silu}, "layer 0 (dense layer)"),
        ({"experts_flat": unweighted}, "layer 1 (expert layer)"),
        ({"mla_inputs": no_rotation}, "layer 0 (dense layer)"),
        ({"rms_norm": unscaled}, "layer 0 (dense layer)"),
    ],
)
def test_a_wrong_kernel_is_refused(tiny_dir, broken, named):
    kernels = dataclasses.replace(reference.cpu(), **broken)
    with pytest.raises(SelfCheckFailed, match="fp32 reference arithmetic") as caught:
        check_layers(load(tiny_dir("deepseek_v3_small"), kernels), kernels, torch.float32, 16)
    assert named in str(caught.value)


@pytest.mark.parametrize(("wrong", "refused"), [(1, False), (canary.DECODE_TOKENS, True)])
def test_one_token_whose_choice_of_experts_turned_is_no_fault(tiny_dir, wrong, refused):
    calls = []

    def experts_flat(x, slot_ids, weights, experts):
        calls.append(len(x))
        turned = len(x) == 1 and calls.count(1) <= wrong
        return reference.experts_flat(x, slot_ids.roll(1, dims=1) if turned else slot_ids, weights, experts)

    kernels = dataclasses.replace(reference.cpu(), experts_flat=experts_flat)
    model = load(tiny_dir("deepseek_v3_small"), kernels)
    if refused:
        with pytest.raises(SelfCheckFailed, match="in decode"):
            check_layers(model, kernels, torch.float32, 16)
    else:
        assert max(check_layers(model, kernels, torch.float32, 16).values()) < 1e-5
