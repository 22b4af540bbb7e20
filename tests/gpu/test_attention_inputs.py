"""What lies between the projections and attention: queries as they meet the cache, and the cache's new entries."""

from __future__ import annotations

import pytest
import torch
from gpu.kernel_samples import BF16, DEVICE, distance, normal, same_bits, sized

from minserve.kernels import reference
from minserve.kernels.interface import AttentionShape, HeadNorms, Kernels, RotaryTable, kv_page_shape

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("poisoned")]
ERROR = 4e-3
PAGE = 64


def rotary(rot: int, interleaved: bool) -> RotaryTable:
    angles = torch.rand(500, rot // 2, device=DEVICE) * 6.3
    return RotaryTable(torch.cat((angles.cos(), angles.sin()), dim=1), interleaved)


def slots_of(tokens: int) -> torch.Tensor:
    """Anywhere in ten pages, the first token nowhere."""
    slots = torch.randperm(10 * PAGE - 1, device=DEVICE)[:tokens]  # the reference takes -1 for the very last
    slots[0] = -1
    return slots


def assert_entries(pages: torch.Tensor, before: torch.Tensor, truth: torch.Tensor, slots: torch.Tensor) -> None:
    """The slots' entries [..., slot] are close to the truth's, and no other has changed."""
    written = torch.zeros(pages.shape[0], PAGE, dtype=torch.bool, device=DEVICE)
    written[slots[1:] // PAGE, slots[1:] % PAGE] = True
    rows = pages.transpose(1, 2) if pages.dim() == 5 else pages
    true_rows, old_rows = (other.transpose(1, 2) if other.dim() == 5 else other for other in (truth, before))
    assert distance(rows[written], true_rows[written]) < ERROR
    assert same_bits(rows[~written], old_rows[~written])


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rot"),
    sized([(32, 4, 128, 128), (16, 2, 256, 64), (4, 2, 48, 16)], [(8, 2, 128, 128), (4, 1, 256, 64), (4, 2, 48, 16)]),
)
@pytest.mark.parametrize("tokens", sized([2, 70], [2, 9]))
def test_gqa_inputs_equal_the_reference(
    kernels: Kernels, normed: bool, interleaved: bool, heads: int, kv_heads: int, head_dim: int, rot: int, tokens: int
) -> None:
    shape = AttentionShape("gqa", heads, kv_heads, head_dim, 0, 1.0)
    qkv, gains = normal(tokens, (heads + 2 * kv_heads) * head_dim), (normal(head_dim), normal(head_dim))
    norms = HeadNorms(*gains, 1e-6) if normed else None
    wide_norms = HeadNorms(gains[0].float(), gains[1].float(), 1e-6) if normed else None
    table, positions, slots = rotary(rot, interleaved), torch.randint(0, 500, (tokens,), device=DEVICE), slots_of(tokens)
    pages = normal(10, *kv_page_shape(shape, PAGE))
    before, truth = pages.clone(), pages.clone().float()
    q = kernels.gqa_inputs(qkv, norms, table, positions, pages, slots, shape)
    true_q = reference.gqa_inputs(qkv.float(), wide_norms, table, positions, truth, slots, shape)
    assert distance(q, true_q) < ERROR
    assert_entries(pages, before, truth, slots)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("heads", "nope", "rank", "rope"),
    sized([(16, 128, 512, 64), (128, 128, 512, 64), (4, 24, 32, 16), (3, 40, 72, 8)], [(4, 24, 32, 16), (3, 40, 144, 8)]),
)
@pytest.mark.parametrize("tokens", sized([2, 70, 130], [2, 19, 257]))
def test_mla_inputs_equal_the_reference(
    kernels: Kernels, dtype: torch.dtype, interleaved: bool, heads: int, nope: int, rank: int, rope: int, tokens: int
) -> None:
    shape = AttentionShape("mla", heads, 1, rank, rope, 1.0)
    fused = normal(tokens, heads * (nope + rope) + rank + rope, dtype=dtype)
    q, kv = fused[:, : heads * (nope + rope)].unflatten(1, (heads, -1)), fused[:, heads * (nope + rope) :]
    kv_b = normal(heads, nope + 16, rank, std=nope**-0.5, dtype=dtype)
    gain, w_uk = normal(rank, dtype=dtype), kv_b[:, :nope]
    table, positions, slots = rotary(rope, interleaved), torch.randint(0, 500, (tokens,), device=DEVICE), slots_of(tokens)
    pages = normal(10, *kv_page_shape(shape, PAGE), dtype=dtype)
    before, truth = pages.clone(), pages.clone().float()
    latent, turned = kernels.mla_inputs(q, kv, gain, 1e-6, w_uk, table, positions, pages, slots)
    wide = (q.float(), kv.float(), gain.float(), 1e-6, w_uk.float())
    true_latent, true_turned = reference.mla_inputs(*wide, table, positions, truth, slots)
    assert distance(latent, true_latent) < ERROR
    assert distance(turned, true_turned) < ERROR
    assert_entries(pages, before, truth, slots)


@pytest.mark.parametrize(
    ("heads", "rank", "width"), sized([(16, 512, 128), (128, 512, 128), (4, 32, 24), (3, 72, 40)], [(4, 32, 24), (3, 144, 40)])
)
@pytest.mark.parametrize("tokens", [1, 70, 130])
def test_heads_linear_equals_the_reference(kernels: Kernels, heads: int, rank: int, width: int, tokens: int) -> None:
    x, weight = normal(tokens, heads, rank), normal(heads, width, rank, std=rank**-0.5).transpose(1, 2)
    assert distance(kernels.heads_linear(x, weight), reference.heads_linear(x.float(), weight.float())) < ERROR
