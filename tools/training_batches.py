"""Batches of token ids from conversations: batch number i depends on the seed and i alone, however many workers make them."""

from __future__ import annotations

import random
import re

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from tools import arithmetic_tasks, embedded_tokenizer
from tools.arithmetic_tasks import Conversation

LENGTHS = (96, 224, 704)
"""A batch has one length, so that padding is small."""
SHARES = (0.5, 0.3, 0.2)
"""Of the steps, for each length."""

_PIECES = re.compile(r"\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+")


class CachedEncoder:
    """The tokenizer's ids for the tasks' ASCII text, by looking up whole pre-tokens: a hundred times faster in a loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        self._user = self._tokenizer.encode(embedded_tokenizer.USER, add_special_tokens=False).ids
        self._assistant = self._tokenizer.encode(embedded_tokenizer.ASSISTANT, add_special_tokens=False).ids

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _PIECES.findall(text):
            known = self._known.get(piece)
            if known is None:
                known = self._known[piece] = self._tokenizer.encode(piece, add_special_tokens=False).ids
            ids += known
        return ids

    def start(self, system: str | None) -> list[int]:
        return [embedded_tokenizer.BOS_ID, *(self.encode(system) if system is not None else ())]

    def turn(self, turn: arithmetic_tasks.Turn) -> tuple[list[int], list[int]]:
        """(what the user sent, what the model must write): the second ends with EOS."""
        return (
            self._user + self.encode(turn.user) + self._assistant,
            [*self.encode(turn.assistant), embedded_tokenizer.EOS_ID],
        )

    def conversation(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """(prompt, last answer) as the chat template renders them."""
        ids = self.start(conversation.system)
        answer: list[int] = []
        for turn in conversation.turns:
            ids += answer
            prompt, answer = self.turn(turn)
            ids += prompt
        return ids, answer


class TrainingBatches(Dataset[tuple[Tensor, Tensor]]):
    """Item i: (token ids int16 [rows, length], learnt bool [rows, length]); `learnt` marks the ids that the model must write."""

    def __init__(self, tokenizer_json: str, seed: int, tokens_per_batch: int, steps: int) -> None:
        self._tokenizer_json = tokenizer_json
        self._encoder: CachedEncoder | None = None
        self._seed = seed
        self._tokens = tokens_per_batch
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._encoder is None:
            self._encoder = CachedEncoder(Tokenizer.from_str(self._tokenizer_json))
        rng = random.Random(self._seed * 1_000_003 + index)
        length = rng.choices(LENGTHS, SHARES)[0]
        rows = [training_row(rng, self._encoder, length) for _ in range(self._tokens // length)]
        return (
            torch.tensor([ids for ids, _ in rows], dtype=torch.int16),
            torch.tensor([learnt for _, learnt in rows], dtype=torch.bool),
        )


def training_row(rng: random.Random, encoder: CachedEncoder, length: int) -> tuple[list[int], list[bool]]:
    """One conversation of as many turns as fit, padded on the right."""
    ids = encoder.start(rng.choice(arithmetic_tasks.SYSTEM_PROMPTS) if rng.random() < 0.3 else None)
    learnt = [False] * len(ids)
    first = True
    while True:
        prompt, answer = encoder.turn(arithmetic_tasks.training_turn(rng, length - len(ids), first)[1])
        if len(ids) + len(prompt) + len(answer) > length:
            if first:
                continue
            break
        ids += prompt + answer
        learnt += [False] * len(prompt) + [True] * len(answer)
        first = False
    padding = length - len(ids)
    return ids + [embedded_tokenizer.PAD_ID] * padding, learnt + [False] * padding


def answer_batch(pairs: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """(prompt, answer) pairs as one right-padded batch: (ids int64 [rows, longest], answer mask bool [rows, longest])."""
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((len(pairs), longest), embedded_tokenizer.PAD_ID, dtype=torch.int64)
    mask = torch.zeros((len(pairs), longest), dtype=torch.bool)
    for row, (prompt, answer) in enumerate(pairs):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        mask[row, len(prompt) : len(prompt) + len(answer)] = True
    return ids, mask
