"""`minserve tune`: times every way to compute a model's routed experts on this GPU, and keeps the fastest for later starts.

Runs as a process of its own: `python -m minserve.kernels.tune --help`. Knows no weights: they are random, and so is routing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minserve.config import Config, kernel_cache_directory
from minserve.errors import CheckpointError, EnvironmentFault, ServerError
from minserve.kernels import stacks
from minserve.kernels.expert_choices import Choice, ExpertChoices, ExpertPath, ExpertShape, by_rule
from minserve.kernels.expert_tiles import OWN_TILES_TOKENS, Block, TileSizes
from minserve.kernels.interface import ExpertWeights
from minserve.kernels.timing import graph_microseconds, random_experts, random_tokens
from minserve.remembered import Remembered
from minserve.roofline import shape_from_config

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_ROUTINGS = 8
"""Random choices of experts that one graph runs through, so that a second-level cache helps none."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print; the last line of the output is JSON: shape to table, as shipped tables have it."""
    parser = argparse.ArgumentParser(prog="minserve tune", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="folder with a config.json, such as configs/shapes/qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="tokens of a step")
    parser.add_argument("--stack", default="auto", help="kernel stack")
    options = parser.parse_args(arguments)
    try:
        sys.stdout.write(json.dumps(_tune(Path(options.model), options.tokens, options.stack)) + "\n")
    except ServerError as error:
        sys.stderr.write(f"minserve: error: {error}\n")
        return error.exit_code
    return 0


def _tune(model: Path, batches: Sequence[int], stack: str) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise EnvironmentFault("minserve tune measures a GPU, and torch finds none here")
    remembered = Remembered(kernel_cache_directory(Config()) / "remembered")
    device = torch.device("cuda", torch.cuda.current_device())
    ways = _ways(stacks.choose(stack, device, remembered=remembered).name)
    choices, tables = ExpertChoices(torch.cuda.get_device_name(device), remembered), {}
    for shape in _shapes(model):
        sys.stdout.write(f"{shape}\n")
        weights = random_experts(shape)
        table = [(tokens, _fastest(tokens, shape, weights, ways)) for tokens in sorted(batches)]
        choices.keep(shape, table)
        tables[str(shape)] = [[tokens, choice.to_json()] for tokens, choice in table]
    return tables


def _ways(stack: str) -> dict[str, Any]:
    """Functions by path; imported here, where a GPU and the libraries of the stack are known to be."""
    from minserve.kernels.triton_experts import by_choice

    if not stack.startswith("hopper"):
        return {"triton": by_choice}
    from minserve.kernels.deep_gemm_products import DeepGemmProducts

    grouped = DeepGemmProducts().experts_grouped
    return {"triton": by_choice, "masked": partial(grouped, masked=True), "contiguous": partial(grouped, masked=False)}


def _shapes(model: Path) -> Iterator[ExpertShape]:
    """The model's experts, and again with a shared expert among them where that can be."""
    path = model / "config.json" if model.is_dir() else model
    try:
        m = shape_from_config(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read as a model's config: {error}") from error
    if not m.num_experts:
        raise CheckpointError(f"{path}: this model has no routed experts, so there is nothing to tune")
    kind: dict[str, Any] = {"plain": "plain", "fp8": "fp8_block", "int4": "int4_group"}
    fused, rest = divmod(m.shared_intermediate, m.expert_intermediate)
    for extra in (0, fused) if fused and not rest and not m.shared_gate and m.experts != "int4" else (0,):
        experts, top_k = m.num_experts + extra, m.top_k + extra
        yield ExpertShape(kind[m.experts], experts, m.hidden, m.expert_intermediate, top_k)


def _fastest(tokens: int, shape: ExpertShape, weights: ExpertWeights, ways: dict[str, Any]) -> Choice:
    """Times all candidates and prints the two best lines; one that does not run here is left out."""
    inputs = [random_tokens(tokens, shape) for _ in range(_ROUTINGS)]
    times: list[tuple[float, Choice]] = []
    for choice in _candidates(tokens, shape, "masked" in ways):
        function = ways.get(choice.path) or partial(ways["triton"], choice)
        try:
            times.append((graph_microseconds([partial(function, *rows, weights) for rows in inputs]), choice))
        except Exception as error:  # too much shared memory, a library's refusal: what it is says the library
            sys.stdout.write(f"  {tokens:5d} tokens: {choice} does not run: {type(error).__name__}\n")
    if not any(choice.path == "tiles" for _, choice in times):
        raise EnvironmentFault(f"no tiled product of {shape} runs on this GPU; see the lines above")
    times.sort(key=lambda entry: entry[0])
    for microseconds, choice in times[:2]:
        sys.stdout.write(f"  {tokens:5d} tokens {microseconds:9.1f} us  {choice}\n")
    sys.stdout.flush()
    best_tiles = next(choice for _, choice in times if choice.path == "tiles")
    return Choice(times[0][1].path, best_tiles.sizes)


def _candidates(tokens: int, shape: ExpertShape, has_grouped: bool) -> Iterator[Choice]:
    rule = by_rule(tokens, shape).sizes
    paths: list[ExpertPath] = ["tiles"]
    if shape.format != "int4_group":
        paths += ["vector"] if tokens <= 4 else []
        paths += ["masked"] if has_grouped and 8 <= tokens <= 256 else []
        paths += ["contiguous"] if has_grouped and tokens >= 256 else []
    yield from (Choice(path, rule) for path in paths)
    for sizes in _sizes(tokens, shape, rule):
        if sizes != rule:
            yield Choice("tiles", sizes)


def _sizes(tokens: int, shape: ExpertShape, rule: TileSizes) -> Iterator[TileSizes]:
    if shape.format == "int4_group":
        blocks = [Block(32, 256, 2, 3), Block(64, 256, 4, 3), Block(128, 256, 4, 2)]
    elif shape.format == "fp8_block":
        blocks = [Block(32, 128, 2, 3), Block(32, 128, 2, 4), Block(64, 128, 4, 3), Block(64, 128, 2, 4), Block(64, 256, 4, 3)]
        blocks += [Block(32, 256, 2, 3), Block(64, 256, 4, 2), Block(128, 128, 4, 3), Block(128, 256, 4, 2)]
    else:
        blocks = [Block(32, 128, 2, 4), Block(32, 256, 2, 3), Block(64, 128, 4, 3), Block(64, 64, 4, 5), Block(128, 64, 8, 3)]
    if tokens <= OWN_TILES_TOKENS:
        rows = [OWN_TILES_TOKENS]
    else:
        rows = sorted({max(8, rule.rows // 2), rule.rows, min(128, rule.rows * 2)})
    for count in rows:
        yield from (TileSizes(count, block, block, rule.group_tiles) for block in blocks)


if __name__ == "__main__":
    sys.exit(main())
