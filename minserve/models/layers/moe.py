"""The one Mixture-of-Experts body: eager, captured, serial and overlapped steps all run it.

Knows neither where experts live (the dispatcher does) nor how streams are ordered (streams.py does).
"""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from minserve.errors import UsageError
from minserve.kernels.interface import ExpertRows
from minserve.models.build_context import BuildContext
from minserve.models.formats import LAYOUTS
from minserve.models.forward_context import ForwardContext
from minserve.models.layers.dispatcher import LocalDispatcher
from minserve.models.layers.experts import Experts
from minserve.models.layers.linear import GatedMLP, Linear, Part
from minserve.models.layers.router import Router
from minserve.models.layers.streams import Lanes, side_by_side
from minserve.models.model_config import MoeConfig


class SigmoidGatedMLP(nn.Module):
    """sigmoid(gate(x)) * mlp(x): a shared expert that each token can turn down. The gate is part of the side block."""

    def __init__(self, prefix: str, hidden_size: int, intermediate_size: int, build: BuildContext) -> None:
        super().__init__()
        self.mlp = GatedMLP(prefix, hidden_size, intermediate_size, build)
        self.gate = Linear([Part(f"{prefix}_gate", 1)], hidden_size, build)

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.gate(x).sigmoid() * self.mlp(x)
        return gated


def _not_fused(reason: str) -> UsageError:
    return UsageError(f"--shared-expert fused: {reason}; use overlap, serial or auto")


class MixtureOfExperts(nn.Module):
    """Routed experts plus, where the model has one, the shared expert, which is added unscaled: [T, H] -> [T, H].

    With `build.fuse_shared` the shared expert is as many more slots of the routed kernels as it is wide, with weight 1.
    """

    def __init__(self, prefix: str, shared: str, hidden_size: int, config: MoeConfig, build: BuildContext) -> None:
        super().__init__()
        self.dispatcher = build.dispatcher
        self.experts = Experts(f"{prefix}.experts", hidden_size, config, build)
        self.shared: nn.Module | None = None
        if config.shared_intermediate_size:
            kind = SigmoidGatedMLP if config.shared_gated else GatedMLP
            self.shared = kind(f"{prefix}.{shared}", hidden_size, config.shared_intermediate_size, build)
        self.router = Router(f"{prefix}.gate", hidden_size, config, build)
        self._to_be_fused = build.fuse_shared and self.shared is not None
        if self._to_be_fused:
            self._fusable()  # refused now, not after all weights have been read

    def _fusable(self) -> tuple[GatedMLP, int]:
        """The shared expert, and as how many routed ones it can be computed. Raises UsageError where it cannot."""
        shared, width = self.shared, self.experts.intermediate_size
        if not isinstance(shared, GatedMLP):
            raise _not_fused("this model's shared expert is gated, and the routed kernels have no gate")
        count, rest = divmod(shared.down.weight.shape[1], width)
        if rest:
            raise _not_fused(f"the shared expert is no multiple of a routed one's {width} wide")
        if self.experts.placement.num_ranks > 1:
            raise _not_fused("the routed experts are spread over ranks, and each rank needs the shared one")
        if not self.experts.takes(shared):
            raise _not_fused(f"the shared expert is not kept as the routed ones are ({LAYOUTS[self.experts.kept].title})")
        return shared, count

    def fuse(self) -> None:
        """The shared expert leaves its own matrices for always-on slots behind the routed experts'."""
        shared, count = self._fusable()
        self.experts.append(shared, count)
        self.router.config = dataclasses.replace(self.router.config, always_on=count)
        self.shared = None

    def finish_load(self) -> None:
        """After the last copy, before the first forward."""
        self.router.finish_load()
        if self._to_be_fused:
            self.fuse()

    def forward(self, hidden: Tensor, ctx: ForwardContext, lanes: Lanes | None) -> Tensor | ExpertRows:
        """Without tokens the routed part still runs, since other ranks wait in its collectives; the shared one does not.

        Where all experts are of this GPU, the norm that reads the sum may be left to make it: of routed and shared ones.
        """
        shared = self.shared
        if shared is None or hidden.shape[0] == 0:
            return self._routed(hidden, ctx)
        routed_output, shared_output = side_by_side(lambda: self._routed(hidden, ctx), lambda: shared(hidden), lanes)
        if isinstance(routed_output, ExpertRows):
            # The norm reads both before the next layer forks, which CudaLanes asks for.
            return dataclasses.replace(routed_output, added=shared_output)
        total: Tensor = routed_output + shared_output
        return total

    def _routed(self, hidden: Tensor, ctx: ForwardContext) -> Tensor | ExpertRows:
        expert_ids, weights = self.router(hidden, ctx.num_tokens)
        slot_ids = self.experts.slots_of(expert_ids)
        dispatched = self.dispatcher.dispatch(hidden, slot_ids, weights, ctx.num_tokens, ctx.rows_per_rank)
        if isinstance(self.dispatcher, LocalDispatcher):
            return self.dispatcher.combine(self.experts.unsummed(dispatched.tokens), dispatched)
        return self.dispatcher.combine(self.experts(dispatched.tokens), dispatched)
