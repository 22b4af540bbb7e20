"""The shared expert as always-on slots of the routed kernel: the same logits as beside it, and no word of it left over."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from logit_comparison import prompt
from paged_steps import PagedSteps, load
from tiny_checkpoints import VARIANTS, write_checkpoint

from minserve.errors import UsageError
from minserve.kernels import reference
from minserve.models.layers.linear import GatedMLP
from minserve.models.layers.moe import MixtureOfExperts
from minserve.models.layers.placement import ExpertPlacement
from tools.quantize_fp8 import quantize_checkpoint

SHARED = sorted(name for name in VARIANTS if "qwen" not in name)
KEEPING = dataclasses.replace(reference.cpu(), name="keeping", keeps_fp8=True)


def layers(model):
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def logits(model, kernels=None):
    steps = PagedSteps(model, kernels)
    first = steps.step([("a", prompt(9, seed=1)), ("b", prompt(4, seed=2))])
    return torch.cat([*first, *steps.step([("a", [5]), ("b", [7])], padding=3)])


@pytest.mark.parametrize("variant", SHARED)
def test_fused_is_serial(tiny_dir, variant):
    serial, fused = (load(tiny_dir(variant), shared_expert=policy) for policy in ("serial", "fused"))
    torch.testing.assert_close(logits(fused), logits(serial), rtol=1e-4, atol=1e-4)
    for one, other in zip(layers(fused), layers(serial), strict=True):
        more = other.shared.down.weight.shape[1] // other.experts.intermediate_size
        assert one.shared is None
        assert one.experts.w13.shape[0] == other.experts.w13.shape[0] + more
        assert one.router.config.always_on == more


@pytest.mark.parametrize("kernels", [reference.cpu(), KEEPING], ids=["widened", "kept"])
@pytest.mark.parametrize("variant", ["deepseek_v2", "deepseek_v3_small", "moonlight"])
@pytest.mark.parametrize("width", [128, 96])
def test_fused_is_serial_in_fp8(tmp_path, variant, kernels, width):
    """96: a block would span gate and up rows, so routed experts are widened, and so must the shared one be."""
    directory = write_checkpoint(variant, tmp_path / "plain", hidden_size=256, moe_intermediate_size=width)
    quantize_checkpoint(directory, tmp_path / "fp8")
    serial, fused = (load(tmp_path / "fp8", kernels, shared_expert=policy) for policy in ("serial", "fused"))
    torch.testing.assert_close(logits(fused, kernels), logits(serial, kernels), rtol=1e-4, atol=1e-4)
    kept = kernels.keeps_fp8 and width == 128
    assert all((layer.experts.w13.dtype == torch.float8_e4m3fn) == kept for layer in layers(fused))


def test_a_gated_shared_expert_is_refused_in_words(tiny_dir):
    with pytest.raises(UsageError, match=r"--shared-expert fused: .*gated.*use overlap, serial or auto"):
        load(tiny_dir("qwen2_moe"), shared_expert="fused")


def test_experts_that_are_spread_over_ranks_are_refused_in_words(tiny_dir):
    with pytest.raises(UsageError, match="spread over ranks"):
        load(tiny_dir("deepseek_v3_small"), shared_expert="fused", placement=ExpertPlacement.spread(16, 2, 0))


def test_other_formats_than_the_routed_experts_are_refused_in_words(tmp_path):
    directory = write_checkpoint("deepseek_v3_small", tmp_path / "plain", hidden_size=256, moe_intermediate_size=128)
    quantize_checkpoint(directory, tmp_path / "fp8")

    plain = load(directory)
    assert isinstance(layers(plain)[0].shared, GatedMLP)
    fp8 = load(tmp_path / "fp8", KEEPING)
    assert not layers(fp8)[0].experts.takes(layers(plain)[0].shared)
    assert layers(fp8)[0].experts.takes(layers(fp8)[0].shared)


def test_a_model_without_a_shared_expert_has_nothing_to_fuse(tiny_dir):
    model = load(tiny_dir("qwen3_moe"), shared_expert="fused")
    assert all(layer.router.config.always_on == 0 for layer in layers(model))
