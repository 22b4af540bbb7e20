"""How the trainer's model does on held-out conversations: exact answers and log-probabilities.

Teacher-forced: greedy decoding is exact if and only if every right token is the arg-max after the right tokens before it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tools import embedded_tokenizer
from tools.arithmetic_tasks import Conversation
from tools.embedded_model import Arithmetic, EmbeddedModel
from tools.training_batches import CachedEncoder, answer_batch


@dataclasses.dataclass(frozen=True, slots=True)
class Values:
    """One entry a conversation, on the CPU."""

    exact: Tensor
    """bool [N]: greedy decoding gives the right answer and then stops."""
    answer: Tensor
    """fp32 [N]: log-probability of the right answer and the end of the turn."""
    tokens: list[list[float]]
    """The same, token by token."""
    prompt: Tensor
    """fp32 [N]: of the prompt's tokens, the first not counted. Training left these free, so they tell of every expert."""


def measure(
    model: EmbeddedModel,
    pairs: list[tuple[list[int], list[int]]],
    arithmetic: Arithmetic = "float32",
    rows: int = 64,
) -> Values:
    """Values of each (prompt, right answer), in the pairs' order."""
    order = sorted(range(len(pairs)), key=lambda index: len(pairs[index][0]) + len(pairs[index][1]))
    empty = torch.empty(len(pairs))
    values = Values(torch.empty(len(pairs), dtype=torch.bool), empty, [[] for _ in pairs], torch.empty(len(pairs)))
    device = model.embed.device
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        ids, answer = (tensor.to(device) for tensor in answer_batch([pairs[index] for index in chosen]))
        with torch.no_grad():
            logits = model(ids, arithmetic)[0][:, :-1]
        target, answer = ids[:, 1:], answer[:, 1:]
        right = (logits.argmax(-1) == target) | ~answer
        log_probability = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]
        prompt = ~answer & (target != embedded_tokenizer.PAD_ID)
        values.exact[chosen] = right.all(-1).cpu()
        values.answer[chosen] = (log_probability * answer).sum(-1).cpu()
        for row, index in enumerate(chosen):
            values.tokens[index][:] = log_probability[row][answer[row]].tolist()
        values.prompt[chosen] = (log_probability * prompt).sum(-1).cpu()
    return values


def by_part(
    model: EmbeddedModel, encoder: CachedEncoder, conversations: list[Conversation], arithmetic: Arithmetic = "float32"
) -> dict[str, float]:
    """Accuracy of each part and, as `all`, of them together."""
    exact = measure(model, [encoder.conversation(one) for one in conversations], arithmetic).exact
    indices: dict[str, list[int]] = {}
    for index, one in enumerate(conversations):
        indices.setdefault(one.part, []).append(index)
    accuracies = {part: exact[chosen].float().mean().item() for part, chosen in sorted(indices.items())}
    return accuracies | {"all": exact.float().mean().item()}
