"""Puts one engine's parts together from a Config: device, kernels, model, weights, KV cache, scheduler, runner.

Resolves what the config left open, once, into the values that are logged and shown. Knows no sockets and no loop.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from minserve.config import Config, flag_name, kernel_cache_directory, model_directory, printable
from minserve.errors import DoesNotFit, EnvironmentFault
from minserve.kernels import stacks
from minserve.kernels.interface import Kernels
from minserve.models.checkpoint import read_quantization_config
from minserve.models.decoder import Decoder
from minserve.models.formats import Formats
from minserve.models.load_report import LoadReport, gigabytes
from minserve.models.model import Model
from minserve.models.model_config import ModelConfig
from minserve.models.registry import build_model, load_model_config
from minserve.models.weights import dummy_weights, formats_from_config, load_weights, open_checkpoint
from minserve.remembered import Remembered
from minserve.runtime import captured_steps, device_memory, expert_exchange, kv_cache, parallel, proof, shared_expert
from minserve.runtime.cuda_graph import CudaRecorder, capture_sizes, mixed_sizes
from minserve.runtime.expert_exchange import Exchange
from minserve.runtime.first_uses import FirstUses
from minserve.runtime.kv_cache import KVPlan
from minserve.runtime.model_runner import ModelRunner
from minserve.runtime.parallel import Group
from minserve.runtime.scheduler import Limits, Scheduler
from minserve.runtime.shared_expert import Shape, SharedExpertPlan
from minserve.runtime.startup import Timeline

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

CPU_STEP_TOKENS = 2048
"""Most tokens of a step on a CPU, where they take a second and nothing else is heard meanwhile."""
PREFILL_FLOOR_SECONDS = 0.08
"""On a GPU a step that reads prompts may always take so long: any prompt token reads nearly all experts, which alone is several
times what few decode rows take."""

log = logging.getLogger("minserve.runtime")


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """Where and with what the model computes."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kernels: Kernels
    stack_reason: str

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """An engine, ready to run."""

    model: Decoder
    scheduler: Scheduler
    runner: ModelRunner
    info: dict[str, Any]
    """For /server_info: what was resolved, in plain values."""


def assemble(
    config: Config,
    timeline: Timeline,
    group: Group | None = None,
    while_device_works: Callable[[int], object] = lambda _: None,
) -> Parts:
    """The parts of one rank of `group`. Raises ServerError: a sentence and an exit code for what cannot be.

    `while_device_works` is called with the vocabulary's size, perhaps, and several times: the host has nothing to do then.
    """
    timeline.begin("config")
    group = group or parallel.alone()
    directory = model_directory(config)
    model_config = load_model_config(directory)
    timeline.begin("stack")
    uses = FirstUses()
    backend = choose_backend(config, model_config, uses, whole_gpu=group.sharers == 1)
    if backend.on_gpu:
        gc.freeze()  # what the libraries are made of stays, and captures collect what does not
    if backend.device.type == "cpu":
        config = msgspec.structs.replace(config, chunked_prefill_size=min(config.chunked_prefill_size, CPU_STEP_TOKENS))
    prove_same_model(config, model_config, backend, group)
    if group.seat.num_ranks > 1:
        uses.wait()  # nothing shall load while the ranks' first kernels wait for each other
    exchange = connect(config, model_config, backend, group)
    config = config if exchange is None else exchange.adjusted(config)
    model, report, plan = load(config, directory, model_config, backend, timeline, exchange, uses)

    timeline.begin("kv cache")
    uses.wait()
    mixed = mixed_graph_sizes(config, backend.device, exchange)
    if exchange is not None and backend.on_gpu:
        with exchange.rehearsal(model):
            _own_cache(config, model, backend, mixed, group)
    group.wait_for_all("compiled")  # the first exchange of tokens must not wait for a rank that still reads or compiles
    size = _plan_cache(config, model, backend, mixed, group)
    cache = kv_cache.allocate(size, model.attention_shape, model.num_layers, backend.kv_dtype, backend.device)
    limits = Limits.of(config, model_config.vocab_size, size.num_pages, size.max_model_len)
    floor = PREFILL_FLOOR_SECONDS if backend.on_gpu else 0.0
    limits = msgspec.structs.replace(limits, prefill_floor_seconds=floor, mixed_sizes=mixed)
    with kv_cache.refusal_of_memory("the sampler's and the batch's buffers"):
        runner = ModelRunner(model, backend.kernels, cache, limits, backend.device)
    runner.low_latency_rows = None if exchange is None else exchange.low_latency_rows
    graphs = capture(config, runner, timeline)
    meanwhile = functools.partial(while_device_works, model_config.vocab_size)
    checked = proof.prove(config, model, runner, backend.kv_dtype, timeline, group, meanwhile)
    captured_steps.rehearse(runner)
    info = _describe(config, model, backend, size, report, plan, group, exchange) | graphs | {"self_check": checked}
    info["effective"]["self check"] = checked["verdict"]
    info["memory_forecast"] = predicted_against_measured(config, model, backend, size, report)
    log.info("serving with:\n%s", "\n".join(f"  {name:<18} {value}" for name, value in info["effective"].items()))
    return Parts(model, Scheduler(limits), runner, info)


def choose_backend(
    config: Config, model_config: ModelConfig, uses: FirstUses | None = None, *, whole_gpu: bool = True
) -> Backend:
    """Starts `uses` beside the stack's imports. Raises EnvironmentFault for a device that is not there, and what the choice of a
    stack raises."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFault("--device cuda: torch finds no CUDA device here; use --device cpu")
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dispatcher = config.moe_dispatcher if config.ep_size > 1 and model_config.moe is not None else "local"
    stack = "deterministic" if config.deterministic else config.stack
    natural = DTYPES[model_config.dtype] if on_gpu else torch.float32  # a CPU is slow at 16 bits and exact at 32
    dtype = natural if config.dtype == "auto" else DTYPES[config.dtype]
    if uses is not None:
        uses.start(device, dtype, model_config.vocab_size)
    choice, kernels = stacks.open_stack(stack, device, _remembered(config), dispatcher, whole_gpu=whole_gpu)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else DTYPES[config.kv_cache_dtype]
    return Backend(device, dtype, kv_dtype, kernels, choice.reason)


def _remembered(config: Config) -> Remembered:
    return Remembered(kernel_cache_directory(config) / "remembered")


_EQUAL_SETTINGS = ("max_num_seqs", "chunked_prefill_size", "max_model_len", "cuda_graph_bs", "enforce_eager", "self_check")
"""They decide which steps the ranks run at start; all have to run the same."""


def prove_same_model(config: Config, model_config: ModelConfig, backend: Backend, group: Group) -> None:
    """Raises UsageError when the ranks of the group were given different models or settings that make them step differently."""
    if group.seat.num_ranks == 1:
        return
    raw = json.dumps(model_config.raw, sort_keys=True).encode()
    facts = {"config.json": hashlib.sha256(raw).hexdigest()[:16], "compute type": str(backend.dtype)}
    facts |= {flag_name(name): str(getattr(config, name)) for name in (*_EQUAL_SETTINGS, "deepep_mode")}
    if model_config.moe is not None:
        placed = expert_exchange.place(config, model_config.moe.num_experts, group.seat)
        facts["slots of experts (--redundant-experts, --expert-load)"] = expert_exchange.digest(*placed)
    group.prove_equal(facts | {"--stack": backend.kernels.name})


def connect(config: Config, model_config: ModelConfig, backend: Backend, group: Group) -> Exchange | None:
    """How this rank reaches the other ranks' experts; None where it has all. Raises UsageError for a number of ranks that the
    experts cannot be spread over, and what `expert_exchange.connect` raises."""
    if model_config.moe is None or group.collectives is None:
        return None
    placed = expert_exchange.place(config, model_config.moe.num_experts, group.seat)
    return expert_exchange.connect(config, model_config, placed, backend.kernels.name, backend.device, group)


def graph_sizes(config: Config, device: torch.device) -> tuple[int, ...]:
    """The batch sizes that will be captured; none without graphs."""
    if device.type != "cuda" or config.enforce_eager:
        return ()
    return capture_sizes(config.max_num_seqs, config.cuda_graph_bs)


def capture(config: Config, runner: ModelRunner, timeline: Timeline) -> dict[str, Any]:
    """Capture all steps and hand them to the runner; for /server_info: sizes and memory of those of decode rows."""
    sizes = graph_sizes(config, runner.device)
    if not sizes:
        if config.enforce_eager:
            runner.eager_reason = "--enforce-eager"
        return {"captured_batch_sizes": [], "captured_step_tokens": [], "graph_memory_bytes": {}}
    timeline.begin("graphs")
    captured_steps.capture(runner, CudaRecorder(runner.device), sizes, runner.limits.mixed_sizes, timeline.progress)
    assert runner.graphs is not None
    memory = {str(batch): runner.graphs.memory_bytes[batch] for batch in sizes}
    made = {"mixed graphs": runner.mixed_graphs, "decode graphs": runner.graphs, "sampling graphs": runner.sampling_graphs}
    for what, of in made.items():
        if of is not None:
            parts = ", ".join(f"{size}: {gigabytes(of.memory_bytes[size])}" for size in of.sizes)
            log.info("%s take %s (the largest captured first: %s)", what, gigabytes(sum(of.memory_bytes.values())), parts)
    captured = {"captured_batch_sizes": list(sizes), "captured_step_tokens": list(runner.limits.mixed_sizes)}
    return captured | {"graph_memory_bytes": memory}


def load(
    config: Config,
    directory: Path,
    model_config: ModelConfig,
    backend: Backend,
    timeline: Timeline,
    exchange: Exchange | None = None,
    uses: FirstUses | None = None,
) -> tuple[Decoder, LoadReport, SharedExpertPlan]:
    """The model with its weights, of the checkpoint or random ones; of the experts only those that the exchange places here."""

    def before_measure() -> None:
        timeline.begin("shared expert")
        if uses is not None:
            uses.wait()

    timeline.begin("checkpoint")
    dummy = config.load_format == "dummy"
    checkpoint = None if dummy else open_checkpoint(directory)
    formats = formats_from_config(read_quantization_config(directory)) if checkpoint is None else checkpoint.formats
    plan = shared_expert.choose(
        config.shared_expert,
        Shape(model_config, formats, backend.kernels, backend.dtype, backend.device),
        captured=bool(graph_sizes(config, backend.device)),
        spread=exchange is not None,
        remembered=_remembered(config),
        on_measure=before_measure,
    )
    timeline.begin("build")
    with kv_cache.refusal_of_memory(_weights_title(formats, backend.kernels)):
        model = build_model(
            model_config,
            formats,
            backend.kernels,
            backend.dtype,
            backend.device,
            dispatcher=None if exchange is None else exchange.dispatcher,
            placement=None if exchange is None else exchange.placement,
            placements=None if exchange is None else exchange.placements,
            shared_expert=plan.policy,
            lanes=plan.lanes(backend.device),
        )
    if exchange is not None:
        exchange.settle(model)
    timeline.begin("load")
    with kv_cache.refusal_of_memory("weights on their way to their places"):
        report = dummy_weights(model, config.seed) if checkpoint is None else load_weights(model, checkpoint, _rate(timeline))
    with kv_cache.refusal_of_memory("the weights' final layout"):
        model.finish_load()
    log.info("weights proven\n%s", report)
    return model, report, plan


def predicted_against_measured(
    config: Config, model: Decoder, backend: Backend, size: KVPlan, report: LoadReport
) -> dict[str, dict[str, float]]:
    """Logs what `minserve plan` would have said beside what the start found; for /server_info."""
    device_bytes = torch.cuda.mem_get_info(backend.device)[1] if backend.on_gpu else 0
    plan = device_memory.forecast(config, model.config, backend.kernels, backend.dtype, device_bytes)
    rows = device_memory.compare(plan, report, size, on_gpu=backend.on_gpu)
    log.info("memory as planned: %s", device_memory.sentence(rows))
    return rows


def _weights_title(formats: Formats, kernels: Kernels) -> str:
    """The model's weights as they are called when memory is refused."""
    widened = not kernels.keeps_int4 and "int4_group" in formats.quantized.values()
    return "the model's weights" + (f" (the {kernels.name} stack cannot read INT4, so they are widened)" if widened else "")


def _rate(timeline: Timeline) -> Callable[[int, int], None]:
    """Tells the timeline how much of the load is done and how fast it went so far."""
    began = time.monotonic()

    def tell(done: int, total: int) -> None:
        speed = done / 1e9 / max(1e-6, time.monotonic() - began)
        timeline.progress(done / max(1, total), f"{done / 1e9:.1f} of {total / 1e9:.1f} GB, {speed:.2f} GB/s")

    return tell


def mixed_graph_sizes(config: Config, device: torch.device, exchange: Exchange | None) -> tuple[int, ...]:
    """Tokens of the mixed steps that will be captured. Of ranks that share experts those that may be captured whatever the others
    do: none where all have to replay one size."""
    most = max(config.chunked_prefill_size, config.max_num_seqs)
    if exchange is not None:
        most = min(most, exchange.low_latency_rows or 0)
    return mixed_sizes(most) if graph_sizes(config, device) and most else ()


def _plan_cache(config: Config, model: Model, backend: Backend, mixed: Sequence[int], group: Group) -> KVPlan:
    """As many pages as the rank with the least memory has: the ranks' self-checks take the same steps."""
    size = _own_cache(config, model, backend, mixed, group)
    pages = group.least("pages", size.num_pages)
    if pages == size.num_pages:
        return size
    longest = min(size.max_model_len, pages * size.page_size)
    return msgspec.structs.replace(size, num_pages=pages, max_model_len=longest, limited_by="another rank's memory")


def _own_cache(config: Config, model: Model, backend: Backend, mixed: Sequence[int], group: Group) -> KVPlan:
    if backend.on_gpu:
        sizes = graph_sizes(config, backend.device)
        memory = device_memory.left_for_cache(config, model, backend.kernels, backend.kv_dtype, backend.device, sizes, mixed)
        memory //= group.sharers  # ranks that share a GPU see each other's memory, and take equal parts of what is left
        name = f"--gpu-memory-utilization {config.gpu_memory_utilization}"
    else:
        memory, name = _host_memory(config, group.seat.ranks_per_host)
    per_page = kv_cache.page_bytes(model.attention_shape, model.num_layers, config.page_size, backend.kv_dtype)
    longest = model.config.max_position_embeddings
    return kv_cache.plan(config, bytes_per_page=per_page, memory_bytes=memory, memory_name=name, max_positions=longest)


def _host_memory(config: Config, ranks_per_host: int) -> tuple[int, str]:
    """What a rank's cache may take on a CPU, and what to call it."""
    available, wanted = kv_cache.host_memory_available() // ranks_per_host, config.cpu_kv_cache_bytes
    if config.num_pages is not None:
        return available, "this machine's free memory"
    if wanted <= available:
        return wanted, "--cpu-kv-cache-bytes"
    if wanted == Config().cpu_kv_cache_bytes:  # nobody asked for that much
        return available // 2, "half of this machine's free memory"
    raise DoesNotFit(f"--cpu-kv-cache-bytes {wanted}: this machine has {available} bytes of free memory")


def _describe(
    config: Config,
    model: Decoder,
    backend: Backend,
    size: KVPlan,
    report: LoadReport,
    plan: SharedExpertPlan,
    group: Group,
    exchange: Exchange | None,
) -> dict[str, Any]:
    name = torch.cuda.get_device_name(backend.device) if backend.on_gpu else "CPU"
    cache = f"{size.num_pages} pages of {size.page_size} tokens, {gigabytes(size.num_bytes)} (by {size.limited_by})"
    return {
        "config": printable(config),
        "effective": {
            "architecture": model.config.architecture,
            "device": f"{backend.device} ({name}, torch {torch.__version__})",
            "stack": f"{backend.kernels.name} ({backend.stack_reason})",
            "dtype": str(backend.dtype).removeprefix("torch."),
            "kv cache dtype": str(backend.kv_dtype).removeprefix("torch."),
            "kv cache": cache,
            "max model len": size.max_model_len,
            "max num seqs": config.max_num_seqs,
            "chunked prefill": config.chunked_prefill_size,
            "prefix cache": "on" if config.enable_prefix_caching else "off",
            "decode graphs": " ".join(map(str, graph_sizes(config, backend.device))) or "none",
            "shared expert": f"{plan.policy} ({plan.reason})",
            "rank": f"{group.seat.rank} of {group.seat.num_ranks}",
            "experts": _experts_sentence(model.config, exchange),
        },
        "memory": {
            "weights_bytes": report.bytes_written,
            "read_bytes": report.bytes_read,
            "kv_cache_bytes": size.num_bytes,
            "kv_page_bytes": size.page_bytes,
            "kv_pages": size.num_pages,
        },
        "load_report": str(report),
        "pid": os.getpid(),
    }


def _experts_sentence(model_config: ModelConfig, exchange: Exchange | None) -> str:
    if model_config.moe is None:
        return "none"
    total = model_config.moe.num_experts
    if exchange is None:
        return f"all {total} here"
    placement = exchange.placement
    here = placement.local_experts
    names = f"{here[0]} to {here[-1]}" if placement.is_identity else f"{len(here)} slots, placed for balance,"
    return f"{names} of {total} here; tokens travel through {exchange.name}"
