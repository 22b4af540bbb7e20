"""What a broken server would compute: each fault as a change to the server's own model, made on purpose.

Knows the layers' attributes; nothing of the tasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minserve.kernels import reference
from minserve.kernels.interface import AttentionMetadata, AttentionShape, RouterConfig
from minserve.models.layers.mla import MultiHeadLatentAttention
from minserve.models.layers.moe import MixtureOfExperts
from minserve.models.layers.rotary import inverse_frequencies
from tools.answer_steps import AnswerSteps

Routed = tuple[Tensor, Tensor]
Route = Callable[[Tensor, Tensor, RouterConfig], Routed]
LAST = slice(-1, None)
"""Of the MoE layers."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServerFault:
    """`apply` breaks a run's model or kernels."""

    name: str
    apply: Callable[[AnswerSteps], None]
    collapse: bool
    """It must end at half the answers or fewer; else it must at least lie outside a drift bound."""
    decode_only: bool = False


def server_faults(sharp_experts: range) -> list[ServerFault]:
    """All of them; each expert of `sharp_experts` also dies alone, in the last layer, where nothing can make up for it."""
    return [
        ServerFault("shared expert zeroed", _shared(0.0), True),
        ServerFault("shared expert doubled", _shared(2.0), True),
        ServerFault("routed experts zeroed", _routes(lambda *a: _scaled(reference.choose(*a), 0.0)), True),
        ServerFault("routed experts permuted (each one's next)", _routes(_permuted), True),
        ServerFault("scale left out", _rule(lambda _: {"scale": 1.0}), True),
        ServerFault("scale applied twice", _rule(lambda c: {"scale": c.scale**2}), True),
        ServerFault("correction bias dropped", _routes(lambda x, _, c: reference.choose(x, None, c)), True),
        ServerFault("group limit ignored", _rule(lambda _: {"group_score": "none"}), True),
        ServerFault("wrong groups (strided)", _routes(_strided), True),
        ServerFault("wrong groups (one kept)", _rule(lambda _: {"top_k_groups": 1}), True),
        ServerFault("neox rope", _neox, True),
        ServerFault("stale input row (its neighbour's)", _reads(lambda hidden, _: hidden.roll(1, 0)), True),
        ServerFault("stale input rows (the step before's)", _reads(_last_step), True, decode_only=True),
        ServerFault("page table off by one", _pages(lambda table: table + 1), True),
        ServerFault("shared expert doubled, in decode only", _shared(2.0), True, decode_only=True),
        ServerFault("shared expert zeroed, last layer", _shared(0.0, LAST), False),
        ServerFault("shared expert doubled, last layer", _shared(2.0, LAST), False),
        ServerFault("routed experts zeroed, last layer", _routes(lambda *a: _scaled(reference.choose(*a), 0.0), LAST), False),
        ServerFault("routed experts permuted, last layer", _routes(_permuted, LAST), False),
        ServerFault("scale a tenth too large", _routes(lambda *a: _scaled(reference.choose(*a), 1.1)), False),
        ServerFault("bias dropped, last layer", _routes(lambda x, _, c: reference.choose(x, None, c), LAST), False),
        ServerFault("bias in the weights", _routes(_biased_weights), False),
        ServerFault("weights not normalised", _rule(lambda _: {"normalize": False}), False),
        ServerFault("one expert fewer", _rule(lambda c: {"top_k": c.top_k - 1}), False),
        ServerFault("groups scored by their best", _rule(lambda _: {"group_score": "max"}), False),
        ServerFault("softmax scale without mscale", _no_mscale, False),
        ServerFault("plain rope instead of YaRN", _no_yarn, False),
        ServerFault("stale input row, one in eight", _reads(_one_in_eight), False),
        ServerFault("first page of each request wrong", _pages(_first_off_by_one), False),
        *(ServerFault(f"expert {expert} dead, last layer", _routes(_without(expert), LAST), False) for expert in sharp_experts),
    ]


def _moe_layers(steps: AnswerSteps) -> list[MixtureOfExperts]:
    return [layer.mlp for layer in steps.model.layers if isinstance(layer.mlp, MixtureOfExperts)]


def _attentions(steps: AnswerSteps) -> list[MultiHeadLatentAttention]:
    return [layer.attention for layer in steps.model.layers if isinstance(layer.attention, MultiHeadLatentAttention)]


# ---- experts


def _shared(factor: float, layers: slice = slice(None)) -> Callable[[AnswerSteps], None]:
    def apply(steps: AnswerSteps) -> None:
        for moe in _moe_layers(steps)[layers]:
            assert moe.shared is not None
            moe.shared.register_forward_hook(lambda _module, _args, output: output * factor)

    return apply


def _routes(choose: Callable[..., Routed], layers: slice = slice(None)) -> Callable[[AnswerSteps], None]:
    def apply(steps: AnswerSteps) -> None:
        for moe in _moe_layers(steps)[layers]:
            moe.router.kernels = dataclasses.replace(
                moe.router.kernels, route=lambda x, weight, bias, config, _: choose(x.float() @ weight.t(), bias, config)
            )

    return apply


def _rule(changes: Callable[[RouterConfig], dict[str, Any]]) -> Callable[[AnswerSteps], None]:
    def apply(steps: AnswerSteps) -> None:
        for moe in _moe_layers(steps):
            moe.router.config = dataclasses.replace(moe.router.config, **changes(moe.router.config))

    return apply


def _scaled(routed: Routed, factor: float) -> Routed:
    return routed[0], routed[1] * factor


def _permuted(logits: Tensor, bias: Tensor, config: RouterConfig) -> Routed:
    ids, weights = reference.choose(logits, bias, config)
    return (ids + 1) % logits.shape[-1], weights


def _without(expert: int) -> Route:
    def route(logits: Tensor, bias: Tensor, config: RouterConfig) -> Routed:
        ids, weights = reference.choose(logits, bias, config)
        return ids, weights.masked_fill(ids == expert, 0.0)

    return route


def _strided(logits: Tensor, bias: Tensor, config: RouterConfig) -> Routed:
    """Group g is the experts g, g + n_group, ... instead of neighbours."""
    order = torch.arange(logits.shape[-1]).view(-1, config.num_groups).t().flatten()
    ids, weights = reference.choose(logits[:, order], bias[order], config)
    return order[ids.long()].to(torch.int32), weights


def _biased_weights(logits: Tensor, bias: Tensor, config: RouterConfig) -> Routed:
    ids, _ = reference.choose(logits, bias, config)
    weights = (logits.sigmoid() + bias).gather(-1, ids.long())
    return ids, weights / weights.sum(-1, keepdim=True) * config.scale


def _reads(change: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> Callable[[AnswerSteps], None]:
    """The MoE layers read `change(rows, memory)` instead of their rows; each layer has a memory of its own."""

    def apply(steps: AnswerSteps) -> None:
        for moe in _moe_layers(steps):
            memory: dict[str, Tensor] = {}
            moe.register_forward_pre_hook(lambda _module, args, memory=memory: (change(args[0], memory), *args[1:]))

    return apply


def _last_step(hidden: Tensor, memory: dict[str, Tensor]) -> Tensor:
    """What the same rows held one step ago; rows only ever leave from the end."""
    before = memory.get("rows", hidden)
    memory["rows"] = hidden
    return before[: hidden.shape[0]]


def _one_in_eight(hidden: Tensor, memory: dict[str, Tensor]) -> Tensor:
    del memory
    hit = torch.arange(hidden.shape[0]).unsqueeze(1) % 8 == 0
    return torch.where(hit, hidden.roll(1, 0), hidden)


# ---- attention


def _neox(steps: AnswerSteps) -> None:
    for attention in _attentions(steps):
        attention.rotary.interleaved = False


def _no_mscale(steps: AnswerSteps) -> None:
    for attention in _attentions(steps):
        config = attention.config
        plain = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        attention.shape = dataclasses.replace(attention.shape, scale=plain)


def _no_yarn(steps: AnswerSteps) -> None:
    frequencies = inverse_frequencies(dataclasses.replace(steps.model.config.rope, yarn=None))
    for attention in _attentions(steps):
        angles = torch.arange(attention.rotary.cos_sin.shape[0]).unsqueeze(1) * frequencies
        attention.rotary.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)


def _pages(change: Callable[[Tensor], Tensor]) -> Callable[[AnswerSteps], None]:
    """Reads go through a changed page table; writes go where they should."""

    def plan(metadata: AttentionMetadata, shape: AttentionShape) -> reference.AttentionPlan:
        return reference.plan_attention(dataclasses.replace(metadata, page_table=change(metadata.page_table)), shape)

    def apply(steps: AnswerSteps) -> None:
        steps.kernels = dataclasses.replace(steps.kernels, plan_attention=plan)

    return apply


def _first_off_by_one(table: Tensor) -> Tensor:
    return torch.cat((table[:, :1] + 1, table[:, 1:]), dim=1)
