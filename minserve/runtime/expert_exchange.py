"""How a rank's tokens reach the experts of other ranks: what was asked for and what the model and the machine allow, made one.

Builds the dispatcher and its buffers, once and before any capture. Knows no step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch

from minserve.config import Config
from minserve.errors import EnvironmentFault, UsageError
from minserve.kernels import deep_ep_limits
from minserve.kernels.deep_ep_limits import Abilities
from minserve.models.decoder import Decoder
from minserve.models.formats import BLOCK
from minserve.models.layers.dispatcher import DeepEPDispatcher, Rehearsal, TorchDispatcher
from minserve.models.layers.moe import MixtureOfExperts
from minserve.models.layers.placement import ExpertPlacement, read_loads
from minserve.models.model_config import ModelConfig
from minserve.runtime.parallel import Group
from minserve.seat import Seat

log = logging.getLogger("minserve.runtime")

Placed = tuple[ExpertPlacement, Mapping[int, ExpertPlacement]]
"""Where experts lie in most layers, and by layer where a measured load says so."""


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """A group's way of moving tokens."""

    name: str
    placement: ExpertPlacement
    """Of layers that `placements` does not name; all have as many slots."""
    dispatcher: DeepEPDispatcher | TorchDispatcher
    captured: bool
    """Whether decode steps that use it can be captured."""
    low_latency_rows: int | None
    """Steps in which no rank has more tokens go through low-latency mode, where each rank may replay a graph of its own size;
    None: all ranks replay the same size."""
    only_low_latency: bool = False
    """No step may have more tokens than that."""
    placements: Mapping[int, ExpertPlacement] = dataclasses.field(default_factory=dict)
    """By layer."""

    def adjusted(self, config: Config) -> Config:
        """The settings as far as this way of moving tokens can follow them."""
        if self.low_latency_rows is not None and self.only_low_latency:
            config = msgspec.structs.replace(config, chunked_prefill_size=min(config.chunked_prefill_size, self.low_latency_rows))
        return config if self.captured else msgspec.structs.replace(config, enforce_eager=True)

    def settle(self, model: Decoder) -> None:
        """Once the model is built: rows travel as FP8 where all experts take them."""
        experts = [layer.experts for layer in _moe_layers(model)]
        whole = isinstance(self.dispatcher, TorchDispatcher) or (
            self.dispatcher.capacity * self.placement.num_ranks % deep_ep_limits.ROW_BLOCK == 0
        )
        if whole and all(layer.kept == "fp8_block" for layer in experts) and model.config.hidden_size % BLOCK == 0:
            self.dispatcher.quantize = experts[0].kernels.quantize_rows

    @contextlib.contextmanager
    def rehearsal(self, model: Decoder) -> Iterator[None]:
        """Inside, steps run without any exchange. Kernels compile there: a rank that has more to compile than another would
        otherwise make it wait in a collective, longer than such a wait may be."""
        stand_in = Rehearsal(self.placement.num_ranks, self.placement.slots_per_rank, self.dispatcher)
        for layer in _moe_layers(model):
            layer.dispatcher = stand_in
        try:
            yield
        finally:
            for layer in _moe_layers(model):
                layer.dispatcher = self.dispatcher


def _moe_layers(model: Decoder) -> list[MixtureOfExperts]:
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, MixtureOfExperts)]


def place(config: Config, num_experts: int, seat: Seat) -> Placed:
    """Raises UsageError."""
    spread = functools.partial(ExpertPlacement.spread, num_experts, seat.num_ranks, seat.rank, config.redundant_experts)
    loads = {} if config.expert_load is None else read_loads(Path(config.expert_load).expanduser(), num_experts)
    return spread(), {layer: spread(load) for layer, load in loads.items()}


def digest(placement: ExpertPlacement, placements: Mapping[int, ExpertPlacement]) -> str:
    """The same on two ranks only if they place all experts alike."""
    placed = [placement.expert_of_slot, *((layer, of.expert_of_slot) for layer, of in sorted(placements.items()))]
    return hashlib.sha256(repr(placed).encode()).hexdigest()[:16]


def connect(
    config: Config,
    model_config: ModelConfig,
    placed: Placed,
    stack: str,
    device: torch.device,
    group: Group,
) -> Exchange:
    """All ranks come here at once. Raises UsageError for what was asked for and cannot be, EnvironmentFault."""
    assert group.collectives is not None and model_config.moe is not None
    seat = group.seat
    placement, placements = placed
    if stack == "hopper-ep":
        able = deep_ep_limits.abilities(
            model_config.hidden_size, model_config.moe.router.top_k, seat.num_ranks, seat.ranks_per_host
        )
        for verdict in able.verdicts:
            log.info("DeepEP: %s", verdict)
        mode = _mode(config, able)
        if mode is not None:
            return _deep_ep(config, model_config, placed, group, able, mode)
    elif config.deepep_mode != "auto":
        raise UsageError(f"--deepep-mode {config.deepep_mode}: DeepEP is not used here (stack {stack})")
    through, library = None, "NCCL" if device.type == "cuda" else "gloo"
    if device.type == "cuda" and seat.ranks_per_host > torch.cuda.device_count():
        log.warning("ranks share a GPU, which NCCL refuses: tokens travel through the host, and no step is captured")
        through, library = torch.device("cpu"), "gloo, through the host"
    dispatcher = TorchDispatcher(group.collectives, placement.slots_per_rank, through=through)
    name, captured = f"torch.distributed ({library})", through is None
    return Exchange(name, placement, dispatcher, captured=captured, low_latency_rows=None, placements=placements)


def _mode(config: Config, able: Abilities) -> str | None:
    """The mode of DeepEP that will be used, "auto" for both; None: not DeepEP. Raises UsageError."""
    has = {"normal": able.normal, "low_latency": able.low_latency_width is not None}
    if config.deepep_mode != "auto":
        if not has[config.deepep_mode]:
            raise UsageError(f"--deepep-mode {config.deepep_mode}: " + "; ".join(able.verdicts))
        return config.deepep_mode
    if all(has.values()):
        return "auto"
    if has["low_latency"]:
        return "low_latency"
    if config.moe_dispatcher == "deepep":
        raise UsageError("--moe-dispatcher deepep: " + "; ".join(able.verdicts) + "; use torch, or --deepep-mode normal")
    log.warning("DeepEP has no low-latency mode for this model: tokens travel through NCCL")
    return None


def _deep_ep(config: Config, model_config: ModelConfig, placed: Placed, group: Group, able: Abilities, mode: str) -> Exchange:
    from minserve.kernels.deep_ep_buffer import DeepEPBuffer

    assert group.collectives is not None
    placement, placements = placed
    capacity = deep_ep_limits.capacity(config.max_num_seqs, group.sharers)
    num_slots = placement.slots_per_rank * placement.num_ranks
    if group.sharers > 1 and max(config.max_num_seqs, num_slots) > capacity:
        raise UsageError(
            f"{group.sharers} ranks on one GPU would wait for each other for ever: DeepEP's kernels have to fit it together, and "
            f"do with up to {capacity} experts (here {num_slots}) and --max-num-seqs {capacity} (here {config.max_num_seqs})"
        )
    try:
        buffer = DeepEPBuffer(
            group.collectives,
            hidden_size=model_config.hidden_size,
            width=able.low_latency_width if mode != "normal" else None,
            num_slots=num_slots,
            capacity=capacity,
            normal=mode != "low_latency",
        )
    except (RuntimeError, AssertionError) as error:
        raise EnvironmentFault(f"DeepEP's buffers could not be made: {error}; --moe-dispatcher torch does without") from error
    rows = 0 if mode == "normal" else capacity
    log.info("DeepEP: mode %s, up to %d tokens a rank go through low-latency mode", mode, rows)
    return Exchange(
        f"DeepEP ({mode.replace('_', '-')})",
        placement,
        DeepEPDispatcher(buffer, placement.num_ranks, rows),
        captured=mode != "normal",
        low_latency_rows=rows,
        only_low_latency=mode == "low_latency",
        placements=placements,
    )
