"""Which plan runs the shared expert: asked for, or the fastest here, from one layer of the model's shape timed in each.

Knows plans, batch sizes and clocks. The timed layer's weights are random: time depends on shapes, formats and kernels alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import statistics
import typing
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import minserve.kernels
from minserve.capture_flags import CaptureFlags
from minserve.errors import ServerError, UsageError
from minserve.kernels.interface import AttentionMetadata, Kernels
from minserve.models.formats import Formats
from minserve.models.forward_context import ForwardContext
from minserve.models.layers.moe import MixtureOfExperts
from minserve.models.layers.streams import CudaLanes, Lanes, SharedExpertPolicy, plan_streams
from minserve.models.model_config import ModelConfig
from minserve.models.registry import build_model
from minserve.remembered import Remembered
from minserve.runtime.cuda_graph import CudaRecorder, StepGraphs

BATCHES = (1, 8, 32)
"""Tokens of the timed steps: one, where launches cost most, and on to as many as read most experts."""
GAIN = 0.01
"""A plan that is not simpler must be faster by this share; less is noise."""
_REPLAYS = 20
_REPEATS = 3

log = logging.getLogger("minserve.runtime")

Times = dict[SharedExpertPolicy, dict[int, float]]
"""Plan to batch size to microseconds a layer; the simplest plan first."""


@dataclasses.dataclass(frozen=True, slots=True)
class SharedExpertPlan:
    """What was chosen, and why."""

    policy: SharedExpertPolicy
    reason: str

    def lanes(self, device: torch.device) -> Lanes | None:
        return CudaLanes(device) if self.policy == "overlap" else None


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What a plan's speed depends on."""

    config: ModelConfig
    formats: Formats
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device

    def layer(self, policy: SharedExpertPolicy) -> MixtureOfExperts:
        """The first layer with experts, without memory. Raises UsageError where it cannot be built so."""
        moe = self.config.moe
        assert moe is not None
        index = moe.sparse_layers.index(True)
        first = dataclasses.replace(moe, sparse_layers=moe.sparse_layers[: index + 1])
        config = dataclasses.replace(self.config, num_layers=index + 1, moe=first)
        meta = torch.device("meta")
        model = build_model(config, self.formats, self.kernels, self.dtype, meta, shared_expert=policy)
        layer = model.layers[index].mlp
        assert isinstance(layer, MixtureOfExperts)
        return layer

    def key(self) -> list[str]:
        """All that the measured times hang on, the kernels' sources included."""
        layer = self.layer("serial")
        parameters = [f"{name} {list(value.shape)} {value.dtype}" for name, value in layer.named_parameters()]
        folder = Path(minserve.kernels.__path__[0])
        sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        gpu = torch.cuda.get_device_properties(self.device)
        where = [self.kernels.name, gpu.name, str(gpu.multi_processor_count), torch.__version__]
        return [*where, hashlib.sha256(sources).hexdigest(), str(layer.router.config), *parameters]


def choose(
    asked: typing.Literal["auto", "fused", "overlap", "serial"],
    shape: Shape,
    *,
    captured: bool,
    spread: bool,
    remembered: Remembered,
    on_measure: Callable[[], None] = lambda: None,
) -> SharedExpertPlan:
    """`captured`: decode steps are; `spread`: the routed experts lie on several ranks; `on_measure` is called before the
    plans are timed, which takes seconds.

    Eager steps are bound by the host, so the alt stream is for captured ones alone. Where experts are spread it hides what
    the network takes, which one layer here cannot show.
    """
    if shape.config.moe is None or not shape.config.moe.shared_intermediate_size:
        return SharedExpertPlan("serial", "there is none")
    if asked == "fused":
        return SharedExpertPlan("fused", "asked for")
    if not captured:
        return SharedExpertPlan("serial", "steps are eager")
    if asked != "auto":
        return SharedExpertPlan(asked, "asked for")
    if spread:
        return SharedExpertPlan("overlap", "it hides the exchange between ranks")
    key = shape.key()
    times = _from_json(remembered.recall("shared-expert", key))
    source = "measured by an earlier start"
    if times is None:
        on_measure()
        try:
            times = measure(shape)
        except (ServerError, torch.OutOfMemoryError) as error:
            return SharedExpertPlan("overlap", f"could not be measured: {error}")
        remembered.keep("shared-expert", key, times)
        source = "measured"
    return SharedExpertPlan(fastest(times), f"{source}, us a layer at batch {_sentence(times)}")


def fastest(times: Times) -> SharedExpertPolicy:
    """By the geometric mean over the batch sizes; of plans that are as good as equal the simplest, which comes first."""
    means = {policy: math.exp(statistics.fmean(map(math.log, by_batch.values()))) for policy, by_batch in times.items()}
    best = next(iter(means))
    for policy, mean in means.items():
        if mean < means[best] * (1.0 - GAIN):
            best = policy
    return best


def measure(shape: Shape) -> Times:
    """Times of every plan that this model can have. Raises DoesNotFit or EnvironmentFault where a layer cannot be captured."""
    times: Times = {"serial": {}, "overlap": {}}
    plain = _filled(shape.layer("serial"), shape.device)
    lanes = CudaLanes(shape.device)
    for policy in times:
        times[policy] = _times(plain, shape, policy, lanes)
    del plain
    try:
        fused = shape.layer("fused")
    except UsageError as error:
        log.info("%s", error)
        return times
    return times | {"fused": _times(_filled(fused, shape.device), shape, "fused", lanes)}


def _filled(layer: MixtureOfExperts, device: torch.device) -> MixtureOfExperts:
    """With memory and random weights."""
    layer = layer.to_empty(device=device)
    with torch.inference_mode():
        for parameter in layer.parameters():
            if parameter.dtype == torch.float8_e4m3fn:
                parameter.view(torch.uint8).random_(0, 0x7F)  # 0x7f is NaN
            elif parameter.is_floating_point():
                parameter.normal_(0.0, 0.02)
            else:
                parameter.random_()
    layer.finish_load()
    return layer


def _times(layer: nn.Module, shape: Shape, policy: SharedExpertPolicy, lanes: Lanes) -> dict[int, float]:
    device = shape.device
    inputs: list[Tensor] = []  # the graphs read them where they lie

    def prepare(size: int) -> Callable[[CaptureFlags], Tensor]:
        hidden = torch.randn(size, shape.config.hidden_size, dtype=shape.dtype, device=device)
        num_tokens = torch.tensor([size], dtype=torch.int32, device=device)
        gain = torch.ones_like(hidden[0])
        inputs.extend((hidden, num_tokens, gain))
        no_attention = typing.cast(AttentionMetadata, None)  # the MoE body reads nothing of it

        @torch.inference_mode()
        def work(flags: CaptureFlags) -> Tensor:
            context = ForwardContext(no_attention, None, [], num_tokens, flags=flags)
            output = layer(hidden, context, plan_streams(policy, lanes, flags, size))
            return shape.kernels.add_rms_norm(output, hidden, gain, 1e-6)[0]  # it may be what sums the experts' rows

        return work

    graphs = StepGraphs(prepare, BATCHES, CudaRecorder(device))
    graphs.capture()
    times = {size: _microseconds(lambda: graphs.replay(size), device) for size in BATCHES}  # noqa: B023
    graphs.destroy()
    return times


def _microseconds(run: Callable[[], object], device: torch.device) -> float:
    repeats = []
    for _ in range(1 + _REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_REPLAYS):
            run()
        end.record()
        torch.cuda.synchronize(device)
        repeats.append(float(begin.elapsed_time(end)) * 1e3 / _REPLAYS)
    return round(statistics.median(repeats[1:]), 2)


def _from_json(kept: object) -> Times | None:
    """JSON's keys are strings."""
    if not isinstance(kept, dict):
        return None
    return {policy: {int(size): float(time) for size, time in by_batch.items()} for policy, by_batch in kept.items()}


def _sentence(times: Times) -> str:
    parts = (f"{policy} {_listed([f'{time:.1f}' for time in by_batch.values()])}" for policy, by_batch in times.items())
    return f"{_listed([str(size) for size in BATCHES])}: {', '.join(parts)}"


def _listed(words: list[str]) -> str:
    return f"{' '.join(words[:-1])} and {words[-1]}"
