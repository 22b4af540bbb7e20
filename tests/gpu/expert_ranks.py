"""One rank of an expert-parallel group on GPUs, for test_expert_parallel.py.

python expert_ranks.py RANK RANKS PORT FOLDER layers|replays. All ranks run the same part at the same time; each compares what
came of it with the same work done alone, on all experts.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.kernel_samples import choices, distance, expert_truth, expert_weights, same_bits
from gpu.runners import capture, runner_of
from torch import Tensor

from minserve.config import EMBEDDED_DIRECTORY, Config
from minserve.kernels import deep_ep_limits, stacks
from minserve.kernels.deep_ep_buffer import DeepEPBuffer
from minserve.kernels.interface import ExpertWeights, Kernels
from minserve.kernels.triton_exchange import quantize_rows
from minserve.models.layers.dispatcher import DeepEPDispatcher, Dispatcher, MaskedTokens, TorchDispatcher
from minserve.models.layers.placement import ExpertPlacement
from minserve.models.layers.streams import CudaLanes
from minserve.models.registry import build_model, load_model_config
from minserve.models.weights import load_weights, open_checkpoint
from minserve.request import SamplingParams
from minserve.runtime import captured_steps, expert_exchange, parallel, self_check
from minserve.runtime.expert_exchange import Exchange
from minserve.runtime.model_runner import ModelRunner
from minserve.runtime.parallel import Group
from minserve.runtime.step import ScheduledRow, ScheduledStep, SlotSetup
from minserve.seat import Seat

ERROR = {"bf16": 0.01, "fp8": 0.06}
"""Relative, of a layer's output: rounding, and where activations are quantised that too."""
REPLAYS = 1000
MARGIN = 0.5
"""Nats between the best two tokens within which other rounding may choose the other."""
PARTED = 0.1
"""Relative error from which a row chose another expert somewhere, as close choices do when sums are rounded in another order."""


def main() -> None:
    faulthandler.enable()
    rank, num_ranks, port = (int(word) for word in sys.argv[1:4])
    folder, part = Path(sys.argv[4]), sys.argv[5]
    seat = Seat(rank=rank, num_ranks=num_ranks, ranks_per_host=num_ranks, port=port)
    group = parallel.join(seat, 300.0, on_gpus=True)
    {"layers": layers, "replays": replays}[part](group, folder)
    group.wait_for_all("done")
    torch.cuda.synchronize()
    say(f"rank {rank}: {part} passed")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# one layer's experts


def layers(group: Group, folder: Path) -> None:
    """Random experts and tokens, as many on each rank as it likes, through every way there is."""
    del folder
    kernels = stacks.build("hopper-ep", torch.device("cuda", torch.cuda.current_device()), whole_gpu=group.sharers == 1)
    capacity = deep_ep_limits.capacity(64, group.sharers)
    for hidden, inner, experts, top_k in ((2048, 256, 16, 8), (256, 128, 16, 4)):
        able = deep_ep_limits.abilities(hidden, top_k, group.seat.num_ranks, group.seat.num_ranks)
        assert able.normal and (able.low_latency_width == hidden) is (hidden == 2048)
        buffer = DeepEPBuffer(
            group.collectives,
            hidden_size=hidden,
            width=able.low_latency_width,
            num_slots=experts,
            capacity=capacity,
            normal=True,
        )
        for kind in ("bf16", "fp8"):
            for name, dispatcher in dispatchers(group, buffer, experts, kind).items():
                torch.manual_seed(7)  # the experts are the same on all ranks, the tokens are not
                weights = expert_weights(experts, hidden, inner, kind)
                for case, counts in enumerate(([5, 30, 1, 9], [0, capacity, 7, 3], [1, 1, 1, 1], [32, 32, 32, 32])):
                    torch.manual_seed(100 * case + group.seat.rank)
                    count = counts[group.seat.rank]
                    x = torch.randn(count, hidden, device="cuda").bfloat16()
                    ids, shares = choices(count, top_k, experts)
                    if case == 3:  # every token of every rank to the same experts, all of one rank
                        ids = torch.arange(top_k, device="cuda", dtype=torch.int32).expand(count, -1).contiguous()
                    rows = max(counts[: group.seat.num_ranks])
                    out = exchange(kernels, dispatcher, group, weights, (x, ids, shares), rows)
                    truth = expert_truth(x, ids, shares, weights)
                    error = distance(out, truth) if count else 0.0
                    assert error < ERROR[kind], (name, kind, hidden, case, error)
                    again = exchange(kernels, dispatcher, group, weights, (x, ids, shares), rows)
                    assert same_bits(out, again), (name, kind, hidden, case)
                say(f"rank {group.seat.rank}: {name} {kind} {hidden}: error {error:.4f}")
        torch.cuda.synchronize()
        buffer.destroy()


def dispatchers(group: Group, buffer: DeepEPBuffer, experts: int, kind: str) -> dict[str, Dispatcher]:
    assert group.collectives is not None
    num_ranks = group.seat.num_ranks
    ways: dict[str, Dispatcher] = {
        "low-latency": DeepEPDispatcher(buffer, num_ranks, buffer.capacity),
        "normal": DeepEPDispatcher(buffer, num_ranks, 0),
    }
    if group.sharers == 1:
        ways["torch"] = TorchDispatcher(group.collectives, experts // num_ranks)
    for way in ways.values():
        way.quantize = quantize_rows if kind == "fp8" else None  # type: ignore[attr-defined]
    return ways


def exchange(
    kernels: Kernels,
    dispatcher: Dispatcher,
    group: Group,
    weights: ExpertWeights,
    tokens: tuple[Tensor, Tensor, Tensor],
    rows: int,
) -> Tensor:
    """Dispatch, this rank's experts, combine."""
    each = weights.w13.shape[0] // group.seat.num_ranks
    first = group.seat.rank * each
    names = [field.name for field in dataclasses.fields(weights)]
    own = ExpertWeights(*(None if (w := getattr(weights, name)) is None else w[first : first + each] for name in names[:4]))
    dispatched = dispatcher.dispatch(*tokens, None, rows)
    work = dispatched.tokens
    scale = () if work.scale is None else (work.scale,)
    if isinstance(work, MaskedTokens):
        output = kernels.experts_masked(work.hidden, work.counts, own, *scale)
    else:
        output = kernels.experts_flat(work.hidden, work.slot_ids, work.weights, own, *scale)
    return dispatcher.combine(output, dispatched)


# the embedded model's decode steps


def replays(group: Group, folder: Path) -> None:
    """Rank 0 replays its smallest graph while the others replay their largest, many times: always the same, and what one rank
    says that has all experts."""
    few, many = 1, min(64, deep_ep_limits.capacity(64, group.sharers))
    way = connect(group, many)
    for kind, directory in (("bf16", EMBEDDED_DIRECTORY), ("fp8", folder / "fp8")):
        for policy in ("serial", "overlap"):
            way.dispatcher.quantize = None
            check_replays(group, way, directory, kind, policy, few, many)


def check_replays(group: Group, way: Exchange, directory: Path, kind: str, policy: str, few: int, many: int) -> None:
    rank = group.seat.rank
    rows = few if rank == 0 else many
    alone = load(group, directory, policy, None, many)
    runner = load(group, directory, policy, way, many)
    assert (way.dispatcher.quantize is None) == (kind == "bf16")
    step = decode_step(rows)
    capture(alone, (few, many))
    graphs = capture(runner, (few, many))
    proven = self_check.check_graphs(runner, "fast")
    assert all(streams <= 2 for streams in proven.streams.values()), proven.streams
    for one in (alone, runner):
        rows_per_rank = many if one is runner else None
        one.launch(step, rows_per_rank=rows_per_rank).result()
        set_up(one, step)
        one.launch(settled(step), rows_per_rank=rows_per_rank).result()
    expected = graphs.result(rows)
    first = [tensor.clone() for tensor in expected]
    logits = alone.graphs.result(rows).logits.float()
    parted = (first[1] - logits).norm(dim=1) / logits.norm(dim=1) > PARTED
    assert int(parted.sum()) <= rows // 16, (kind, policy, "rows of other experts", parted.nonzero().flatten().tolist())
    best = logits.topk(2).values
    clear = ~parted & (best[:, 0] - best[:, 1] > MARGIN)
    assert torch.equal(first[0][clear], logits.argmax(-1)[clear]), (kind, policy, "other tokens than one rank's")
    error = distance(first[1][~parted], logits[~parted])
    assert error < ERROR[kind] * 3, (kind, policy, error)
    # The step repeated: its KV entries are overwritten by the same ones, its tokens are drawn anew from the same slots.
    runner.plan(runner.batches.to_device(runner.batches.stage(settled(step), rows)))
    different, tokens = torch.zeros((), dtype=torch.int64, device=runner.device), tokens_of(runner)
    for _ in range(REPLAYS):
        runner.sampler.last_tokens.copy_(tokens)
        graphs.replay(rows)
        for now, was in zip(expected, first, strict=True):
            different += (now != was).sum()
    assert int(different) == 0, (kind, policy, "a replay differed")
    # Eager, and one rank without tokens: it replays padding, and moves nobody's logits.
    with torch.inference_mode():
        batch = runner.batches.to_device(runner.batches.stage(settled(step), rows))
        runner.sampler.last_tokens.copy_(tokens_of(runner))
        eager = runner.forward_and_sample(batch, runner.plan(batch), "argmax")
    assert same_bits(eager.logits, first[1])
    runner.sampler.last_tokens.copy_(tokens_of(runner))
    if rank == group.seat.num_ranks - 1:
        runner.launch_dummy(many).result()
    else:
        runner.launch(settled(step), rows_per_rank=many).result()
        assert same_bits(expected[1], first[1]), (kind, policy, "another rank's padding reached this one")
    said = f"{rows} rows, error {error:.4f}, {int(parted.sum())} of other experts, {int(clear.sum())} clear"
    say(f"rank {rank}: {kind} {policy}: {said}, streams {proven.streams}")
    for one in (alone, runner):
        captured_steps.drop(one)


def connect(group: Group, max_num_seqs: int) -> Exchange:
    """DeepEP's buffers for the embedded model; a process makes them once."""
    config = load_model_config(EMBEDDED_DIRECTORY)
    assert config.moe is not None
    placement = ExpertPlacement.spread(config.moe.num_experts, group.seat.num_ranks, group.seat.rank)
    settings = Config(ep_size=group.seat.num_ranks, max_num_seqs=max_num_seqs)
    device = torch.device("cuda", torch.cuda.current_device())
    return expert_exchange.connect(settings, config, (placement, {}), "hopper-ep", device, group)


def load(group: Group, directory: Path, policy: Any, way: Exchange | None, max_num_seqs: int) -> ModelRunner:
    checkpoint, config = open_checkpoint(directory), load_model_config(directory)
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = stacks.build("hopper-ep", device, whole_gpu=group.sharers == 1)
    options = {} if way is None else {"dispatcher": way.dispatcher, "placement": way.placement}
    lanes = CudaLanes(device) if policy == "overlap" else None
    model = build_model(config, checkpoint.formats, kernels, torch.bfloat16, device, shared_expert=policy, lanes=lanes, **options)
    load_weights(model, checkpoint)
    model.finish_load()
    runner = runner_of(model, kernels, max_num_seqs=max_num_seqs)
    if way is not None:
        way.settle(model)
        runner.low_latency_rows = way.low_latency_rows
    return runner


def decode_step(rows: int) -> ScheduledStep:
    """Rows of different lengths, each on two pages of its own."""
    setup = SlotSetup(SamplingParams(max_tokens=1, seed=0, temperature=0.0), [0])
    chosen = tuple(
        ScheduledRow(
            request_id=slot,
            slot=slot,
            start=3 + slot,
            num_tokens=1,
            new_pages=(1 + 2 * slot, 2 + 2 * slot),
            samples=True,
            setup=setup,
        )
        for slot in range(rows)
    )
    return ScheduledStep.of(1, chosen, rows)


def settled(step: ScheduledStep) -> ScheduledStep:
    """The same once the runner knows its slots and pages."""
    rows = tuple(
        ScheduledRow(request_id=row.request_id, slot=row.slot, start=row.start, num_tokens=1, table_offset=2, samples=True)
        for row in step.rows
    )
    return ScheduledStep.of(step.number, rows, step.num_decode_rows)


def set_up(runner: ModelRunner, step: ScheduledStep) -> None:
    """The same cache and last tokens in every runner."""
    generator = torch.Generator("cuda").manual_seed(len(step.rows))
    for layer in runner.kv_cache:
        layer.normal_(std=0.5, generator=generator)
    runner.sampler.last_tokens.copy_(tokens_of(runner))


def tokens_of(runner: ModelRunner) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, runner.sampler.last_tokens.shape, generator=generator).to(runner.device)


if __name__ == "__main__":
    main()
