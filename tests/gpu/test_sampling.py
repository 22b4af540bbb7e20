"""From logits to recorded tokens: what the argmax variant of sampling is, to the last bit and in every corner."""

from __future__ import annotations

import math

import pytest
import torch
from gpu.kernel_samples import BF16, DEVICE, normal, same_bits, sized
from torch import Tensor

from minserve.kernels import reference, triton_sampling
from minserve.kernels.interface import Kernels
from minserve.models.sampler import SamplerState, Variant, sample
from minserve.request import SamplingParams

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("poisoned")]
VOCABS = sized([1, 50, 2049, 151_936], [1, 50, 2048, 2049, 8193])
STATE = ("last_tokens", "output_index", "broken_rows", "token_counts")


def state_of(slots: int, vocab_size: int, kernels: Kernels | None) -> SamplerState:
    """With numbers that are not all zero."""
    state = SamplerState(slots, vocab_size, DEVICE, kernels)
    state.output_index.copy_(torch.arange(slots + 1) * 3)
    state.broken_rows.copy_(torch.arange(slots + 1) % 2)
    state.token_counts.copy_(torch.arange(vocab_size) % 5)
    return state


def check(kernels: Kernels, logits: Tensor, slots: Tensor, num_slots: int, variant: Variant = "argmax") -> Tensor:
    """The stack's tokens and state equal plain torch's."""
    before = logits.clone()
    outcomes: list[dict[str, Tensor]] = []
    for table in (kernels, None):
        state = state_of(num_slots, logits.shape[1], table)
        for slot in range(num_slots if variant == "general" else 0):
            state.set_slot(slot, SamplingParams(max_tokens=9, seed=slot, temperature=float(slot % 2)), [], [1 % logits.shape[1]])
        tokens = [sample(logits, slots, state, variant) for _ in range(2)]
        outcomes.append({"tokens": torch.stack(tokens), **{name: getattr(state, name) for name in STATE}})
    for name, values in outcomes[0].items():
        assert same_bits(values, outcomes[1][name]), name
    assert same_bits(logits, before)
    return outcomes[0]["tokens"][0]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("rows", sized([1, 16, 17, 130], [1, 3, 17]))
def test_the_likeliest_token_of_each_row(kernels: Kernels, rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits = normal(rows, vocab_size, std=5.0, dtype=dtype)  # of which many are equal in 16 bits
    slots = torch.randperm(rows + 3, device=DEVICE)[:rows]
    tokens = check(kernels, logits, slots, rows + 3)
    assert tokens.tolist() == logits.float().cpu().numpy().argmax(axis=1).tolist()  # the first of equal ones


@pytest.mark.parametrize("variant", ["argmax", "general"])
def test_ties_go_to_the_lowest_id(kernels: Kernels, variant: Variant) -> None:
    """Within a part and between parts; zero has two signs, and what is hardly more than it is more."""
    vocab_size = 9000
    logits = torch.full((7, vocab_size), -3.0, device=DEVICE, dtype=BF16)
    logits[0, [17, 18, 2047, 2048, 8999]] = 1.5
    logits[1, [2047, 2048, 6000]] = -0.5
    logits[2, [4095, 4096]] = 88.0
    logits[3] = -7.0
    logits[4, [5, 4500]], logits[4, [3, 700, 8000]] = 0.0, -0.0
    logits[5, [6, 7000]], logits[5, 8000] = 0.0, 9.2e-41
    logits[6, 8999] = torch.finfo(BF16).max
    if variant == "general":
        logits = logits.repeat_interleave(2, dim=0)  # rows of even slots are greedy
    tokens = check(kernels, logits, torch.arange(len(logits), device=DEVICE), len(logits), variant)
    greedy = tokens if variant == "argmax" else tokens[::2]
    assert greedy.tolist() == [17, 2047, 4095, 0, 3, 8000, 8999]


@pytest.mark.parametrize("variant", ["argmax", "general"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("vocab_size", [7, 2048, 5000])
def test_rows_without_a_finite_maximum_are_broken(
    kernels: Kernels, vocab_size: int, dtype: torch.dtype, variant: Variant
) -> None:
    """Minus infinity beside a number is none of them."""
    logits = normal(8, vocab_size, dtype=dtype)
    logits[0, vocab_size - 1] = math.nan
    logits[1, 3], logits[1, 4] = math.inf, 5.0
    logits[2, 0], logits[2, vocab_size - 1] = math.inf, math.nan
    logits[3] = -math.inf
    logits[4] = math.nan
    logits[5] = -math.inf
    logits[5, vocab_size - 2] = -1e30
    logits[6, 2] = torch.tensor(math.nan).copysign(torch.tensor(-1.0))
    tokens = check(kernels, logits, torch.arange(8, device=DEVICE), 8, variant)
    assert tokens[:7].tolist() == [0, 0, 0, 0, 0, vocab_size - 2, 0]
    state = SamplerState(8, vocab_size, DEVICE, kernels)
    sample(logits, torch.arange(8, device=DEVICE), state, variant)
    assert state.broken_rows.tolist() == [1, 1, 1, 1, 1, 0, 1, 0, 0]


@pytest.mark.parametrize("variant", ["argmax", "general"])
def test_rows_of_padding_share_a_slot(kernels: Kernels, variant: Variant) -> None:
    """Each is counted there, and no other slot knows of them."""
    logits = normal(20, 300)
    logits[5:] = math.nan
    state = SamplerState(6, 300, DEVICE, kernels)
    slots = torch.tensor([4, 0, 2, 1, 5] + [6] * 15, device=DEVICE)
    for _ in range(3):
        sample(logits, slots, state, variant)
    assert state.output_index.tolist() == [3, 3, 3, 0, 3, 3, 45]
    assert state.broken_rows.tolist() == [0] * 6 + [45]
    assert state.nan_rows.item() == 0
    assert state.last_tokens[[3, 6]].tolist() == [0, 0]
    assert state.token_counts.sum(1).tolist() == [3, 3, 3, 0, 3, 3, 45]
    assert state.token_counts[6, 0] == 45
    assert state.last_tokens[slots[:5]].tolist() == logits[:5].float().argmax(-1).tolist()


def test_parts_of_rows_that_are_views(kernels: Kernels) -> None:
    wide = normal(40, 3000)
    for view in (wide[:4, :2500], wide[1:6:2], wide.t()[:4]):
        values, ids = kernels.part_maxima(view)
        best, part = values.max(dim=1, keepdim=True)
        truth = reference.part_maxima(view)
        assert same_bits(best, truth[0])
        assert same_bits(ids.gather(1, part), truth[1])


def test_no_rows_and_no_launch(kernels: Kernels) -> None:
    state = SamplerState(2, 9, DEVICE, kernels)
    for variant in ("argmax", "general"):
        tokens = sample(normal(0, 9), torch.empty(0, dtype=torch.int64, device=DEVICE), state, variant)
        assert tokens.shape == (0,)
        assert tokens.dtype == torch.int64


@pytest.mark.parametrize("rows", [1, 17])
def test_any_cut_gives_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = normal(rows, 3000, std=3.0)
    truth = reference.part_maxima(logits)
    for block in (16, 512, 4096):
        monkeypatch.setattr(triton_sampling, "_block", lambda _, block=block: block)
        values, ids = triton_sampling.part_maxima(logits)
        assert values.shape == (rows, -(-3000 // block))
        best, part = values.max(dim=1, keepdim=True)
        assert same_bits(best, truth[0])
        assert same_bits(ids.gather(1, part), truth[1])
