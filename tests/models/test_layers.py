"""What holds for every layer: empty batches, callers' tensors left alone, no value read on the host."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from logit_comparison import assert_same_logits, prompt, reference_logits
from paged_steps import PagedSteps, load
from tiny_checkpoints import VARIANTS, write_checkpoint

from minserve.capture_flags import EAGER
from minserve.kernels import reference
from minserve.kernels.interface import AttentionMetadata, Kernels, kv_page_shape
from minserve.models.forward_context import ForwardContext
from minserve.models.quantization_claim import formats_from_config
from minserve.models.registry import build_model, load_model_config
from minserve.models.weights import dummy_weights

every_variant = pytest.mark.parametrize("variant", sorted(VARIANTS))


@every_variant
def test_zero_tokens_pass_through_every_layer(tiny, variant):
    steps = PagedSteps(load(tiny(variant).directory))
    before = [cache.clone() for cache in steps.cache]
    hidden = torch.zeros(0, 64)
    context = _context(steps)
    with torch.inference_mode():
        for module in steps.model.layers:
            output, residual = module(hidden, hidden, torch.zeros(0, dtype=torch.int64), context, None)
            assert output.shape == residual.shape == (0, 64)
        assert steps.model.compute_logits(hidden).shape == (0, 320)
    for cache, old in zip(steps.cache, before, strict=True):
        torch.testing.assert_close(cache, old, equal_nan=True)


@every_variant
def test_a_row_without_tokens_beside_others(tiny, variant):
    checkpoint = tiny(variant)
    steps = PagedSteps(load(checkpoint.directory))
    tokens = prompt(10, seed=1)
    empty, full = steps.step([("idle", []), ("r", tokens)])
    assert empty.shape == (0, 320)
    assert_same_logits(full, reference_logits(checkpoint, tokens))


@every_variant
def test_no_layer_writes_to_its_callers_tensors(tiny, variant):
    """Each module's inputs keep their values, storage and shape through its forward."""
    model = load(tiny(variant).directory)
    changed = []

    def remember(module, inputs):
        module.seen = [(t, t.clone(), t.data_ptr(), t.shape) for t in inputs if isinstance(t, torch.Tensor)]

    def compare(module, inputs, output):
        del inputs, output
        for tensor, value, pointer, shape in module.seen:
            if tensor.shape != shape or tensor.data_ptr() != pointer or not torch.equal(tensor, value):
                changed.append(type(module).__name__)
        del module.seen

    for module in model.modules():
        module.register_forward_pre_hook(remember)
        module.register_forward_hook(compare)
    steps = PagedSteps(model)
    steps.step([("a", prompt(20, seed=2)), ("b", prompt(3, seed=3))], padding=2)
    assert changed == []


@pytest.mark.parametrize("padded", [False, True])
@every_variant
def test_the_forward_reads_no_value_on_the_host(tiny, variant, padded):
    """On the meta device a tensor has no values: reading one raises, as it would break a graph capture."""
    config = load_model_config(tiny(variant).directory)
    model = build_model(config, formats_from_config(None), _shapes_only(), torch.bfloat16, torch.device("meta"))
    model.finish_load()
    meta = {"device": torch.device("meta")}
    metadata = AttentionMetadata(
        query_start_loc=torch.empty(5, dtype=torch.int32, **meta),
        seq_lens=torch.empty(4, dtype=torch.int32, **meta),
        page_table=torch.empty(4, 2, dtype=torch.int32, **meta),
        slot_mapping=torch.empty(4, dtype=torch.int64, **meta),
        page_size=64,
        query_lens_host=(1,) * 4,
        seq_lens_host=(9,) * 4,
    )
    context = ForwardContext(
        attention=metadata,
        attention_plan=None,
        kv_cache=[torch.empty(8, *kv_page_shape(model.attention_shape, 64), **meta)] * model.num_layers,
        num_tokens=torch.empty(1, dtype=torch.int32, **meta) if padded else None,
    )
    ids = torch.empty(4, dtype=torch.int64, **meta)
    with torch.inference_mode():
        hidden = model(ids, ids, context)
        assert hidden.shape == (4, config.hidden_size)
        assert hidden.dtype == torch.bfloat16
        assert model.compute_logits(hidden).dtype == torch.bfloat16


@every_variant
def test_random_weights_run(tiny, variant):
    """A model from a config alone, in the type a GPU would use."""
    config = load_model_config(tiny(variant).directory)
    model = build_model(config, formats_from_config(None), reference.cpu(), torch.bfloat16, torch.device("cpu"))
    dummy_weights(model, seed=0)
    model.finish_load()
    logits = PagedSteps(model).step([("r", prompt(5, seed=0))])[0]
    assert logits.isfinite().all()


@every_variant
def test_no_parameter_asks_for_a_gradient(tiny, variant):
    model = load(tiny(variant).directory)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.num_layers == len(model.layers) == 3


def _context(steps: PagedSteps) -> ForwardContext:
    empty = torch.zeros(0, dtype=torch.int32)
    metadata = AttentionMetadata(empty, empty, empty.view(0, 0), empty.long(), steps.page_size, (), ())
    return ForwardContext(metadata, reference.plan_attention(metadata, steps.model.attention_shape), steps.cache)


def _shapes_only() -> Kernels:
    """Kernels that launch nothing: what is left is the models' own code."""

    def experts_flat(x, slot_ids, weights, experts):
        del slot_ids, weights, experts
        return torch.empty_like(x)

    return dataclasses.replace(
        reference.cpu(),
        experts_flat=experts_flat,
        gqa_attention=lambda q, *_: torch.empty_like(q),
        mla_attention=lambda q, *_: torch.empty_like(q),
        gqa_inputs=lambda qkv, *rest: qkv.new_empty(len(qkv), rest[-1].num_heads, rest[-1].head_dim),
        mla_inputs=lambda q, *rest: (q.new_empty(*q.shape[:2], rest[3].shape[2]), q[..., rest[3].shape[1] :]),
    )


def test_a_warm_up_runs_two_layers_of_each_kind(tmp_path):
    model = load(write_checkpoint("deepseek_v3_small", tmp_path, num_hidden_layers=7, first_k_dense_replace=3))
    ran = []
    for index, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    steps = PagedSteps(model)
    steps.step([("a", [1, 2])], flags=dataclasses.replace(EAGER, phase="warm-up"))
    assert ran == [0, 1, 3, 4]  # three dense layers, then four with experts
    ran.clear()
    steps.step([("b", [1, 2])])
    assert ran == [*range(7)]
