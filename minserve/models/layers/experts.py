"""The routed experts' weights, stacked by slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from minserve.kernels.interface import ExpertRows, ExpertWeights
from minserve.kernels.reference import widen
from minserve.models.build_context import BuildContext
from minserve.models.destinations import Destination, weight_destinations
from minserve.models.formats import BLOCK, INT4_GROUP, LAYOUTS, Format, blocks
from minserve.models.layers.dispatcher import FlatTokens, MaskedTokens
from minserve.models.layers.linear import GatedMLP, Linear, parameter
from minserve.models.layers.placement import ExpertPlacement
from minserve.models.model_config import MoeConfig

_Output = TypeVar("_Output")
_PARTS = ("gate", "up", "down")


class Experts(nn.Module):
    """w13 [E, 2I, H] with gate rows first, w2 [E, H, I]; E: the experts of this rank.

    They stay FP8 when every expert is and I is a multiple of the block (else a block would span gate and up rows), and INT4
    when every expert is; otherwise, or where the kernels read neither, they are widened at load.
    """

    slots: Tensor | None
    """int32 [experts of the model, C]: each one's slots in turn; None when each sits in its own."""
    load: Tensor | None
    """int64, one a slot of this rank, after one for no slot: (token, slot) pairs so far. None on a GPU that has all experts."""

    def __init__(self, prefix: str, hidden_size: int, config: MoeConfig, build: BuildContext) -> None:
        super().__init__()
        self.prefix = prefix
        self.kernels = build.kernels
        self.formats = build.formats
        self.placement = build.placement_of(prefix) or ExpertPlacement.spread(config.num_experts, 1, 0)
        self.intermediate_size = width = config.intermediate_size
        experts = range(config.num_experts)
        kept = build.kept_format([f"{prefix}.{expert}.{part}_proj.weight" for expert in experts for part in _PARTS])
        self.kept: Format = "plain" if kept == "fp8_block" and width % BLOCK else kept
        count = self.placement.slots_per_rank
        self.w13, self.w13_scale = self._matrices(count, 2 * width, hidden_size, build)
        self.w2, self.w2_scale = self._matrices(count, hidden_size, width, build)
        identity = self.placement.is_identity
        slots = None if identity else torch.tensor(self.placement.replica_table(), dtype=torch.int32, device=build.device)
        self.register_buffer("slots", slots, persistent=False)
        counted = self.placement.num_ranks > 1 or build.device.type == "cpu"  # launches that a GPU alone can do without
        load = torch.zeros(count + 1, dtype=torch.int64, device=build.device) if counted else None
        self.register_buffer("load", load, persistent=False)

    def _matrices(self, count: int, rows: int, columns: int, build: BuildContext) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Memory for `count` matrices and their scales in the format that is kept."""
        if self.kept == "plain":
            return parameter((count, rows, columns), build.dtype, build.device), None
        if self.kept == "fp8_block":
            values = parameter((count, rows, columns), torch.float8_e4m3fn, build.device)
            return values, parameter((count, blocks(rows), blocks(columns)), torch.float32, build.device)
        # INT4's group scales are a ninth of the memory: they keep the compute type, which holds published (bf16) ones exactly.
        values = parameter((count, rows, columns // LAYOUTS["int4_group"].packed), torch.int32, build.device)
        return values, parameter((count, rows, columns // INT4_GROUP), build.dtype, build.device)

    def takes(self, mlp: GatedMLP) -> bool:
        """Whether `append` can keep an MLP's weights as it keeps its own."""
        both_fp8 = mlp.gate_up.scale is not None and mlp.down.scale is not None
        return self.kept == "plain" or (self.kept == "fp8_block" and both_fp8)

    @torch.inference_mode()
    def append(self, mlp: GatedMLP, count: int) -> None:
        """Slots behind the last: an MLP `count` times as wide as an expert, cut into as many whose outputs add up to its own.

        For a moment one kind of the layer's matrices is in memory twice.
        """
        rows = self._stored(mlp.gate_up)  # gate's of all slots, then up's of all slots
        for name, values in zip(("w13", "w13_scale"), rows, strict=True):
            if values is not None:
                self._extend(name, values.unflatten(0, (2, count, -1)).transpose(0, 1).flatten(1, 2))
        for name, values in zip(("w2", "w2_scale"), self._stored(mlp.down), strict=True):
            if values is not None:
                self._extend(name, values.unflatten(1, (count, -1)).transpose(0, 1))
        if self.load is not None:
            self.load = self.load.new_zeros(self.load.shape[0] + count)

    def _stored(self, layer: Linear) -> tuple[Tensor, Tensor | None]:
        if self.kept == "fp8_block":
            return layer.weight, layer.scale
        return widen(layer.weight, layer.scale, self.w13.dtype), None

    def _extend(self, name: str, slots: Tensor) -> None:
        old = getattr(self, name)
        stacked = parameter((old.shape[0] + slots.shape[0], *old.shape[1:]), old.dtype, old.device)
        stacked[: old.shape[0]].copy_(old)
        stacked[old.shape[0] :].copy_(slots)
        setattr(self, name, stacked)
        del old
        if stacked.is_cuda:
            # Else the next, smaller stack is cut out of the old one's memory and keeps the rest of it from ever being used.
            torch.cuda.empty_cache()

    def slots_of(self, expert_ids: Tensor) -> Tensor:
        """Expert ids int32 [T, k] as slots; -1 stays -1. Neighbouring tokens go to different copies of an expert."""
        if self.slots is None:
            return expert_ids
        turn = torch.arange(expert_ids.shape[0], device=expert_ids.device)[:, None] % self.slots.shape[1]
        return torch.where(expert_ids < 0, expert_ids, self.slots[expert_ids.clamp(min=0), turn])

    def forward(self, tokens: FlatTokens | MaskedTokens) -> Tensor:
        """The experts' output in the tokens' layout: flat ones weighted and summed, masked ones neither."""
        if isinstance(tokens, FlatTokens):
            return self._flat(self.kernels.experts_flat, tokens)
        if self.load is not None:
            self.load[1:].add_(tokens.counts)
        scale = () if tokens.scale is None else (tokens.scale,)
        return self.kernels.experts_masked(tokens.hidden, tokens.counts, self._weights(), *scale)

    def unsummed(self, tokens: FlatTokens | MaskedTokens) -> Tensor | ExpertRows:
        """The same, but that the sum of flat ones may be left to the norm that reads it."""
        if isinstance(tokens, MaskedTokens):
            masked: Tensor = self(tokens)
            return masked
        return self._flat(self.kernels.expert_rows or self.kernels.experts_flat, tokens)

    def _flat(self, compute: Callable[..., _Output], tokens: FlatTokens) -> _Output:
        if self.load is not None:
            slots = (tokens.slot_ids + 1).flatten().long()
            self.load.scatter_add_(0, slots, torch.ones_like(slots))
        scale = () if tokens.scale is None else (tokens.scale,)
        return compute(tokens.hidden, tokens.slot_ids, tokens.weights, self._weights(), *scale)

    def _weights(self) -> ExpertWeights:
        return ExpertWeights(self.w13, self.w2, self.w13_scale, self.w2_scale)

    def destinations(self) -> Iterator[Destination]:
        stacks = [(*self.w13.chunk(2, dim=1), self.w2)]
        if self.w13_scale is not None and self.w2_scale is not None:
            stacks.append((*self.w13_scale.chunk(2, dim=1), self.w2_scale))
        for part, *stack in zip(_PARTS, *stacks, strict=True):
            slots = zip(*(tensors.unbind() for tensors in stack), strict=True)
            for expert, (value, *scale) in zip(self.placement.local_experts, slots, strict=False):  # then appended slots
                name = f"{self.prefix}.{expert}.{part}_proj.weight"
                yield from weight_destinations(name, value, scale[0] if scale else None, self.formats)

    def ignored(self, name: str) -> str | None:
        """Why this rank leaves a checkpoint tensor of these experts on disk; None: it does not."""
        number = name.removeprefix(f"{self.prefix}.").partition(".")[0]
        if not name.startswith(f"{self.prefix}.") or not number.isdecimal():
            return None
        elsewhere = int(number) < self.placement.num_experts and int(number) not in self.placement.local_experts
        return "an expert of another rank" if elsewhere else None

    def expert_load(self) -> list[int] | None:
        """One count for each of the model's experts: the pairs that this rank's slots have had. Waits for the device."""
        if self.load is None:
            return None
        counts = [0] * self.placement.num_experts
        for expert, count in zip(self.placement.local_experts, self.load[1:].tolist(), strict=False):  # then appended slots
            counts[expert] = count
        return counts
