"""The decoder that all architectures share: embedding, pre-norm layers on a residual stream, final norm, head.

Knows no architecture: attention comes from the architecture's file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from minserve.kernels.interface import ExpertRows
from minserve.models.build_context import BuildContext
from minserve.models.destinations import Destination
from minserve.models.forward_context import ForwardContext
from minserve.models.layers.attention import GroupedQueryAttention
from minserve.models.layers.embedding import HEAD, Embedding, LMHead
from minserve.models.layers.linear import GatedMLP
from minserve.models.layers.mla import MultiHeadLatentAttention
from minserve.models.layers.moe import MixtureOfExperts
from minserve.models.layers.norm import RMSNorm
from minserve.models.layers.rotary import Rotary
from minserve.models.layers.streams import Lanes, SharedExpertPolicy, plan_streams
from minserve.models.model_config import ModelConfig


class DecoderLayer(nn.Module):
    """Attention, then experts or a dense MLP; each reads the norm of the residual stream and adds to it."""

    def __init__(
        self,
        index: int,
        attention: GroupedQueryAttention | MultiHeadLatentAttention,
        shared: str,
        config: ModelConfig,
        build: BuildContext,
    ) -> None:
        super().__init__()
        prefix, moe = f"model.layers.{index}", config.moe
        self.attention = attention
        self.mlp: MixtureOfExperts | GatedMLP
        if moe is not None and moe.sparse_layers[index]:
            self.mlp = MixtureOfExperts(f"{prefix}.mlp", shared, config.hidden_size, moe, build)
        else:
            self.mlp = GatedMLP(f"{prefix}.mlp", config.hidden_size, config.intermediate_size, build)
        self.input_norm = RMSNorm(f"{prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps, build)
        self.post_norm = RMSNorm(f"{prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps, build)

    def forward(
        self,
        hidden: Tensor | ExpertRows,
        residual: Tensor | None,
        positions: Tensor,
        ctx: ForwardContext,
        lanes: Lanes | None,
    ) -> tuple[Tensor | ExpertRows, Tensor]:
        """(what this layer's second half adds, the stream without it): the next norm sums them, so that one kernel does both."""
        normed, residual = self.input_norm.read_by(self.attention.reader, hidden, residual)
        attended = self.attention(normed, positions, ctx)
        if isinstance(self.mlp, MixtureOfExperts):
            normed, residual = self.post_norm.add(attended, residual)
            return self.mlp(normed, ctx, lanes), residual
        normed, residual = self.post_norm.read_by(self.mlp.gate_up, attended, residual)
        return self.mlp(normed), residual


Attend = Callable[[str, int, Rotary], GroupedQueryAttention | MultiHeadLatentAttention]
"""(name, layer index, the model's rotary table) -> that layer's attention."""


class Decoder(nn.Module):
    """A `Model`. `shared_expert` and `lanes` say how captured steps may run the shared expert; eager ones are serial."""

    def __init__(self, config: ModelConfig, attend: Attend, shared: str, build: BuildContext) -> None:
        """shared: what the checkpoint calls a layer's shared expert."""
        super().__init__()
        self.config = config
        self.shared_expert: SharedExpertPolicy = "serial"
        self.lanes: Lanes | None = None
        self.embedding = Embedding(config.vocab_size, config.hidden_size, build)
        rotary = Rotary(config.rope, config.max_position_embeddings, build)
        attentions = [attend(f"model.layers.{index}.self_attn", index, rotary) for index in range(config.num_layers)]
        self.attention_shape = attentions[0].shape
        self.layers = nn.ModuleList(
            DecoderLayer(index, attention, shared, config, build) for index, attention in enumerate(attentions)
        )
        self._warm_up_layers = list(self.layers)
        self.norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps, build)
        self.head = LMHead(self.embedding, build, tied=config.tie_word_embeddings)

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        lanes = plan_streams(self.shared_expert, self.lanes, ctx.flags, token_ids.shape[0])
        hidden: Tensor | ExpertRows = self.embedding(token_ids)
        residual: Tensor | None = None
        for layer in self._warm_up_layers if ctx.flags.phase == "warm-up" else self.layers:
            hidden, residual = layer(hidden, residual, positions, ctx, lanes)
        assert residual is not None
        normed: Tensor = self.norm.add(hidden, residual)[0]
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits

    def destinations(self) -> Iterator[Destination]:
        for module in self.modules():
            declare = getattr(module, "destinations", None)
            if declare is not None and module is not self:
                yield from declare()

    def ignored(self, name: str) -> str | None:
        if name.endswith(".rotary_emb.inv_freq"):
            return "rotary frequencies are computed from the config"
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= self.config.num_layers and self.config.num_nextn_predict_layers > 0:
            return "a multi-token prediction layer, which is not used"
        if layer and int(layer[1]) < self.config.num_layers:
            mlp = self.layers[int(layer[1])].mlp
            return mlp.experts.ignored(name) if isinstance(mlp, MixtureOfExperts) else None
        if name == HEAD and self.config.tie_word_embeddings:
            return "the head is tied to the embedding"
        return None

    def expert_load(self) -> dict[int, list[int]]:
        """Layer to the (token, expert) pairs that this rank has computed for each of the model's experts so far; empty on a GPU
        that has all experts. Waits for the device."""
        sparse = {index: layer.mlp for index, layer in enumerate(self.layers) if isinstance(layer.mlp, MixtureOfExperts)}
        loads = {index: mlp.experts.expert_load() for index, mlp in sparse.items()}
        return {index: load for index, load in loads.items() if load is not None}

    def finish_load(self) -> None:
        for module in [*self.modules()]:
            if isinstance(module, (MultiHeadLatentAttention, MixtureOfExperts)):
                module.finish_load()
        self._warm_up_layers = _two_of_each_kind(self.layers)


def _two_of_each_kind(layers: nn.ModuleList) -> list[nn.Module]:
    """Layers enough for every kernel of the model to compile and every library to settle: others have the same parameters."""
    chosen: dict[tuple[object, ...], list[nn.Module]] = {}
    for layer in layers:
        kind = tuple((name, value.shape, value.dtype) for name, value in layer.named_parameters())
        chosen.setdefault(kind, []).append(layer)
    few = {id(layer) for same in chosen.values() for layer in same[:2]}
    return [layer for layer in layers if id(layer) in few]
