"""A few layers of the real weights against plain fp32 arithmetic: what a graph and its eager run may have wrong together.

A layer's fp32 twin shares its routed experts' memory and copies the rest; it computes with the reference kernels on the same
device. Knows layers and tolerances; nothing of graphs or requests.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from minserve.errors import SelfCheckFailed
from minserve.kernels import reference
from minserve.kernels.interface import AttentionMetadata, ExpertRows, ExpertWeights, Kernels, kv_page_shape
from minserve.models.decoder import Decoder, DecoderLayer
from minserve.models.forward_context import ForwardContext
from minserve.models.layers.dispatcher import TorchDispatcher
from minserve.models.layers.experts import Experts
from minserve.models.layers.mla import MultiHeadLatentAttention
from minserve.models.layers.moe import MixtureOfExperts

PROMPT_TOKENS = 20
DECODE_TOKENS = 9
"""One after the other. Of a single one no median would help, should its choice of experts be a close one."""
TOLERANCE = 0.03
"""Relative error of the median token, for 16-bit arithmetic. The median, since rounding may turn a close choice of experts."""
FP8_TOLERANCE = 0.10
"""The same where FP8 weights meet FP8 activations."""


def check_layers(
    model: Decoder,
    kernels: Kernels,
    kv_dtype: torch.dtype,
    page_size: int,
    group: torch.distributed.ProcessGroup | None = None,
) -> dict[str, float]:
    """The first dense layer, the first with experts and the last: name and step to relative error. Raises SelfCheckFailed.

    `group`: the ranks that share the experts, which all come here at once; one that takes tensors of the host.
    """
    errors: dict[str, float] = {}
    for name, index in _chosen(model).items():
        layer = model.layers[index]
        assert isinstance(layer, DecoderLayer)
        fp8 = any(parameter.dtype == torch.float8_e4m3fn for parameter in layer.parameters())
        bound = FP8_TOLERANCE if fp8 else TOLERANCE
        for step, error in _compare(model, layer, kernels, kv_dtype, page_size, group).items():
            errors[f"{name} {step}"] = round(error, 5)
            if not error <= bound:
                raise SelfCheckFailed(
                    f"layer {index} ({name}) is {error:.3f} away from fp32 reference arithmetic in {step}, relative to its "
                    f"output; {bound} is the most that rounding explains: its weights or the {kernels.name} kernels are wrong"
                )
    return errors


def _chosen(model: Decoder) -> dict[str, int]:
    kinds = [isinstance(layer.mlp, MixtureOfExperts) for layer in model.layers]
    chosen = {"dense layer": kinds.index(False)} if False in kinds else {}
    if True in kinds:
        chosen["expert layer"] = kinds.index(True)
    return chosen | ({} if len(kinds) - 1 in chosen.values() else {"last layer": len(kinds) - 1})


@torch.inference_mode()
def _compare(
    model: Decoder,
    layer: DecoderLayer,
    kernels: Kernels,
    kv_dtype: torch.dtype,
    page_size: int,
    group: torch.distributed.ProcessGroup | None,
) -> dict[str, float]:
    """Kind of step to error: a prompt, then some more tokens after it."""
    twin, table = _twin(layer, kernels, group)
    weight = layer.input_norm.weight
    generator = torch.Generator(weight.device).manual_seed(1)
    shape = (1 + _num_pages(page_size), *kv_page_shape(model.attention_shape, page_size))
    caches = [torch.zeros(shape, dtype=dtype, device=weight.device) for dtype in (kv_dtype, torch.float32)]
    attended: dict[str, list[Tensor]] = {"prefill": [], "decode": []}
    added: dict[str, list[Tensor]] = {"prefill": [], "decode": []}
    for start, length in [(0, PROMPT_TOKENS), *((PROMPT_TOKENS + index, 1) for index in range(DECODE_TOKENS))]:
        metadata = _one_row(start, length, page_size, weight.device)
        # Small, so that what attention adds to the stream is not lost in the stream's own rounding; norms undo the scale.
        hidden = (0.1 * torch.randn(length, weight.shape[0], generator=generator, device=weight.device)).to(weight.dtype)
        positions = torch.arange(start, start + length, device=weight.device)
        outputs = []
        for module, its_kernels, cache, x in ((layer, kernels, caches[0], hidden), (twin, table, caches[1], hidden.float())):
            plan = its_kernels.plan_attention(metadata, model.attention_shape)
            context = ForwardContext(metadata, plan, [cache] * model.num_layers)
            outputs.append(module(x, None, positions, context, None))
        (sums, residual), (true_sums, true_residual) = outputs
        if isinstance(sums, ExpertRows):
            sums = reference.sum_rows(sums)
        rounding = torch.finfo(hidden.dtype).eps / 4 * true_residual.norm(dim=-1)  # of the stream: no fault of attention's
        step = "prefill" if start == 0 else "decode"
        attended[step].append(_errors(residual - true_residual, true_residual - hidden.float(), rounding))
        added[step].append(_errors(sums - true_sums, true_sums, torch.zeros_like(rounding)))
    return {step: max(float(torch.cat(errors[step]).median()) for errors in (attended, added)) for step in attended}


def _errors(difference: Tensor, truth: Tensor, rounding: Tensor) -> Tensor:
    """The rows' distances, less the rounding [T], relative to the truth's size: [T]."""
    rows: Tensor = (difference.norm(dim=-1) - rounding).clamp(min=0.0) / truth.norm(dim=-1).clamp(min=1e-20)
    return rows.nan_to_num(nan=torch.inf)


def _num_pages(page_size: int) -> int:
    return -(-(PROMPT_TOKENS + DECODE_TOKENS) // page_size)


def _one_row(start: int, length: int, page_size: int, device: torch.device) -> AttentionMetadata:
    positions = torch.arange(start, start + length)
    pages = torch.arange(1, 1 + _num_pages(page_size), dtype=torch.int32)
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, length], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([start + length], dtype=torch.int32, device=device),
        page_table=pages.unsqueeze(0).to(device),
        slot_mapping=(page_size + positions).to(device),  # pages 1, 2, ... in order
        page_size=page_size,
        query_lens_host=(length,),
        seq_lens_host=(start + length,),
    )


def _twin(layer: DecoderLayer, kernels: Kernels, group: torch.distributed.ProcessGroup | None) -> tuple[DecoderLayer, Kernels]:
    """The layer in fp32 and the kernels that it computes with. Its tokens travel between ranks through the hosts."""
    table = dataclasses.replace(reference.cpu(), experts_flat=_experts_flat)
    memo: dict[int, Any] = {id(kernels): table}
    for module in layer.modules():
        if isinstance(module, Experts):
            memo |= {id(parameter): parameter for parameter in module.parameters()}
        if isinstance(module, MixtureOfExperts) and group is not None:
            slots = module.experts.placement.slots_per_rank
            memo[id(module.dispatcher)] = TorchDispatcher(group, slots, through=torch.device("cpu"))
    twin = copy.deepcopy(layer, memo)
    for module in twin.modules():
        if isinstance(module, Experts):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dtype in (torch.bfloat16, torch.float16):
                setattr(module, name, nn.Parameter(parameter.float(), requires_grad=False))
    for module in twin.modules():
        if isinstance(module, MultiHeadLatentAttention):
            module.finish_load()
    return twin, table


def _experts_flat(x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
    """The reference's, with weights of any type widened to fp32 one expert at a time."""
    out = torch.zeros_like(x)
    for slot in slot_ids.unique().tolist():
        if slot < 0:
            continue
        rows, places = (slot_ids == slot).nonzero(as_tuple=True)
        w13, w2 = (
            reference.widen(weight[slot], None if scale is None else scale[slot], torch.float32).float()
            for weight, scale in ((experts.w13, experts.w13_scale), (experts.w2, experts.w2_scale))
        )
        result = reference.silu_and_mul(x[rows] @ w13.T) @ w2.T
        out.index_add_(0, rows, result * weights[rows, places].unsqueeze(1))
    return out
