"""Measures what grammars cost a step: masks of a batch whose every request is held to a JSON schema, over mock logits.

Last line JSON: milliseconds a step. Knows the engine's grammars and sampler; runs no model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time

import torch

from minserve.models.sampler import SamplerState, sample, sample_again
from minserve.request import Grammar, Request, SamplingParams, TokenOutput
from minserve.runtime.grammar import Grammars
from minserve.runtime.step import ScheduledRow, ScheduledStep

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "text": {"type": "string"},
        "nested": {"anyOf": [{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "text"],
    "x-guidance": {"whitespace_pattern": "[ \\t]{1,4}|\\r?\\n[ \\t]{0,64}"},
}
NUM_GRAMMARS = 4
"""Requests share a grammar's text in practice; a property's name tells these apart."""


def vocabulary(size: int) -> list[bytes]:
    """The bytes, then made-up words with and without a space in front, capitals, digits and punctuation."""
    dice = random.Random(0)
    pieces = {bytes([byte]): None for byte in range(256)}
    while len(pieces) < size - 1:
        kind = dice.random()
        letters = "etaoinshrdlucmfwypvbgkqjxz" if kind < 0.85 else "0123456789" if kind < 0.9 else '{}[]":,.;\n\t ()<>/'
        word = "".join(dice.choices(letters, k=dice.randint(2, 9)))
        pieces[((" " if dice.random() < 0.6 else "") + (word.title() if dice.random() < 0.3 else word)).encode()] = None
    return [*pieces, b"<eos>"]


def requests(rows: int, eos: int) -> list[Request]:
    made = []
    for number in range(rows):
        schema = {**SCHEMA, "properties": {**SCHEMA["properties"], f"p{number % NUM_GRAMMARS}": {"type": "string"}}}  # type: ignore[dict-item]
        grammar = Grammar('%llguidance {"no_forcing": true}\nstart: %json ' + json.dumps(schema))
        sampling = SamplingParams(max_tokens=1 << 20, seed=number, stop_token_ids=(eos,), grammar=grammar)
        made.append(Request(id=number, prompt_token_ids=[0], sampling=sampling, arrival_time=0.0))
    return made


def begin(grammars: Grammars, asked: list[Request]) -> float:
    """Seconds until all grammars are compiled."""
    began = time.perf_counter()
    for request in asked:
        grammars.compile(request)
    while grammars.compiling:
        _, failed = grammars.settled()
        if failed:
            raise RuntimeError(failed[0].error)
        time.sleep(0.0005)
    return time.perf_counter() - began


def measure(rows: int, vocab_size: int, steps: int) -> dict[str, float]:
    """Milliseconds, the first four of each step: masks on the clock and of all cores, sampling on a CPU, what tokens do."""
    grammars = Grammars(vocab_size)
    began = time.perf_counter()
    grammars.set_vocabulary(vocabulary(vocab_size), [vocab_size - 1])
    vocabulary_seconds = time.perf_counter() - began
    asked = requests(rows, vocab_size - 1)
    compile_seconds = begin(grammars, asked)
    state = SamplerState(rows, vocab_size, torch.device("cpu"))
    slots = torch.arange(rows)
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0))
    scheduled = tuple(ScheduledRow(request_id=n, slot=n, start=0, num_tokens=1, samples=True) for n in range(rows))
    step = ScheduledStep(number=1, rows=scheduled, num_decode_rows=rows, num_tokens=rows)
    spent = []
    for number in range(steps):
        moved = logits.roll(7919 * number, dims=1)
        at, cpu = [time.perf_counter()], time.process_time()
        masks = grammars.masks(step)
        at, cpu = [*at, time.perf_counter()], time.process_time() - cpu
        if masks is None or grammars.failures():
            raise RuntimeError("a grammar could not be followed")
        tokens = sample(moved, slots, state, "argmax")
        places = torch.tensor(masks.rows)
        again = sample_again(moved[places], places, tokens[places], masks.bits, state, "argmax")
        at.append(time.perf_counter())
        outputs = [TokenOutput(request_id=row, token_ids=(token,)) for row, token in zip(masks.rows, again.tolist(), strict=True)]
        told = grammars.advance(outputs)
        at.append(time.perf_counter())
        mask, sampling, advance = (later - earlier for earlier, later in itertools.pairwise(at))
        spent.append((mask, cpu, sampling, advance))
        ended = [output.request_id for output in told if output.finish_reason is not None]
        begin(grammars, [asked[row] for row in ended])  # the next request takes the place of one that is through
    means = map(statistics.fmean, zip(*spent, strict=True))
    tail = sorted(mask for mask, *_ in spent)[int(0.99 * (steps - 1))]
    names = ("mask", "mask_cpu", "cpu_sampling", "advance", "mask_p99", "vocabulary", "compile")
    seconds = (*means, tail, vocabulary_seconds, compile_seconds)
    return {"rows": rows, "vocab": vocab_size, **{f"{name}_ms": 1e3 * value for name, value in zip(names, seconds, strict=True)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=129_280)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    result = measure(arguments.rows, arguments.vocab, arguments.steps)
    sys.stdout.write(json.dumps({name: round(value, 3) for name, value in result.items()}) + "\n")


if __name__ == "__main__":
    main()
