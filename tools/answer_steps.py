"""Drives the server's model over a paged cache through prompts and their right answers: prefill, then one token a step.

Teacher-forced: greedy decoding is exact if and only if every right token is the arg-max after the right tokens before it.
Lays steps out as the runtime does; knows nothing of faults.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from minserve.kernels import reference
from minserve.kernels.interface import kv_page_shape
from minserve.models.decoder import Decoder
from minserve.models.forward_context import ForwardContext
from minserve.models.registry import build_model, load_model_config
from minserve.models.weights import load_weights, open_checkpoint
from minserve.runtime.batch import BatchBuilder
from minserve.runtime.step import ScheduledRow, ScheduledStep

PAGE_SIZE = 64
PREFILL_TOKENS = 2048
PromptAndAnswer = tuple[list[int], list[int]]


def load_server_model(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """The checkpoint as the server loads it for the CPU."""
    checkpoint = open_checkpoint(directory)
    model = build_model(load_model_config(directory), checkpoint.formats, reference.cpu(), dtype, torch.device("cpu"))
    load_weights(model, checkpoint)
    model.finish_load()
    assert isinstance(model, Decoder)
    return model


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerValues:
    """One entry a pair."""

    exact: list[bool]
    answer: list[float]
    """Log-probability of the right answer and the end of the turn."""
    prompt: list[float]
    """Of the prompt's tokens, the first not counted."""


@dataclasses.dataclass(slots=True)
class _Row:
    index: int
    prompt: list[int]
    answer: list[int]
    pages: list[int]
    logits: Tensor
    """fp32 [answer, vocab]: what each of the answer's tokens was predicted from."""


class AnswerSteps:
    """One run over the pairs; the longest answers come first, so that the rows still going are always the first ones."""

    def __init__(self, model: Decoder, pairs: Sequence[PromptAndAnswer]) -> None:
        self.model = model
        self.kernels = reference.cpu()
        order = sorted(range(len(pairs)), key=lambda index: -len(pairs[index][1]))
        counts = [-(-(len(prompt) + len(answer)) // PAGE_SIZE) for prompt, answer in pairs]
        free = list(range(1, sum(counts) + 1))
        random.Random(0).shuffle(free)
        self._rows = [
            _Row(
                index,
                *pairs[index],
                pages=[free.pop() for _ in range(counts[index])],
                logits=torch.empty(len(pairs[index][1]), model.config.vocab_size),
            )
            for index in order
        ]
        self._builder = BatchBuilder(
            max_slots=len(pairs),
            max_tokens=max(PREFILL_TOKENS, *(len(prompt) for prompt, _ in pairs)),
            max_pages=max(counts),
            page_size=PAGE_SIZE,
            device=torch.device("cpu"),
        )
        # One page more than there are, for a page table that points beyond.
        shape = (sum(counts) + 2, *kv_page_shape(model.attention_shape, PAGE_SIZE))
        self._cache = [torch.zeros(shape, dtype=next(model.parameters()).dtype) for _ in range(model.num_layers)]

    def run(self, before_decode: Callable[[], None] = lambda: None) -> AnswerValues:
        """Everything once; `before_decode` is called between the prompts and the answers."""
        prompts = [0.0] * len(self._rows)
        for chunk in _chunks(self._rows):
            logits = self._step([(row, 0, row.prompt) for row in chunk])
            for row, of_row in zip(chunk, logits, strict=True):
                row.logits[0] = of_row[-1]
                targets = torch.tensor(row.prompt[1:]).unsqueeze(-1)
                prompts[row.index] = of_row[:-1].log_softmax(-1).gather(-1, targets).sum().item()
        before_decode()
        for position in range(len(self._rows[0].answer) - 1):
            going = [row for row in self._rows if len(row.answer) > position + 1]
            logits = self._step([(row, len(row.prompt) + position, [row.answer[position]]) for row in going])
            for row, of_row in zip(going, logits, strict=True):
                row.logits[position + 1] = of_row[0]
        values = AnswerValues([False] * len(self._rows), [0.0] * len(self._rows), prompts)
        for row in self._rows:
            target = torch.tensor(row.answer)
            values.exact[row.index] = bool((row.logits.argmax(-1) == target).all())
            values.answer[row.index] = row.logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).sum().item()
        return values

    @torch.inference_mode()
    def _step(self, rows: list[tuple[_Row, int, list[int]]]) -> list[Tensor]:
        """(row, first position, tokens) of each row -> its logits fp32 [tokens, vocab]."""
        scheduled = [
            ScheduledRow(
                request_id=row.index, slot=row.index, start=start, num_tokens=len(tokens), token_ids=tuple(tokens),
                new_pages=() if start else tuple(row.pages),
            )
            for row, start, tokens in rows
        ]  # fmt: skip
        staged = self._builder.stage(ScheduledStep.of(1, scheduled))
        for there, here in staged.copies:
            there.copy_(here)
        batch = staged.batch
        plan = self.kernels.plan_attention(batch.attention, self.model.attention_shape)
        hidden = self.model(batch.token_ids, batch.positions, ForwardContext(batch.attention, plan, self._cache))
        return list(self.model.compute_logits(hidden).float().split([len(tokens) for _, _, tokens in rows]))


def _chunks(rows: list[_Row]) -> list[list[_Row]]:
    """Rows in order, each chunk's prompts within PREFILL_TOKENS together."""
    chunks: list[list[_Row]] = []
    room = 0
    for row in rows:
        if len(row.prompt) > room:
            chunks.append([])
            room = PREFILL_TOKENS
        chunks[-1].append(row)
        room -= len(row.prompt)
    return chunks
