"""The faults that the embedded model must betray, and how accuracy and log-probability under a fault are measured.

Teacher-forced: greedy decoding is exact if and only if every right token is the arg-max after the right tokens before it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tools import embedded_tokenizer
from tools.arithmetic_tasks import Conversation
from tools.embedded_model import RIGHT, Arithmetic, EmbeddedModel, Fault
from tools.training_batches import CachedEncoder, answer_batch

COLLAPSES: dict[str, Fault] = {
    "shared expert zeroed": Fault(shared=0.0),
    "shared expert doubled": Fault(shared=2.0),
    "routed experts zeroed": Fault(routed=0.0),
    "routed experts permuted": Fault(expert_shift=1),
    "scale left out": Fault(scale_power=0),
    "scale applied twice": Fault(scale_power=2),
    "correction bias dropped": Fault(bias=False),
    "group limit ignored": Fault(group_rule="none"),
    "wrong groups (strided)": Fault(group_rule="strided"),
    "wrong groups (worst kept)": Fault(group_rule="worst"),
    "neox rope": Fault(interleaved=False),
    "stale input row (another request's)": Fault(stale="row"),
    "stale input row (last step's, decode)": Fault(stale="step", answer_only=True),
    "page table off by one": Fault(pages="off_by_one"),
}
"""Each must end at half the answers or fewer."""

SMALL: dict[str, Fault] = {
    "shared expert zeroed, one layer": Fault(shared=0.0, layer=2),
    "shared expert doubled, one layer": Fault(shared=2.0, layer=2),
    "shared expert doubled, decode only": Fault(shared=2.0, answer_only=True),
    "routed experts zeroed, one layer": Fault(routed=0.0, layer=2),
    "routed experts permuted, one layer": Fault(expert_shift=1, layer=2),
    "one expert dead, all layers": Fault(dead_expert=3),
    "one expert dead, one layer": Fault(dead_expert=3, layer=2),
    "scale left out, one layer": Fault(scale_power=0, layer=2),
    "bias dropped, one layer": Fault(bias=False, layer=2),
    "bias in the weights": Fault(weigh_with_bias=True),
    "weights not normalised": Fault(normalize=False),
    "one expert fewer": Fault(fewer_experts=1),
    "groups scored by their best": Fault(group_rule="max"),
    "softmax scale without mscale": Fault(mscale=False),
    "plain rope instead of YaRN": Fault(yarn=False),
    "stale input row, one row in eight": Fault(stale="one_row"),
    "first page wrong": Fault(pages="one_wrong"),
}
"""Each must at least lie outside the drift bound."""


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
    fault: Fault = RIGHT,
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
            logits = model(ids, arithmetic, fault, answer)[0][:, :-1]
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
