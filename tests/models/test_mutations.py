"""The comparison with transformers is sharp: each rule of an architecture, broken on purpose, fails it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from logit_comparison import assert_same_logits, prompt, reference_logits
from paged_steps import PagedSteps, load
from tiny_checkpoints import VARIANTS

from minserve.kernels import reference
from minserve.kernels.interface import Kernels
from minserve.models.decoder import Decoder
from minserve.models.model_config import ModelConfig

TOKENS = prompt(75, seed=11)
PREFILL = 70


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One broken rule: in what config.json says, in a kernel, or in the loaded model."""

    config: Callable[[ModelConfig], ModelConfig] = lambda config: config
    kernels: Callable[[Kernels], Kernels] = lambda kernels: kernels
    model: Callable[[Decoder], None] = lambda _: None


def _run(checkpoint: Any, mutation: Mutation) -> None:
    kernels = mutation.kernels(reference.cpu())
    model = load(checkpoint.directory, kernels, config=mutation.config)
    mutation.model(model)
    steps = PagedSteps(model, kernels)
    rows = steps.step([("r", TOKENS[:PREFILL])])
    rows += [steps.step([("r", [token])])[0] for token in TOKENS[PREFILL:]]
    assert_same_logits(torch.cat(rows), reference_logits(checkpoint, TOKENS))


# ---- what can be broken


def _set(path: str, value: Any) -> Mutation:
    """config.<path> = value, or value(config)."""

    def change(config: ModelConfig) -> ModelConfig:
        new = value(config) if callable(value) else value
        owners = [config]
        *outer, last = path.split(".")
        for name in outer:
            owners.append(getattr(owners[-1], name))
        for owner, name in zip(reversed(owners), [last, *reversed(outer)], strict=True):
            new = dataclasses.replace(owner, **{name: new})
        return new

    return Mutation(config=change)


def _route(choose: Callable[..., Any]) -> Mutation:
    """A router whose logits become a choice by `choose`(logits, bias, config)."""
    return _kernel(route=lambda x, weight, bias, config, _: choose(x.float() @ weight.t(), bias, config))


def _kernel(**replacements: Callable[..., Any]) -> Mutation:
    return Mutation(kernels=lambda kernels: dataclasses.replace(kernels, **replacements))


def _weights(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Mutation:
    """Every parameter whose name ends in `suffix` becomes change(parameter)."""

    def mutate(model: Decoder) -> None:
        hit = [parameter for name, parameter in model.named_parameters() if name.endswith(suffix)]
        assert hit, suffix
        for parameter in hit:
            parameter.copy_(change(parameter.clone()))

    return Mutation(model=mutate)


def _swap_halves(w13: torch.Tensor) -> torch.Tensor:
    return torch.cat(w13.chunk(2, dim=-2)[::-1], dim=-2)


def _zero_mask_choice(logits, bias, config):
    """Dropped groups score 0.0, as a choice of positive scores would allow."""
    scores = logits.sigmoid()
    grouped = (scores + bias).unflatten(-1, (config.num_groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(config.top_k_groups, dim=-1).indices
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter(-1, best, True)
    ids = grouped.masked_fill(~kept.unsqueeze(-1), 0.0).flatten(-2).topk(config.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    return ids.to(torch.int32), weights / weights.sum(-1, keepdim=True) * config.scale


def _biased_weights_choice(logits, bias, config):
    """Weights from the scores that steer the choice."""
    ids, _ = reference.choose(logits, bias, config)
    weights = (logits.sigmoid() + bias).gather(-1, ids.long())
    return ids, weights / weights.sum(-1, keepdim=True) * config.scale


def _other_head_groups(q, cache, metadata, shape, plan):
    """Query head h reads key-value head h % Hkv instead of h // (Hq / Hkv)."""
    heads, groups = shape.num_heads, shape.num_kv_heads
    order = torch.arange(heads).view(-1, groups).t().flatten()
    result = torch.empty_like(q)
    result[:, order] = reference.gqa_attention(q[:, order].contiguous(), cache, metadata, shape, plan)
    return result


def _inputs(gqa: Callable[..., Any], mla: Callable[..., Any]) -> Mutation:
    return _kernel(gqa_inputs=gqa, mla_inputs=mla)


def _unturned(compute, table_at):
    def inputs(*arguments):
        table = arguments[table_at]
        half = table.cos_sin.shape[1] // 2
        still = torch.cat((torch.ones_like(table.cos_sin[:, :half]), torch.zeros_like(table.cos_sin[:, half:])), dim=1)
        changed = list(arguments)
        changed[table_at] = dataclasses.replace(table, cos_sin=still)
        return compute(*changed)

    return inputs


def _late_queries(compute, positions_at):
    """The queries of the position before; the cache, written last, is right."""

    def inputs(*arguments):
        changed = list(arguments)
        changed[positions_at] = (arguments[positions_at] - 1).clamp(min=0)
        late = compute(*changed)
        compute(*arguments)
        return late

    return inputs


def _sees_next(metadata, shape):
    """Not causal: each query sees all of its row."""
    plan = reference.plan_attention(metadata, shape)
    groups = (dataclasses.replace(g, visible=g.visible[:, -1:].expand_as(g.visible)) for g in plan.groups)
    return reference.AttentionPlan(tuple(groups))


def _page_off_by_one(metadata, shape):
    return reference.plan_attention(dataclasses.replace(metadata, page_table=metadata.page_table + 1), shape)


def _slot_off_by_one(*arguments):
    return reference.mla_inputs(*arguments[:-1], arguments[-1] - 1)


def _no_shared(model: Decoder) -> None:
    for name, module in model.named_modules():
        if name.endswith("mlp") and getattr(module, "shared", None) is not None:
            module.shared = None


def _ungated(model: Decoder) -> None:
    for layer in model.layers:
        if getattr(layer.mlp, "shared", None) is not None:
            layer.mlp.shared = layer.mlp.shared.mlp


def _no_qk_norm(model: Decoder) -> None:
    for layer in model.layers:
        layer.attention.q_norm = layer.attention.k_norm = None


def _untrained_norm(model: Decoder) -> None:
    for layer in model.layers:
        layer.attention.kv_a_norm.weight.fill_(1.0)


def _same_epsilon(model: Decoder) -> None:
    for layer in model.layers:
        layer.attention.kv_a_norm.eps = layer.input_norm.eps


def _other_head(model: Decoder) -> None:
    model.head.weight = torch.nn.Parameter(model.head.weight.roll(1, dims=0), requires_grad=False)


def _layers_swapped(model: Decoder) -> None:
    first, second = model.layers[1], model.layers[2]
    first.mlp, second.mlp = second.mlp, first.mlp


_plain_scale = _set("attention.scale", lambda c: (c.attention.qk_nope_head_dim + c.attention.qk_rope_head_dim) ** -0.5)
_scale_twice = _set("moe.router.scale", lambda c: c.moe.router.scale**2)
_anywhere = {
    "gate and up swapped in the experts": _weights("experts.w13", _swap_halves),
    "experts permuted": _weights("experts.w13", lambda w: w.roll(1, dims=0)),
    "routed experts zeroed": _weights("experts.w2", torch.zeros_like),
    "every second expert zeroed": _weights("experts.w2", lambda w: w * (torch.arange(len(w)) % 2).view(-1, 1, 1)),
    "router rows permuted": _weights("router.weight", lambda w: w.roll(1, dims=0)),
    "no rotation": _inputs(_unturned(reference.gqa_inputs, 2), _unturned(reference.mla_inputs, 5)),
    "queries one position late": _inputs(_late_queries(reference.gqa_inputs, 3), _late_queries(reference.mla_inputs, 6)),
    "not causal": _kernel(plan_attention=_sees_next),
    "page table off by one": _kernel(plan_attention=_page_off_by_one),
    "norm weights left out": _weights("post_norm.weight", torch.ones_like),
    "final norm left out": _weights("norm.weight", torch.ones_like),
    "top-k one less": _set("moe.router.top_k", lambda c: c.moe.router.top_k - 1),
    "experts of two layers swapped": Mutation(model=_layers_swapped),
}
_latent = {
    "neox rotation": _set("rope.interleaved", False),
    "latent norm weight left out": Mutation(model=_untrained_norm),
    "heads of kv_b permuted": _weights("kv_b.weight", lambda w: w.roll(w.shape[0] // 4, dims=0)),
    "cache slot off by one": _kernel(mla_inputs=_slot_off_by_one),
    "shared expert zeroed": Mutation(model=_no_shared),
    "shared expert doubled": _weights("shared.down.weight", lambda w: 2 * w),
    "gate and up swapped in the shared expert": _weights("shared.gate_up.weight", _swap_halves),
    "gate and up swapped in the dense layer": _weights("0.mlp.gate_up.weight", _swap_halves),
}
_stretched = {
    "no mscale in the softmax": _plain_scale,
    "no YaRN": _set("rope.yarn", None),
    "YaRN's factor off": _set("rope.yarn.factor", 4.0),
    "YaRN's betas off": _set("rope.yarn.beta_fast", 4.0),
    "YaRN's original context off": _set("rope.yarn.original_max_position_embeddings", 2048),
}
_sigmoid = {
    "no scale": _set("moe.router.scale", 1.0),
    "scale twice": _scale_twice,
    "no correction bias": _weights("router.correction_bias", torch.zeros_like),
    "weights from biased scores": _route(_biased_weights_choice),
    "weights not normalised": _set("moe.router.normalize", False),
    "softmax scores": _set("moe.router.scoring", "softmax"),
}
_grouped = {
    "no group limit": _set("moe.router.group_score", "none"),
    "one group more": _set("moe.router.top_k_groups", 3),
    "other groups": _set("moe.router.num_groups", 2),
}
_qwen = {
    "interleaved rotation": _set("rope.interleaved", True),
    "other head groups": _kernel(gqa_attention=_other_head_groups),
    "wrong theta": _set("rope.theta", 10500.0),
    "wrong softmax scale": _set("attention.scale", lambda c: c.hidden_size**-0.5),
    "sigmoid scores": _set("moe.router.scoring", "sigmoid"),
}
MUTATIONS: dict[str, dict[str, Mutation]] = {
    "deepseek_v3_small": {
        **_anywhere,
        **_latent,
        **_stretched,
        **_sigmoid,
        **_grouped,
        "groups masked with 0.0": _route(_zero_mask_choice),
        "groups scored by their best": _set("moe.router.group_score", "max"),
    },
    "deepseek_v3": {"neox rotation": _latent["neox rotation"], "no mscale in the softmax": _plain_scale, **_sigmoid},
    "moonlight": {
        **{name: mutation for name, mutation in _anywhere.items() if name != "experts of two layers swapped"},
        **_latent,
        **_sigmoid,
        "wrong theta": _set("rope.theta", 10000.0),
    },
    "kimi_k2": {**_stretched, **_sigmoid},
    "deepseek_v2": {
        **_anywhere,
        **_latent,
        **_stretched,
        **_grouped,
        "no scale": _set("moe.router.scale", 1.0),
        "scale twice": _scale_twice,
        "weights normalised": _set("moe.router.normalize", True),
        "sigmoid scores": _set("moe.router.scoring", "sigmoid"),
        "groups scored by their best two": _set("moe.router.group_score", "top2_sum"),
    },
    "deepseek_v2_lite": {
        **_stretched,
        "rms_norm_eps in the latents' norms": Mutation(model=_same_epsilon),
        "weights normalised": _set("moe.router.normalize", True),
        "scaled": _set("moe.router.scale", 2.0),
    },
    "qwen3_moe": {
        **_anywhere,
        **_qwen,
        "no qk-norm": Mutation(model=_no_qk_norm),
        "weights not normalised": _set("moe.router.normalize", False),
    },
    "qwen3_moe_tied": {
        "head not tied": Mutation(model=_other_head),
        "gate and up swapped in the dense layer": _weights("1.mlp.gate_up.weight", _swap_halves),
    },
    "qwen3_moe_yarn": {
        "no YaRN": _set("rope.yarn", None),
        "YaRN's temperature left out": _set("rope.yarn.attention_factor", 1.0),
    },
    "qwen2_moe": {
        **_anywhere,
        **_qwen,
        "no bias on queries, keys, values": _weights("qkv.bias", torch.zeros_like),
        "shared expert zeroed": Mutation(model=_no_shared),
        "shared gate dropped": Mutation(model=_ungated),
        "shared gate's sign": _weights("shared.gate.weight", torch.neg),
        "weights normalised": _set("moe.router.normalize", True),
    },
}

CASES = [(variant, name) for variant, mutations in MUTATIONS.items() for name in mutations]


@pytest.mark.parametrize(("variant", "mutation"), CASES)
def test_a_broken_rule_fails_the_comparison(tiny, variant, mutation):
    with pytest.raises(AssertionError, match="relative error"):
        _run(tiny(variant), MUTATIONS[variant][mutation])


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_the_unbroken_rules_pass_it(tiny, variant):
    _run(tiny(variant), Mutation())
