"""Every architecture against transformers in float32: logits and greedy tokens, alone, mixed, chunked, over small pages."""

from __future__ import annotations

import pytest
import torch
from logit_comparison import assert_same_logits, prompt, reference_logits
from paged_steps import PagedSteps, load
from tiny_checkpoints import VARIANTS

LENGTHS = (1, 7, 64, 65, 130)
DECODE_STEPS = 3

every_variant = pytest.mark.parametrize("variant", sorted(VARIANTS))


@pytest.mark.parametrize("page_size", [64, 5])
@every_variant
def test_each_prompt_alone_then_decode(tiny, variant, page_size):
    checkpoint = tiny(variant)
    steps = PagedSteps(load(checkpoint.directory), page_size=page_size)
    for length in LENGTHS:
        tokens = prompt(length + DECODE_STEPS, seed=length)
        rows = steps.step([("r", tokens[:length])])
        rows += [steps.step([("r", [token])])[0] for token in tokens[length:]]
        assert_same_logits(torch.cat(rows), reference_logits(checkpoint, tokens))
        steps.free("r")


@pytest.mark.parametrize("page_size", [64, 5])
@every_variant
def test_all_prompts_in_one_batch_then_decode_together(tiny, variant, page_size):
    checkpoint = tiny(variant)
    steps = PagedSteps(load(checkpoint.directory), page_size=page_size)
    tokens = {str(length): prompt(length + DECODE_STEPS, seed=length) for length in LENGTHS}
    rows = {name: [logits] for name, logits in _step(steps, {name: t[:-DECODE_STEPS] for name, t in tokens.items()}).items()}
    for i in range(DECODE_STEPS, 0, -1):
        for name, logits in _step(steps, {name: [t[-i]] for name, t in tokens.items()}).items():
            rows[name].append(logits)
    for name, t in tokens.items():
        assert_same_logits(torch.cat(rows[name]), reference_logits(checkpoint, t))


@pytest.mark.parametrize("chunk", [1, 3, 64])
@every_variant
def test_chunks_beside_a_decoding_stranger(tiny, variant, chunk):
    checkpoint = tiny(variant)
    steps = PagedSteps(load(checkpoint.directory), page_size=16)
    tokens, stranger = prompt(66, seed=1), prompt(100, seed=2)
    stranger_rows = steps.step([("stranger", stranger[:9])])
    done = 9
    rows = []
    for start in range(0, len(tokens), chunk):
        logits = _step(steps, {"stranger": stranger[done : done + 1], "r": tokens[start : start + chunk]})
        done += 1
        rows.append(logits["r"])
        stranger_rows.append(logits["stranger"])
    assert_same_logits(torch.cat(rows), reference_logits(checkpoint, tokens))
    assert_same_logits(torch.cat(stranger_rows), reference_logits(checkpoint, stranger[:done]))


@every_variant
def test_greedy_continuation(tiny, variant):
    checkpoint = tiny(variant)
    steps = PagedSteps(load(checkpoint.directory))
    tokens = prompt(13, seed=3)
    logits = steps.step([("r", tokens)])[0][-1:]
    for _ in range(8):
        wanted = reference_logits(checkpoint, tokens)[-1:]
        assert_same_logits(logits, wanted)
        tokens = [*tokens, int(wanted.argmax())]
        logits = steps.step([("r", tokens[-1:])])[0]


@every_variant
def test_padded_rows_change_nothing(tiny, variant):
    checkpoint = tiny(variant)
    steps = PagedSteps(load(checkpoint.directory))
    tokens = prompt(12, seed=4)
    rows = steps.step([("r", tokens[:9])], padding=3)
    rows += [steps.step([("r", [token])], padding=7)[0] for token in tokens[9:]]
    assert_same_logits(torch.cat(rows), reference_logits(checkpoint, tokens))


@every_variant
def test_bfloat16_stays_near(tiny, variant):
    """Half precision end to end: types meet everywhere, and the error is rounding's size."""
    checkpoint = tiny(variant)
    steps = PagedSteps(load(checkpoint.directory, dtype=torch.bfloat16))
    assert {cache.dtype for cache in steps.cache} == {torch.bfloat16}
    tokens = prompt(30, seed=5)
    logits = torch.cat([*steps.step([("r", tokens[:29])]), *steps.step([("r", tokens[29:])])])
    wanted = reference_logits(checkpoint, tokens)
    assert logits.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(logits, wanted, dim=-1).median() > 0.99


def _step(steps, rows):
    return dict(zip(rows, steps.step(list(rows.items())), strict=True))
