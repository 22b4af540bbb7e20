"""The one MoE body: scale and shared expert exactly once on every path, nothing mutated, empty and padded batches."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from logit_comparison import assert_same_logits, prompt, reference_logits
from paged_steps import PagedSteps, load
from torch.nn import functional as F
from unsummed_experts import expert_rows

from minserve.capture_flags import EAGER
from minserve.kernels import reference
from minserve.models.forward_context import ForwardContext
from minserve.models.layers.dispatcher import Dispatched, LocalDispatcher, MaskedTokens
from minserve.models.layers.placement import ExpertPlacement

CAPTURING = dataclasses.replace(EAGER, capturing=True, allow_overlap=True, allow_inplace=False, phase="record", kind="decode")


class MaskedDispatcher:
    """Sorts tokens into their slots as an expert-parallel dispatcher does, and weights them on the way back."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def dispatch(self, hidden, slot_ids, weights, num_tokens, rows_per_rank):
        del num_tokens, rows_per_rank
        rows = [(slot_ids == slot).nonzero() for slot in range(self.num_slots)]
        most = max((len(r) for r in rows), default=0)
        stacked = torch.full((self.num_slots, most, hidden.shape[1]), torch.nan)
        for slot, pairs in enumerate(rows):
            stacked[slot, : len(pairs)] = hidden[pairs[:, 0]]
        counts = torch.tensor([len(r) for r in rows], dtype=torch.int32)
        return Dispatched(MaskedTokens(stacked, counts), (rows, weights, hidden.shape))

    def combine(self, output, dispatched):
        rows, weights, shape = dispatched.handle
        result = torch.zeros(shape)
        for slot, pairs in enumerate(rows):
            for i, (token, choice) in enumerate(pairs.tolist()):
                result[token] += weights[token, choice] * output[slot, i]
        return result


class CountingLanes:
    """Lanes without streams: says what happened in which order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def fork(self):
        self.log.append("fork")

    @contextlib.contextmanager
    def alt(self, fork):
        del fork
        self.log.append("alt")
        yield

    def join(self):
        self.log.append("join")


def _context(num_tokens: int | None = None) -> ForwardContext:
    """For the MoE body alone, which reads nothing of attention."""
    count = None if num_tokens is None else torch.tensor([num_tokens], dtype=torch.int32)
    return ForwardContext(attention=None, attention_plan=None, kv_cache=[], num_tokens=count)  # type: ignore[arg-type]


def _hidden(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))


def _run(layer, hidden, context=None, lanes=None):
    with torch.inference_mode():
        return layer.mlp(hidden, context or _context(), lanes)


def _scaled(scale: float, normalize: bool):
    def change(config):
        router = dataclasses.replace(config.moe.router, scale=scale, normalize=normalize)
        return dataclasses.replace(config, moe=dataclasses.replace(config.moe, router=router))

    return change


PATHS = {
    "serial": (LocalDispatcher, None),
    "overlapped": (LocalDispatcher, CountingLanes()),
    "masked": (lambda: MaskedDispatcher(16), None),
    "masked, overlapped": (lambda: MaskedDispatcher(16), CountingLanes()),
}


@pytest.mark.parametrize("path", sorted(PATHS))
@pytest.mark.parametrize("normalize", [True, False])
def test_the_scale_is_applied_once_on_every_path(tiny, path, normalize):
    directory = tiny("deepseek_v3_small").directory
    make_dispatcher, lanes = PATHS[path]
    hidden = _hidden(11)
    shared = load(directory).layers[1].mlp.shared(hidden)
    unscaled = _run(load(directory, config=_scaled(1.0, normalize)).layers[1], hidden) - shared
    layer = load(directory, config=_scaled(2.5, normalize), dispatcher=make_dispatcher()).layers[1]
    torch.testing.assert_close(_run(layer, hidden, lanes=lanes), 2.5 * unscaled + shared, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["deepseek_v2", "deepseek_v3_small", "moonlight", "qwen2_moe"])
@pytest.mark.parametrize("lanes", [None, CountingLanes()])
def test_without_routed_experts_the_shared_expert_is_all(tiny, variant, lanes):
    checkpoint = tiny(variant)
    layer = load(checkpoint.directory).layers[1]
    with torch.inference_mode():
        layer.mlp.experts.w2.zero_()
        hidden = _hidden(6)
        theirs = checkpoint.reference.model.layers[1].mlp
        if variant == "qwen2_moe":
            wanted = theirs.shared_expert(hidden) * theirs.shared_expert_gate(hidden).sigmoid()
        else:
            wanted = theirs.shared_experts(hidden)
    torch.testing.assert_close(_run(layer, hidden, lanes=lanes), wanted, rtol=1e-4, atol=1e-5)


def test_no_drift_of_the_shared_expert_over_a_long_output(tiny):
    """A wrong factor on one path hides in short runs: 160 steps, overlapped lanes against serial ones, stay equal."""
    checkpoint = tiny("deepseek_v3_small")
    tokens = prompt(8, seed=6)
    runs = []
    for policy in ("serial", "overlap"):
        lanes = CountingLanes()
        steps = PagedSteps(load(checkpoint.directory, shared_expert=policy, lanes=lanes))
        sequence, logits = list(tokens), steps.step([("r", tokens)], flags=CAPTURING)[0][-1]
        for _ in range(160):
            sequence.append(int(logits.argmax()))
            logits = steps.step([("r", sequence[-1:])], flags=CAPTURING)[0][-1]
        runs.append(sequence)
        assert lanes.log == ([] if policy == "serial" else ["fork", "alt", "join"] * 2 * 161)
    assert runs[0] == runs[1]
    assert_same_logits(logits[None], reference_logits(checkpoint, runs[0])[-1:])


@pytest.mark.parametrize("variant", ["deepseek_v3_small", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("path", sorted(PATHS))
def test_an_empty_batch_joins_the_dispatcher_and_skips_the_shared_expert(tiny, variant, path):
    calls = []

    class Counted(LocalDispatcher):
        def dispatch(self, *arguments):
            calls.append("dispatch")
            return super().dispatch(*arguments)

        def combine(self, *arguments):
            calls.append("combine")
            return super().combine(*arguments)

    layer = load(tiny(variant).directory, dispatcher=Counted()).layers[1]
    if layer.mlp.shared is not None:
        layer.mlp.shared.register_forward_hook(lambda *_: calls.append("shared"))
    assert _run(layer, _hidden(0), lanes=PATHS[path][1]).shape == (0, 64)
    assert calls == ["dispatch", "combine"]


@pytest.mark.parametrize("variant", ["deepseek_v3_small", "qwen2_moe"])
def test_the_shared_expert_runs_once_on_every_path(tiny, variant):
    for make_dispatcher, lanes in (PATHS["serial"], PATHS["overlapped"]):
        layer = load(tiny(variant).directory, dispatcher=make_dispatcher()).layers[1]
        calls = []
        layer.mlp.shared.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        _run(layer, _hidden(3), lanes=lanes)
        assert len(calls) == 1


def test_the_input_is_left_as_it_was(tiny):
    layer = load(tiny("deepseek_v3_small").directory).layers[1]
    hidden = _hidden(5)
    before, pointer = hidden.clone(), hidden.data_ptr()
    _run(layer, hidden)
    assert torch.equal(hidden, before)
    assert hidden.data_ptr() == pointer
    assert hidden.shape == before.shape


def test_nan_in_padded_rows_reaches_no_real_row(tiny):
    layer = load(tiny("deepseek_v3_small").directory).layers[1]
    hidden = _hidden(8)
    wanted = _run(layer, hidden[:5])
    hidden[5:] = torch.nan
    torch.testing.assert_close(_run(layer, hidden, _context(5))[:5], wanted)


def test_all_tokens_to_one_expert(tiny):
    layer = load(tiny("qwen3_moe").directory).layers[1]
    with torch.inference_mode():
        layer.mlp.router.weight.zero_()
    hidden = _hidden(50)
    output = _run(layer, hidden)
    experts = [layer.mlp.experts.w13[:3], layer.mlp.experts.w2[:3]]
    gate, up = torch.einsum("th,eih->eti", hidden, experts[0]).chunk(2, dim=-1)
    wanted = torch.einsum("eti,ehi->th", F.silu(gate) * up, experts[1]) / 3
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)


def test_experts_may_sit_in_other_slots(tiny):
    checkpoint = tiny("deepseek_v3_small")
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist()
    model = load(checkpoint.directory, placement=ExpertPlacement(tuple(order), 16))
    plain = load(checkpoint.directory)
    for slot, expert in enumerate(order):
        assert torch.equal(model.layers[1].mlp.experts.w13[slot], plain.layers[1].mlp.experts.w13[expert])
    tokens = prompt(20, seed=7)
    assert_same_logits(PagedSteps(model).step([("r", tokens)], padding=2)[0], reference_logits(checkpoint, tokens))


def test_a_masked_dispatcher_serves_the_whole_model(tiny):
    checkpoint = tiny("deepseek_v2")
    model = load(checkpoint.directory, dispatcher=MaskedDispatcher(16))
    tokens = prompt(20, seed=8)
    assert_same_logits(PagedSteps(model).step([("r", tokens)], padding=2)[0], reference_logits(checkpoint, tokens))


def test_kernels_get_what_their_contract_says(tiny):
    """int32 ids and fp32 weights, -1 for padding, contiguous rows."""
    seen = []

    def experts_flat(x, slot_ids, weights, experts):
        assert x.is_contiguous()
        assert slot_ids.is_contiguous()
        assert (slot_ids.dtype, weights.dtype) == (torch.int32, torch.float32)
        seen.append(slot_ids)
        return reference.experts_flat(x, slot_ids, weights, experts)

    kernels = dataclasses.replace(reference.cpu(), experts_flat=experts_flat)
    layer = load(tiny("deepseek_v3_small").directory, kernels).layers[1]
    _run(layer, _hidden(6), _context(4))
    assert seen[0][4:].eq(-1).all()
    assert seen[0][:4].ge(0).all()


@pytest.mark.parametrize(
    ("variant", "shared_expert"),
    [
        ("qwen3_moe_tied", "serial"),
        ("deepseek_v3_small", "serial"),
        ("deepseek_v3_small", "overlap"),
        ("deepseek_v3_small", "fused"),
        ("qwen2_moe", "serial"),
    ],
)
def test_experts_may_leave_their_sum_to_the_norm_that_reads_it(tiny, variant, shared_expert):
    """The next layer's and the model's last, which add what a shared expert gives."""
    asked = []

    def counted(x, *others):
        asked.append(x.shape[0])
        return expert_rows(x, *others)

    checkpoint, tokens, lanes = tiny(variant), prompt(20, seed=9), CountingLanes()
    kernels = dataclasses.replace(reference.cpu(), expert_rows=counted)
    model = load(checkpoint.directory, kernels, shared_expert=shared_expert, lanes=lanes)
    logits = PagedSteps(model).step([("r", tokens)], padding=2, flags=CAPTURING)[0]
    assert_same_logits(logits, reference_logits(checkpoint, tokens))
    sparse = sum(model.config.moe.sparse_layers)
    assert asked == [22] * sparse
    assert lanes.log == (["fork", "alt", "join"] * sparse if shared_expert == "overlap" else [])


@pytest.mark.parametrize("lanes", [None, CountingLanes()])
@pytest.mark.parametrize("variant", ["deepseek_v3_small", "qwen2_moe"])
def test_what_is_left_to_the_norm_is_what_would_be_added(tiny, variant, lanes):
    """The routed experts' rows as they are without a shared expert, its output beside them: to the bit, in 16 bits."""
    kernels = dataclasses.replace(reference.cpu(), expert_rows=expert_rows)
    layer = load(tiny(variant).directory, kernels, dtype=torch.bfloat16).layers[1]
    hidden = _hidden(9).bfloat16()
    left = _run(layer, hidden, _context(7), lanes)
    with torch.inference_mode():
        shared, layer.mlp.shared = layer.mlp.shared(hidden), None
    routed = _run(layer, hidden, _context(7))
    assert routed.added is None
    assert torch.equal(left.added, shared)
    assert torch.equal(reference.sum_rows(left), reference.sum_rows(routed) + shared)


class OtherRanks:
    """Adds up what ranks have summed: of a rank's sum it can make nothing but a tensor."""

    def dispatch(self, *arguments):
        return LocalDispatcher().dispatch(*arguments)

    def combine(self, output, dispatched):
        del dispatched
        return output.float().to(output.dtype)


@pytest.mark.parametrize(
    ("make_dispatcher", "rows"),
    [(OtherRanks, expert_rows), (LocalDispatcher, lambda *arguments: reference.sum_rows(expert_rows(*arguments)))],
    ids=["other ranks", "many tokens"],
)
def test_where_experts_sum_themselves_the_shared_expert_is_added_to_them(tiny, make_dispatcher, rows):
    directory = tiny("deepseek_v3_small").directory
    kernels = dataclasses.replace(reference.cpu(), expert_rows=rows)
    layer = load(directory, kernels, dispatcher=make_dispatcher()).layers[1]
    torch.testing.assert_close(_run(layer, _hidden(9)), _run(load(directory).layers[1], _hidden(9)))
