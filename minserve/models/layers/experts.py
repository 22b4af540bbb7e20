"""The routed experts' weights, stacked by slot."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minserve.kernels.interface import ExpertWeights
from minserve.models.build_context import BuildContext
from minserve.models.config_types import MoeConfig
from minserve.models.destinations import Destination
from minserve.models.formats import BLOCK, blocks, scale_name
from minserve.models.layers.dispatcher import ExpertPlacement, FlatTokens, MaskedTokens
from minserve.models.layers.linear import parameter


class Experts(nn.Module):
    """w13 [E, 2I, H] with gate rows first, w2 [E, H, I].

    They stay FP8 when every expert is and I is a multiple of the block; else a block would span gate and up rows, and they
    are widened at load.
    """

    slots: Tensor | None
    """int32 [E]: slot of each expert; None when each sits in its own."""

    def __init__(self, prefix: str, hidden_size: int, config: MoeConfig, build: BuildContext) -> None:
        super().__init__()
        self.prefix = prefix
        self.kernels = build.kernels
        self.formats = build.formats
        self.placement = build.placement or ExpertPlacement.identity(config.num_experts)
        self.intermediate_size = width = config.intermediate_size
        keep = width % BLOCK == 0 and build.keeps_fp8(self._names())
        dtype, count = torch.float8_e4m3fn if keep else build.dtype, config.num_experts
        self.w13 = parameter((count, 2 * width, hidden_size), dtype, build.device)
        self.w2 = parameter((count, hidden_size, width), dtype, build.device)
        self.w13_scale = self.w2_scale = None
        if keep:
            self.w13_scale = parameter((count, blocks(2 * width), blocks(hidden_size)), torch.float32, build.device)
            self.w2_scale = parameter((count, blocks(hidden_size), blocks(width)), torch.float32, build.device)
        identity = self.placement.is_identity
        slots = None if identity else torch.tensor(self.placement.slot_of_expert, dtype=torch.int32, device=build.device)
        self.register_buffer("slots", slots, persistent=False)

    def slots_of(self, expert_ids: Tensor) -> Tensor:
        """Expert ids int32 [T, k] as slots; -1 stays -1."""
        if self.slots is None:
            return expert_ids
        return torch.where(expert_ids < 0, expert_ids, self.slots[expert_ids.clamp(min=0)])

    def forward(self, tokens: FlatTokens | MaskedTokens) -> Tensor:
        """The experts' output in the tokens' layout: flat ones weighted and summed, masked ones neither."""
        weights = ExpertWeights(self.w13, self.w2, self.w13_scale, self.w2_scale)
        if isinstance(tokens, MaskedTokens):
            return self.kernels.experts_masked(tokens.hidden, tokens.counts, weights)
        return self.kernels.experts_flat(tokens.hidden, tokens.slot_ids, tokens.weights, weights)

    def _names(self) -> list[str]:
        experts = range(len(self.placement.slot_of_expert))
        return [f"{self.prefix}.{expert}.{part}_proj.weight" for expert in experts for part in ("gate", "up", "down")]

    def destinations(self) -> Iterator[Destination]:
        width, half = self.intermediate_size, self.intermediate_size // BLOCK
        for expert, slot in enumerate(self.placement.slot_of_expert):
            gate, up, down = (f"{self.prefix}.{expert}.{part}_proj.weight" for part in ("gate", "up", "down"))
            yield self._weight(gate, self.w13[slot, :width])
            yield self._weight(up, self.w13[slot, width:])
            yield self._weight(down, self.w2[slot])
            if self.w13_scale is not None and self.w2_scale is not None:
                yield Destination(scale_name(gate), self.w13_scale[slot, :half])
                yield Destination(scale_name(up), self.w13_scale[slot, half:])
                yield Destination(scale_name(down), self.w2_scale[slot])

    def _weight(self, name: str, target: Tensor) -> Destination:
        widen = self.w13_scale is None and self.formats.of(name) == "fp8_block"
        return Destination(name, target, scale_name(name) if widen else None)
