"""Times one dispatch and combine between ranks, each on a GPU of its own, captured in a CUDA graph: DeepEP's ways and NCCL's.

    python tools/bench_exchange.py --ep-size 4 [--hidden 7168] [--experts 256] [--top-k 8] [--tokens 1 32 128]

Every token goes to random experts; nothing is computed between. GB/s counts what a rank sends to others, both ways.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import torch
import torch.distributed

from minserve.kernels import deep_ep_limits
from minserve.kernels.deep_ep_buffer import DeepEPBuffer
from minserve.kernels.triton_exchange import quantize_rows
from minserve.models.layers.dispatcher import DeepEPDispatcher, Dispatcher, TorchDispatcher
from minserve.runtime import parallel
from minserve.runtime.cuda_graph import CudaRecorder
from minserve.runtime.parallel import Group
from minserve.seat import own_seat

CALLS = 16
"""In one graph."""
REPEATS = 15
WATCHDOG_SECONDS = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ep-size", type=int, required=True)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 128], help="of each rank")
    options = parser.parse_args()
    if own_seat().num_ranks != options.ep_size:
        return parallel.spawn(sys.argv, options.ep_size)
    group = parallel.join(own_seat(), WATCHDOG_SECONDS, on_gpus=True)
    rows = measure(group, options)
    lines = [f"{row['way']:>18} {row['tokens']:>5} tokens  {row['us']:8.1f} us  {row['gb_s']:7.1f} GB/s" for row in rows]
    sys.stdout.write("\n".join([*lines, json.dumps({"bench": "exchange", **vars(options), "rows": rows})]) + "\n")
    return 0


def measure(group: Group, options: argparse.Namespace) -> list[dict[str, object]]:
    ranks = group.seat.num_ranks
    able = deep_ep_limits.abilities(options.hidden, options.top_k, ranks, ranks)
    capacity = deep_ep_limits.capacity(max(options.tokens))
    assert group.collectives is not None and able.low_latency_width is not None
    buffer = DeepEPBuffer(
        group.collectives,
        hidden_size=options.hidden,
        width=able.low_latency_width,
        num_slots=options.experts,
        capacity=capacity,
        normal=able.normal,
    )
    low, low_fp8, normal = (DeepEPDispatcher(buffer, ranks, rows) for rows in (capacity, capacity, 0))
    low_fp8.quantize = quantize_rows
    away = (ranks - 1) / ranks
    sent = {  # bytes of a token that a rank sends and gets back
        "low-latency FP8": options.top_k * away * options.hidden * (1 + 4 / 128 + 2),
        "low-latency bf16": options.top_k * away * options.hidden * 4,
        "normal bf16": (1 - (1 / ranks) ** options.top_k) * (ranks - 1) * options.hidden * 4,
        "NCCL bf16": (ranks - 1) * (options.hidden * 4 + options.top_k * 8),
    }
    ways: dict[str, Dispatcher] = {"low-latency FP8": low_fp8, "low-latency bf16": low}
    ways |= {"normal bf16": normal} if able.normal else {}
    ways["NCCL bf16"] = TorchDispatcher(group.collectives, options.experts // ranks)
    rows: list[dict[str, object]] = []
    for tokens in options.tokens:
        for way, dispatcher in ways.items():
            us = time_exchange(dispatcher, tokens, options, group)
            rows.append({"way": way, "tokens": tokens, "us": us, "gb_s": sent[way] * tokens / us / 1e3})
    return rows


def time_exchange(dispatcher: Dispatcher, tokens: int, options: argparse.Namespace, group: Group) -> float:
    """Microseconds."""
    x = torch.randn(tokens, options.hidden, device="cuda").bfloat16()
    ids = torch.rand(tokens, options.experts, device="cuda").topk(options.top_k).indices.int()
    weights = torch.rand(tokens, options.top_k, device="cuda")
    output: torch.Tensor | None = None

    def once() -> None:
        nonlocal output
        dispatched = dispatcher.dispatch(x, ids, weights, None, None)
        if output is None:
            output = torch.zeros_like(dispatched.tokens.hidden, dtype=torch.bfloat16)
        dispatcher.combine(output, dispatched)

    def work() -> None:
        for _ in range(CALLS):
            once()

    return timed(work, group) / CALLS


def timed(work: Callable[[], object], group: Group) -> float:
    recorder = CudaRecorder(torch.device("cuda", torch.cuda.current_device()))
    for _ in range(2):
        recorder.warm_up(work)
    graph, _ = recorder.record(work)
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        torch.distributed.barrier(group=group.collectives, device_ids=[torch.cuda.current_device()])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3)
    graph.reset()
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
