"""`minserve bench step`: the time of one decode step at a fixed batch and context, with random weights, on the engine's runner.

Runs as a process of its own: `python -m minserve.runtime.bench_step --help`. Knows no HTTP, scheduler or prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from torch import Tensor

from minserve import roofline
from minserve.config import Config
from minserve.errors import ServerError, UsageError
from minserve.kernels.interface import kv_page_shape
from minserve.models.decoder import Decoder
from minserve.models.layers.router import Router
from minserve.models.layers.streams import CudaLanes, SharedExpertPolicy
from minserve.models.registry import load_model_config
from minserve.request import SamplingParams
from minserve.runtime import assembly, captured_steps, kv_cache, parallel
from minserve.runtime.assembly import Backend
from minserve.runtime.cuda_graph import CudaRecorder, StepGraphs
from minserve.runtime.model_runner import InFlight, ModelRunner, Sampled
from minserve.runtime.parallel import Group
from minserve.runtime.scheduler import Limits
from minserve.runtime.startup import Timeline
from minserve.runtime.step import ScheduledRow, ScheduledStep, SlotSetup
from minserve.runtime.trace_step import KeepingRecorder, draw, edge_table, table, titled, trace
from minserve.seat import own_seat

WARM_STEPS = 5
REPEATS = 3
_OF_LAUNCH = ("device", "dtype", "stack", "ep_size", "moe_dispatcher", "redundant_experts", "expert_load")
GPU = roofline.H200
"""Whose measured ceilings the floor stands for."""

log = logging.getLogger("minserve.runtime")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print. The last line of the output is JSON."""
    options = _parse(arguments)
    seat = own_seat()
    if options.ep_size != seat.num_ranks:
        return parallel.spawn(["-P", "-m", "minserve.runtime.bench_step", *(arguments or sys.argv[1:])], options.ep_size)
    level = "INFO" if options.verbose and seat.rank == 0 else "WARNING"
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        report = _bench(options)
    except ServerError as error:
        sys.stderr.write(f"minserve: error: {error}\n")
        return error.exit_code
    _show(report)
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="minserve bench step", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="folder with a config.json, such as configs/shapes/qwen3-30b-a3b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128], help="requests in the step")
    parser.add_argument("--context", type=int, default=1024, help="tokens in each request's cache")
    parser.add_argument("--layers", type=int, help="only so many layers, where the whole model does not fit")
    parser.add_argument("--steps", type=int, default=30, help="steps of one repeat")
    parser.add_argument("--stack", default="auto", help="kernel stack")
    parser.add_argument("--modes", nargs="+", choices=["eager", "graph"], default=["graph", "eager"])
    parser.add_argument(
        "--shared-expert", nargs="+", choices=["serial", "overlap", "fused"], default=["overlap"], help="of graphs"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="list each batch's kernels, and draw a layer into a folder")
    parser.add_argument("--verbose", action="store_true", help="tell each row as it is measured")
    parser.add_argument("--ep-size", type=int, default=1, help="ranks that share the experts, each with the whole batch")
    parser.add_argument("--moe-dispatcher", default="auto", choices=["auto", "deepep", "torch"])
    parser.add_argument("--skew", type=float, default=0.0, help="how much the correction bias favours the first experts")
    parser.add_argument("--redundant-experts", type=int, default=0, help="copies of the experts with the most tokens")
    parser.add_argument("--expert-load", metavar="FILE", help="places experts by the load that --record-load kept")
    parser.add_argument("--record-load", type=Path, metavar="FILE", help="keep the tokens of each expert")
    options = parser.parse_args(arguments)
    if "fused" in options.shared_expert and len(options.shared_expert) > 1:
        parser.error("--shared-expert fused lays the weights out otherwise: measure it in a run of its own")
    return options


def _bench(options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        directory = _with_layers(Path(options.model), options.layers, Path(folder))
        config = Config(
            model=str(directory),
            load_format="dummy",
            max_num_seqs=max(options.batch),
            shared_expert="fused" if options.shared_expert == ["fused"] else "serial",  # which may be overlapped at any time
            **{name: getattr(options, name) for name in _OF_LAUNCH},
        )
        group = parallel.join(own_seat(), config.watchdog_timeout, on_gpus=options.device != "cpu")
        model_config = load_model_config(directory)
        if options.context > model_config.max_position_embeddings:
            raise UsageError(f"--context {options.context}: the model knows {model_config.max_position_embeddings} positions")
        backend = assembly.choose_backend(config, model_config, whole_gpu=group.sharers == 1)
        exchange = assembly.connect(config, model_config, backend, group)
        model, *_ = assembly.load(config, directory, model_config, backend, Timeline(lambda _: None, "import"), exchange)
    _skew(model, options.skew)
    group.wait_for_all("loaded")
    shape = roofline.shape_from_config(model_config.raw)
    loaded, rank = time.monotonic(), group.seat.rank
    rows: list[dict[str, Any]] = []
    hit: dict[int, float | None] = {}
    traces: list[dict[str, Any]] = []
    for batch in options.batch:
        runner = _runner(model, backend, config, batch, options.context, rank)
        step = _step(runner, options.context)
        hit[batch] = _distinct_experts(runner, step, rank)
        floor = roofline.step_floor(shape, GPU, batch, options.context, options.ep_size).seconds * 1e3
        for mode in _modes(model, options):
            rows.append(_measure(runner, step, mode, floor, options.steps, rank))
            log.info("%s", rows[-1])
        del runner
    if backend.on_gpu:  # a profiler may slow what comes after it, so it comes last
        for batch in options.batch if options.trace else options.batch[:1]:
            runner = _runner(model, backend, config, batch, options.context, rank)
            for mode in (mode for mode in _modes(model, options) if mode != "eager"):
                traces.append(_trace(runner, mode, _step(runner, options.context), options.trace, rank))
            del runner
    return {
        "bench": "step",
        "model": options.model,
        "layers": model_config.num_layers,
        "context": options.context,
        "stack": backend.kernels.name,
        "dtype": str(backend.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(backend.device) if backend.on_gpu else "CPU",
        "floor_of": GPU.name,
        "ranks": group.seat.num_ranks,
        "dispatcher": "local" if exchange is None else exchange.name,
        "skew": options.skew,
        "redundant_experts": options.redundant_experts,
        "busiest_rank": _busiest(model, group, options.record_load),
        "distinct_experts": hit,
        "traces": traces,
        "load_seconds": round(loaded - began, 1),
        "rows": rows,
    }


def _skew(model: Decoder, skew: float) -> None:
    """Make the first experts popular: their correction bias falls with the logarithm of their number."""
    for module in model.modules():
        if isinstance(module, Router) and module.correction_bias is not None and skew:
            places = torch.arange(1, len(module.correction_bias) + 1, device=module.correction_bias.device)
            module.correction_bias.copy_(-skew * places.log() / places.log().max())


def _busiest(model: Decoder, group: Group, file: Path | None) -> float | None:
    """The (token, expert) pairs of the rank that had most, over the mean; None for an engine alone. All ranks' loads go into the
    file, in the form of /server_info."""
    told = group.gather("expert load", json.dumps(model.expert_load()))
    loads: list[dict[str, list[int]]] = [json.loads(load) for load in told]
    if file is not None and group.seat.rank == 0:
        file.write_text(json.dumps({"ranks": [{"now": {"expert_load": load}} for load in loads]}))
    pairs = [sum(map(sum, load.values())) for load in loads]
    return round(max(pairs) * len(pairs) / sum(pairs), 3) if len(pairs) > 1 else None


def _with_layers(source: Path, layers: int | None, folder: Path) -> Path:
    """The folder itself, or a copy of its config.json with another number of layers. Raises UsageError when it has none."""
    file = source / "config.json"
    if not file.is_file():
        raise UsageError(f"{source} has no config.json")
    if layers is None:
        return source
    fields = json.loads(file.read_text()) | {"num_hidden_layers": layers, "num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def _runner(model: Decoder, backend: Backend, config: Config, batch: int, context: int, rank: int) -> ModelRunner:
    pages_each, model_config = -(-context // config.page_size), model.config
    limits = Limits.of(config, model_config.vocab_size, batch * pages_each, pages_each * config.page_size)
    limits = msgspec.structs.replace(limits, max_num_seqs=batch, chunked_prefill_size=batch)
    shape = (limits.num_pages + 1, *kv_page_shape(model.attention_shape, config.page_size))
    generator = torch.Generator(backend.device).manual_seed(rank)
    with kv_cache.refusal_of_memory(f"a KV cache of {limits.num_pages} pages"):
        cache = [torch.zeros(shape, dtype=backend.kv_dtype, device=backend.device) for _ in range(model.num_layers)]
    for layer in cache:
        layer.normal_(generator=generator)
    return ModelRunner(model, backend.kernels, cache, limits, backend.device)


def _step(runner: ModelRunner, context: int) -> ScheduledStep:
    """Every slot decodes at the same position, over pages in disorder."""
    limits = runner.limits
    pages = list(range(1, limits.num_pages + 1))
    random.Random(0).shuffle(pages)
    each = limits.num_pages // limits.max_num_seqs
    setup = SlotSetup(SamplingParams(max_tokens=1, seed=0, temperature=0.0), [0])
    rows = tuple(
        ScheduledRow(
            request_id=slot,
            slot=slot,
            start=context - 1,
            num_tokens=1,
            new_pages=tuple(pages[slot * each : (slot + 1) * each]),
            samples=True,
            setup=setup,
        )
        for slot in range(limits.max_num_seqs)
    )
    return ScheduledStep.of(1, rows, len(rows))


def _modes(model: Decoder, options: argparse.Namespace) -> Iterator[str]:
    shared = model.config.moe is not None and model.config.moe.shared_intermediate_size > 0
    for mode in options.modes:
        if mode == "eager" or not shared:
            yield mode
        else:
            yield from (f"graph {policy}" for policy in options.shared_expert)


def _measure(runner: ModelRunner, step: ScheduledStep, mode: str, floor: float, steps: int, rank: int) -> dict[str, Any]:
    """One line of the table, times in milliseconds.

    `step`: the median over the repeats of the mean step, one step in flight while the next is prepared, as the engine runs them;
    `spread`: (max - min) / median of the repeats; `device`: a replay or an eager forward alone, by events; none on CPUs.
    """
    batch = len(step.rows)
    steps = steps if mode != "eager" else max(3, steps // 5)
    graphs = _capture(runner, mode, batch) if mode != "eager" else None
    tokens, later = _random_tokens(runner, rank), _settled(step)
    _run(runner, later, tokens, WARM_STEPS)
    times = [_run(runner, later, tokens, steps) for _ in range(REPEATS)]
    median = statistics.median(times)
    device = _device_time(runner, later, graphs, steps)
    if graphs is not None:
        captured_steps.drop(runner)
    measured = {"batch": batch, "mode": mode, "step": median, "spread": (max(times) - min(times)) / median}
    return measured | {"device": device, "floor": floor, "share": floor / median}


def _settled(step: ScheduledStep) -> ScheduledStep:
    """The same step once the runner knows its slots and pages."""
    rows = [msgspec.structs.replace(row, table_offset=1, new_pages=(), setup=None) for row in step.rows]
    return ScheduledStep.of(2, rows, len(rows))


def _trace(runner: ModelRunner, mode: str, step: ScheduledStep, folder: Path | None, rank: int) -> dict[str, Any]:
    """What a replay launches; with a folder also as a table, and one layer as a picture in it."""
    batch, recorder = runner.limits.max_num_seqs, KeepingRecorder(runner.device)
    graphs = _capture(runner, mode, batch, recorder)
    runner.sampler.last_tokens.copy_(_random_tokens(runner, rank)[0])
    runner.launch(step).result()
    traced = trace(runner, _settled(step), lambda: graphs.replay(batch), recorder.graphs[0])
    captured_steps.drop(runner)
    if folder is not None:
        _console().print(table(traced), edge_table(traced))
        folder.mkdir(parents=True, exist_ok=True)
        draw(traced, folder / f"{mode.replace(' ', '-')}-{batch}.png")
    streams = {launch.stream for launch in traced.launches}
    a_layer = round(len(traced.launches) / traced.layers, 1)
    return {
        "mode": mode,
        "batch": batch,
        "kernels": len(traced.launches),
        "a_layer": a_layer,
        "streams": len(streams),
        "gaps": round(traced.gaps / traced.span, 4),
        "programmatic_edges": sum(count for edge, count in traced.edges.items() if edge.kind == "programmatic"),
        "edges": traced.edges.total(),
    }


def _capture(runner: ModelRunner, mode: str, batch: int, recorder: CudaRecorder | None = None) -> StepGraphs[Sampled]:
    policies: dict[str, SharedExpertPolicy] = {"graph overlap": "overlap", "graph fused": "fused"}
    model, policy = runner.model, policies.get(mode, "serial")
    assert isinstance(model, Decoder)
    model.shared_expert, model.lanes = policy, CudaLanes(runner.device) if policy == "overlap" else None
    captured_steps.capture(runner, recorder or CudaRecorder(runner.device), [batch])
    assert runner.graphs is not None
    return runner.graphs


def _random_tokens(runner: ModelRunner, rank: int) -> Tensor:
    """[16, slots + 1]: what the slots sampled last. New ones for each step, else random weights fall into a few tokens; others on
    each rank, else all would ask for the same few experts."""
    generator = torch.Generator().manual_seed(rank)
    shape = (16, runner.limits.max_num_seqs + 1)
    return torch.randint(0, runner.limits.vocab_size, shape, generator=generator).to(runner.device)


def _run(runner: ModelRunner, step: ScheduledStep, tokens: Tensor, count: int) -> float:
    """Milliseconds a step."""
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    began = time.perf_counter()
    in_flight: InFlight | None = None
    for number in range(count):
        runner.sampler.last_tokens.copy_(tokens[number % len(tokens)])
        launched = runner.launch(step)
        if in_flight is not None:
            in_flight.result()
        in_flight = launched
    if in_flight is not None:
        in_flight.result()
    return (time.perf_counter() - began) * 1e3 / count


def _device_time(runner: ModelRunner, step: ScheduledStep, graphs: StepGraphs[Sampled] | None, count: int) -> float | None:
    """Milliseconds of a step on the device alone, without the copies and the planning around it; None on a CPU."""
    if runner.device.type == "cpu":
        return None
    batch = runner.batches.to_device(runner.batches.stage(step, len(step.rows) if graphs is not None else None))
    plan = runner.plan(batch)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode():
        begin.record()
        for _ in range(count):
            if graphs is not None:
                graphs.replay(len(step.rows))
            else:
                runner.forward_and_sample(batch, plan, "argmax")
        end.record()
    torch.cuda.synchronize(runner.device)
    return float(begin.elapsed_time(end)) / count


def _distinct_experts(runner: ModelRunner, step: ScheduledStep, rank: int) -> float | None:
    """Experts that the rank's own rows hit in a layer, the mean over the layers; None without experts."""
    counts: list[Tensor] = []
    table = runner.kernels

    def counting(*inputs: Any) -> tuple[Tensor, Tensor]:
        ids, weights = table.route(*inputs)
        counts.append(ids.unique().numel() * torch.ones(()))
        return ids, weights

    assert isinstance(runner.model, Decoder)
    routers = [module for module in runner.model.modules() if isinstance(module, Router)]
    for router in routers:
        router.kernels = dataclasses.replace(table, route=counting)
    runner.sampler.last_tokens.copy_(_random_tokens(runner, rank)[0])
    runner.launch(step).result()
    for router in routers:
        router.kernels = table
    return round(float(torch.stack(counts).mean()), 1) if counts else None


def _show(report: dict[str, Any]) -> None:
    title = f"{report['model']}: decode step on {report['device']}, {report['stack']}, context {report['context']}"
    if report["ranks"] > 1:
        title += f"; each of {report['ranks']} ranks, {report['dispatcher']}, busiest rank {report['busiest_rank']} of the mean"
    shown = titled(title, ("mode",), ("batch", "ms/step", "spread", "device ms", "floor ms", "share"))
    for row in report["rows"]:
        shown.add_row(
            *(row["mode"], str(row["batch"]), f"{row['step']:.3f}", f"{row['spread']:.1%}"),
            *("-" if row["device"] is None else f"{row['device']:.3f}", f"{row['floor']:.2f}", f"{row['share']:.0%}"),
        )
    console = _console()
    console.print(shown)
    for traced in report["traces"]:
        launched = f"{traced['kernels']} kernels ({traced['a_layer']} a layer)"
        console.print(f"{traced['mode']}, batch {traced['batch']}: {launched} on {traced['streams']} streams")


def _console() -> Console:
    return Console(file=sys.stdout, width=130, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
