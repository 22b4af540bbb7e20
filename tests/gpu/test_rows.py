"""Norms, rotary embedding, activation, router and cache writes."""

from __future__ import annotations

import pytest
import torch
from gpu.kernel_samples import BF16, DEVICE, distance, normal, same_bits

from minserve.kernels import reference
from minserve.kernels.interface import AttentionShape, Kernels, RouterConfig, kv_page_shape

pytestmark = pytest.mark.usefixtures("poisoned")
WIDTHS = [48, 128, 2048, 7168]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 130])
def test_norms_equal_the_reference(kernels: Kernels, width: int, rows: int) -> None:
    x, residual, weight = normal(rows, width), normal(rows, width), normal(width)
    before = x.clone(), residual.clone()
    assert distance(kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x.float(), weight, 1e-6)) < 4e-3
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-6)
    truth = reference.add_rms_norm(x, residual, weight, 1e-6)
    assert same_bits(total, truth[1])
    assert distance(normed, truth[0]) < 4e-3
    assert same_bits(x, before[0])
    assert same_bits(residual, before[1])


def test_norms_read_views(kernels: Kernels) -> None:
    fused, weight = normal(9, 40 * 128), normal(128)
    heads = fused.unflatten(1, (40, 128))[:, 32:36]
    assert distance(kernels.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads.float(), weight, 1e-5)) < 4e-3
    latent, gain = fused[:, 100:612], normal(512)
    assert distance(kernels.rms_norm(latent, gain, 1e-5), reference.rms_norm(latent.float(), gain, 1e-5)) < 4e-3


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rot"), [(32, 4, 128, 128), (16, 1, 64, 64), (16, 2, 256, 64), (4, 2, 48, 16)]
)
def test_rotary_equals_the_reference(
    kernels: Kernels, interleaved: bool, heads: int, kv_heads: int, head_dim: int, rot: int
) -> None:
    fused = normal(11, (heads + 2 * kv_heads) * head_dim).unflatten(1, (-1, head_dim))
    q, k = fused[:, :heads], fused[:, heads : heads + kv_heads]
    angles, positions = torch.rand(500, rot // 2, device=DEVICE) * 6.3, torch.randint(0, 500, (11,), device=DEVICE)
    table, before = torch.cat((angles.cos(), angles.sin()), dim=1), fused.clone()
    results = kernels.rotary(q, k, table, positions, interleaved)
    for result, truth in zip(results, reference.rotary(q.float(), k.float(), table, positions, interleaved), strict=True):
        assert distance(result, truth) < 4e-3
    assert same_bits(fused, before)


@pytest.mark.parametrize("inner", [70, 768, 18432])
def test_silu_and_mul_equals_the_reference(kernels: Kernels, inner: int) -> None:
    x = normal(5, 2 * inner)
    assert distance(kernels.silu_and_mul(x), reference.silu_and_mul(x.float())) < 4e-3


ROUTERS = {
    "qwen1.5": (60, RouterConfig(4, "softmax")),
    "qwen3": (128, RouterConfig(8, "softmax", normalize=True)),
    "qwen3-next": (512, RouterConfig(10, "softmax", normalize=True)),
    "moonlight": (64, RouterConfig(6, "sigmoid", normalize=True, scale=2.446)),
    "kimi-k2": (384, RouterConfig(8, "sigmoid", normalize=True, scale=2.827)),
    "deepseek-v3": (256, RouterConfig(8, "sigmoid", 8, 4, "top2_sum", True, 2.5)),
    "deepseek-v2": (160, RouterConfig(6, "softmax", 8, 3, "max", False, 16.0)),
    "moonlight, shared expert fused": (64, RouterConfig(6, "sigmoid", normalize=True, scale=2.446, always_on=2)),
    "deepseek-v3, shared expert fused": (256, RouterConfig(8, "sigmoid", 8, 4, "top2_sum", True, 2.5, 1)),
    "tiny": (24, RouterConfig(3, "sigmoid", 3, 1, "top2_sum", True, 2.5)),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_router_chooses_as_the_reference(kernels: Kernels, name: str) -> None:
    experts, config = ROUTERS[name]
    logits = normal(200, experts, dtype=torch.float32) * 2
    logits[:3] = torch.randint(-2, 2, (3, experts), device=DEVICE).float()
    bias = normal(experts, dtype=torch.float32) - 1.0 if config.scoring == "sigmoid" else None
    ids, weights = kernels.route(logits, bias, config)
    true_ids, true_weights = reference.route(logits, bias, config)
    same = (ids == true_ids).all(dim=1)
    # fp32 sigmoid and exp differ by an ulp between implementations, so near ties may fall the other way; never many.
    assert same.float().mean() > 0.97
    assert distance(weights[same], true_weights[same]) < 1e-5


@pytest.mark.parametrize("name", ROUTERS)
def test_router_gives_valid_ids_for_rows_of_nan(kernels: Kernels, name: str) -> None:
    experts, config = ROUTERS[name]
    ids, _ = kernels.route(torch.full((3, experts), float("nan"), device=DEVICE), None, config)
    always_on = list(range(experts, experts + config.always_on))
    for row in ids.tolist():
        chosen = row[: config.top_k]
        assert min(chosen) >= 0 and max(chosen) < experts and len(set(chosen)) == config.top_k
        assert row[config.top_k :] == always_on


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_cache_writes_reach_their_slots_and_no_other(kernels: Kernels, dtype: torch.dtype) -> None:
    shape = AttentionShape("gqa", 32, 4, 128, 0, 1.0)
    fused = normal(37, 12, 128)
    k, v = fused[:, 4:8], fused[:, 8:]
    slots = torch.randperm(10 * 64, device=DEVICE)[:37]
    pages = normal(10, *kv_page_shape(shape, 64), dtype=dtype)
    expected = pages.clone()
    reference.write_gqa(k[1:], v[1:], expected, slots[1:])
    slots[0] = -1
    kernels.write_gqa(k, v, pages, slots)
    assert same_bits(pages, expected)

    latent, rope = normal(37, 600)[:, :512], normal(37, 640)[:, 512:576]
    pages = normal(10, 64, 576, dtype=dtype)
    expected = pages.clone()
    reference.write_mla(latent[1:], rope[1:], expected, slots[1:])
    kernels.write_mla(latent, rope, pages, slots)
    assert same_bits(pages, expected)
