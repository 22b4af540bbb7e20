"""Each reference kernel against an independent statement of what it computes."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from minserve.kernels import reference
from minserve.kernels.interface import AttentionMetadata, AttentionShape, ExpertWeights, LinearWeight

PAGE = 4


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unchanged(function, *arguments):
    """function(*arguments), after which no argument tensor differs."""
    before = [argument.clone() if isinstance(argument, torch.Tensor) else None for argument in arguments]
    result = function(*arguments)
    for argument, old in zip(arguments, before, strict=True):
        if old is not None:
            torch.testing.assert_close(argument, old, rtol=0, atol=0, equal_nan=True)
    return result


# ---- norms, rotation, activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm(dtype):
    x, weight = random(3, 5, 16, dtype=dtype) * 30, random(16, seed=1, dtype=dtype)
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    for view in (x, x.transpose(0, 1)):
        got = unchanged(reference.rms_norm, view, weight, 1e-5)
        assert got.dtype == dtype
        expected = wanted if view is x else wanted.transpose(0, 1)
        torch.testing.assert_close(got, expected.to(dtype), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_rms_norm_of_values_whose_squares_overflow_half_precision():
    x = torch.full((1, 8), 3000.0, dtype=torch.float16)
    torch.testing.assert_close(reference.rms_norm(x, torch.ones(8, dtype=torch.float16), 0.0), torch.ones_like(x))


def test_add_rms_norm():
    x, residual, weight = random(4, 16), random(4, 16, seed=1), random(16, seed=2)
    normed, total = unchanged(reference.add_rms_norm, x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, reference.rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotary_is_a_complex_product(interleaved, rotary_dim):
    angles = random(50, rotary_dim // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([0, 49, 7])
    both = random(3, 5, 16, seed=1)
    q, k = both[:, :4], both[:, 4:]
    got = unchanged(reference.rotary, q, k, table, positions, interleaved)
    turn = torch.polar(torch.ones(3, 1, rotary_dim // 2), angles[positions].unsqueeze(1))
    for x, result in zip((q, k), got, strict=True):
        head = x[..., :rotary_dim]
        pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        wanted = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
        torch.testing.assert_close(result[..., :rotary_dim], wanted)
        assert torch.equal(result[..., rotary_dim:], x[..., rotary_dim:])
        assert result.is_contiguous()


def test_silu_and_mul():
    x = random(3, 2, 10)
    torch.testing.assert_close(unchanged(reference.silu_and_mul, x), F.silu(x[..., :5]) * x[..., 5:])


# ---- linear


@pytest.mark.parametrize("shape", [(256, 128), (130, 200), (64, 100)])
def test_fp8_weights_are_widened_block_by_block(shape):
    rows, columns = shape
    low = random(rows, columns).to(torch.float8_e4m3fn)
    scale = random(math.ceil(rows / 128), math.ceil(columns / 128), seed=1).abs() + 0.1
    wide = torch.stack(
        [torch.stack([low[i, j].float() * scale[i // 128, j // 128] for j in range(columns)]) for i in (0, rows // 2, rows - 1)]
    )
    assert torch.equal(reference.widen(low, scale, torch.float32)[[0, rows // 2, rows - 1]], wide)
    x, bias = random(3, columns, seed=2), random(rows, seed=3)
    got = reference.linear(x, LinearWeight(low, scale), bias)
    torch.testing.assert_close(got, x @ reference.widen(low, scale, torch.float32).t() + bias)


def test_plain_linear():
    x, weight = random(2, 3, 8), random(5, 8, seed=1)
    torch.testing.assert_close(unchanged(lambda a, b: reference.linear(a, LinearWeight(b), None), x, weight), x @ weight.t())


# ---- experts


def _experts(count=6, hidden=16, width=8):
    return ExpertWeights(random(count, 2 * width, hidden) / 4, random(count, hidden, width, seed=1) / 3)


def _dense(x, slot_ids, weights, experts):
    """Every expert on every token, then the choice."""
    gate, up = torch.einsum("th,eih->tei", x, experts.w13).chunk(2, dim=-1)
    every = torch.einsum("tei,ehi->teh", F.silu(gate) * up, experts.w2)
    out = torch.zeros_like(x)
    for token, (slots, row_weights) in enumerate(zip(slot_ids.tolist(), weights.tolist(), strict=True)):
        for slot, weight in zip(slots, row_weights, strict=True):
            if slot >= 0:
                out[token] += weight * every[token, slot]
    return out


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_experts_flat_is_the_dense_sum(tokens):
    experts, x = _experts(), random(tokens, 16, seed=2)
    slot_ids = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(t))[:3] for t in range(tokens)]).int()
    slot_ids[torch.rand(slot_ids.shape, generator=torch.Generator().manual_seed(9)) < 0.2] = -1
    weights = random(tokens, 3, seed=3)
    got = unchanged(reference.experts_flat, x, slot_ids, weights, experts)
    torch.testing.assert_close(got, _dense(x, slot_ids, weights, experts), rtol=1e-4, atol=1e-5)
    for row in range(min(tokens, 5)):
        alone = reference.experts_flat(x[row : row + 1], slot_ids[row : row + 1], weights[row : row + 1], experts)
        torch.testing.assert_close(alone[0], got[row], rtol=1e-5, atol=1e-6)


def test_rows_without_experts_are_zero_whatever_they_hold():
    x = random(4, 16)
    x[2:] = torch.nan
    slot_ids = torch.tensor([[0, 1], [2, 0], [-1, -1], [-1, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    got = reference.experts_flat(x, slot_ids, weights, _experts())
    assert got[2:].eq(0).all()
    assert got[:2].isfinite().all()


def test_no_tokens_for_any_expert():
    empty = torch.zeros(0, 2, dtype=torch.int32)
    assert reference.experts_flat(torch.zeros(0, 16), empty, empty.float(), _experts()).shape == (0, 16)
    assert reference.experts_masked(torch.zeros(6, 0, 16), torch.zeros(6, dtype=torch.int32), _experts()).shape == (6, 0, 16)


def test_experts_masked_is_each_expert_on_its_rows():
    experts, x = _experts(), random(6, 5, 16, seed=2)
    counts = torch.tensor([5, 0, 1, 3, 0, 2], dtype=torch.int32)
    for slot, count in enumerate(counts.tolist()):
        x[slot, count:] = torch.nan
    got = unchanged(reference.experts_masked, x, counts, experts)
    for slot, count in enumerate(counts.tolist()):
        ids, ones = torch.full((count, 1), slot, dtype=torch.int32), torch.ones(count, 1)
        wanted = reference.experts_flat(x[slot, :count], ids, ones, experts)
        torch.testing.assert_close(got[slot, :count], wanted)


def test_fp8_experts():
    count, hidden, width = 3, 200, 128
    w13, w2 = (
        random(count, 2 * width, hidden).to(torch.float8_e4m3fn),
        random(count, hidden, width, seed=1).to(torch.float8_e4m3fn),
    )
    scales = random(count, 2, 2, seed=2).abs() / 20, random(count, 2, 1, seed=3).abs() / 20
    kept = ExpertWeights(w13, w2, *scales)
    wide = ExpertWeights(reference.widen(w13, scales[0], torch.float32), reference.widen(w2, scales[1], torch.float32))
    x, ids, weights = random(5, hidden, seed=4), torch.tensor([[0, 2]] * 5, dtype=torch.int32), random(5, 2, seed=5)
    torch.testing.assert_close(reference.experts_flat(x, ids, weights, kept), reference.experts_flat(x, ids, weights, wide))


def test_int4_experts():
    """Each expert that is hit is widened by itself; the format is read off the tensors."""
    count, hidden, width = 3, 64, 96
    packed = [
        torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(0))
        for shape in ((count, 2 * width, hidden // 8), (count, hidden, width // 8))
    ]
    scales = random(count, 2 * width, hidden // 32, seed=2) / 20, random(count, hidden, width // 32, seed=3) / 20
    kept = ExpertWeights(*packed, *scales)
    wide = ExpertWeights(*(reference.widen(p, s, torch.float32) for p, s in zip(packed, scales, strict=True)))
    assert (kept.format, wide.format) == ("int4_group", "plain")
    assert wide.w13.shape == (count, 2 * width, hidden) and wide.w2.shape == (count, hidden, width)
    # Value 11 of row 5: nibble 3 of the second int32, in the first group.
    level = (packed[0][1, 5, 1].item() >> 12 & 15) - 8
    assert wide.w13[1, 5, 11] == level * scales[0][1, 5, 0]
    x, ids, weights = random(5, hidden, seed=4), torch.tensor([[0, 2]] * 5, dtype=torch.int32), random(5, 2, seed=5)
    assert torch.equal(reference.experts_flat(x, ids, weights, kept), reference.experts_flat(x, ids, weights, wide))
    x, counts = random(3, 4, hidden, seed=6), torch.tensor([4, 0, 2], dtype=torch.int32)
    assert torch.equal(reference.experts_masked(x, counts, kept), reference.experts_masked(x, counts, wide))


# ---- cache and attention


def _rows(*rows):
    """Metadata of (cached tokens, new tokens) rows, pages in disorder; and each row's slots in order."""
    lengths, seq_lens = [new for _, new in rows], [old + new for old, new in rows]
    needed = [math.ceil(seq_len / PAGE) for seq_len in seq_lens]
    pages = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)) + 1).split(needed)
    table = torch.zeros(len(rows), max([*needed, 1]), dtype=torch.int32)
    slots = []
    for row, own in enumerate(pages):
        table[row, : len(own)] = own
        slots.append(torch.tensor([int(own[i // PAGE]) * PAGE + i % PAGE for i in range(seq_lens[row])], dtype=torch.int64))
    new = [own[old:] for own, (old, _) in zip(slots, rows, strict=True)]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    metadata = AttentionMetadata(
        starts, torch.tensor(seq_lens).int(), table, torch.cat(new), PAGE, tuple(lengths), tuple(seq_lens)
    )
    return metadata, slots


ROWS = [
    [(0, 1)],
    [(0, 9)],
    [(12, 1)],
    [(3, 1), (15, 1), (0, 1), (16, 1)],
    [(5, 6), (7, 1), (0, 3), (30, 1), (8, 0), (4, 4)],
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_gqa_attention(rows, heads):
    num_heads, num_kv_heads = heads
    shape = AttentionShape("gqa", num_heads, num_kv_heads, 8, 0, 0.3)
    metadata, slots = _rows(*rows)
    cache = torch.full((40, 2, PAGE, num_kv_heads, 8), torch.nan)
    keys, values = ([random(len(own), num_kv_heads, 8, seed=10 * seed + i) for i, own in enumerate(slots)] for seed in (1, 2))
    for own, k, v in zip(slots, keys, values, strict=True):
        reference.write_gqa(k, v, cache, own)
    q = random(len(metadata.slot_mapping), num_heads, 8, seed=3)
    got = unchanged(reference.gqa_attention, q, cache, metadata, shape, reference.plan_attention(metadata, shape))
    start = 0
    for (old, new), k, v in zip(rows, keys, values, strict=True):
        mask = torch.ones(new, old + new, dtype=torch.bool).tril(old)
        k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=1).transpose(0, 1) for x in (k, v))
        query = q[start : start + new].transpose(0, 1)
        wanted = F.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=0.3).transpose(0, 1)
        torch.testing.assert_close(got[start : start + new], wanted, rtol=1e-4, atol=1e-5)
        start += new


@pytest.mark.parametrize("rows", ROWS)
def test_mla_attention(rows):
    shape = AttentionShape("mla", 3, 1, 12, 4, 0.25)
    metadata, slots = _rows(*rows)
    cache = torch.full((40, PAGE, 16), torch.nan)
    entries = [random(len(own), 16, seed=i) for i, own in enumerate(slots)]
    for own, entry in zip(slots, entries, strict=True):
        reference.write_mla(entry[:, :12], entry[:, 12:], cache, own)
    q_latent, q_rope = random(len(metadata.slot_mapping), 3, 12, seed=50), random(len(metadata.slot_mapping), 3, 4, seed=51)
    plan = reference.plan_attention(metadata, shape)
    got = unchanged(reference.mla_attention, q_latent, q_rope, cache, metadata, shape, plan)
    start = 0
    for (old, new), entry in zip(rows, entries, strict=True):
        q = torch.cat((q_latent, q_rope), dim=-1)[start : start + new]
        scores = torch.einsum("lhd,sd->hls", q, entry) * 0.25
        scores[:, ~torch.ones(new, old + new, dtype=torch.bool).tril(old)] = -torch.inf
        wanted = torch.einsum("hls,sr->lhr", scores.softmax(-1), entry[:, :12])
        torch.testing.assert_close(got[start : start + new], wanted, rtol=1e-4, atol=1e-5)
        start += new


def test_writes_touch_their_slots_alone_and_take_views():
    metadata, slots = _rows((0, 6), (2, 1))
    fused = random(7, 2 * 2 * 8)
    k, v = (part.unflatten(-1, (2, 8)) for part in fused.split(16, dim=-1))
    cache = torch.zeros(8, 2, PAGE, 2, 8, dtype=torch.bfloat16)
    reference.write_gqa(k, v, cache, metadata.slot_mapping)
    flat = cache.transpose(1, 2).flatten(0, 1)
    assert torch.equal(flat[metadata.slot_mapping], torch.stack((k, v), dim=1).bfloat16())
    others = torch.ones(len(flat), dtype=torch.bool)
    others[metadata.slot_mapping] = False
    assert flat[others].eq(0).all()
    assert torch.equal(metadata.slot_mapping, torch.cat((slots[0], slots[1][2:])))


def test_a_decode_row_does_not_feel_its_mates():
    shape = AttentionShape("mla", 2, 1, 12, 4, 0.25)
    cache = random(40, PAGE, 16)
    q_latent, q_rope = random(4, 2, 12, seed=1), random(4, 2, 4, seed=2)
    metadata, _ = _rows((3, 1), (15, 1), (13, 1), (40, 1))
    together = reference.mla_attention(q_latent, q_rope, cache, metadata, shape, reference.plan_attention(metadata, shape))
    for row in range(4):
        alone = AttentionMetadata(
            torch.tensor([0, 1]).int(), metadata.seq_lens[row : row + 1], metadata.page_table[row : row + 1],
            metadata.slot_mapping[row : row + 1], PAGE, (1,), metadata.seq_lens_host[row : row + 1],
        )  # fmt: skip
        plan = reference.plan_attention(alone, shape)
        got = reference.mla_attention(q_latent[row : row + 1], q_rope[row : row + 1], cache, alone, shape, plan)
        torch.testing.assert_close(got[0], together[row], rtol=1e-6, atol=1e-6)


def test_a_padded_row_reads_the_dummy_page_alone():
    """One token, seq_len 1, page 0: finite when slot 0 is, whatever the rest holds."""
    shape = AttentionShape("gqa", 2, 1, 8, 0, 1.0)
    cache = torch.full((3, 2, PAGE, 1, 8), torch.nan)
    cache[0, :, 0] = 1.0
    metadata = AttentionMetadata(
        torch.tensor([0, 1]).int(), torch.tensor([1]).int(), torch.zeros(1, 5).int(), torch.tensor([0]), PAGE, (1,), (1,)
    )
    q = random(1, 2, 8)
    assert reference.gqa_attention(q, cache, metadata, shape, reference.plan_attention(metadata, shape)).eq(1.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_type(dtype):
    shape = AttentionShape("gqa", 4, 2, 8, 0, 0.3)
    metadata, _ = _rows((5, 3), (9, 1))
    cache = random(20, 2, PAGE, 2, 8, dtype=dtype)
    q = random(4, 4, 8, seed=1, dtype=dtype)
    plan = reference.plan_attention(metadata, shape)
    got = reference.gqa_attention(q, cache, metadata, shape, plan)
    assert got.dtype == dtype
    wide = reference.gqa_attention(q.float(), cache.float(), metadata, shape, plan)
    torch.testing.assert_close(got.float(), wide, rtol=1e-2, atol=1e-2)


def test_the_cpu_stack_keeps_no_fp8():
    stack = reference.cpu()
    assert (stack.name, stack.keeps_fp8, stack.keeps_int4) == ("cpu", False, True)
    optional = ("name", "keeps_fp8", "keeps_int4", "quantize_rows", "fp8_rows", "gqa_decode", "expert_rows", "linear_parts")
    assert all(callable(getattr(stack, name)) for name in stack.__slots__ if name not in optional)
