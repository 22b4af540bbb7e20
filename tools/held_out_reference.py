"""How the trainer's model does on held-out conversations, and `arithmetic.json`: those of `minserve eval arithmetic`, in float32.

Teacher-forced: greedy decoding is exact if and only if every right token is the arg-max after the right tokens before it.
`python -m tools.held_out_reference` renews the file of the checkpoint inside the package.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from minserve.config import EMBEDDED_DIRECTORY
from tools import arithmetic_tasks, embedded_tokenizer
from tools.arithmetic_tasks import Conversation
from tools.embedded_checkpoint import load_checkpoint
from tools.embedded_model import Arithmetic, EmbeddedModel
from tools.training_batches import CachedEncoder, answer_batch

SEED = 7
OF_EACH = 80
ANSWER_BOUND = 0.01
PROMPT_BOUND = 0.02
"""Both in nats. What bf16 costs is several times smaller, what the smallest fault costs several times larger: see fault_table."""


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


def write_reference(directory: Path, of_each: int = OF_EACH) -> None:
    """Measure the checkpoint in `directory` in float32 on the CPU and write its arithmetic.json."""
    model = load_checkpoint(directory)
    encoder = CachedEncoder(Tokenizer.from_file(str(directory / "tokenizer.json")))
    conversations = arithmetic_tasks.held_out_conversations(SEED, of_each)
    values = measure(model, [encoder.conversation(one) for one in conversations])
    items = [
        {
            "part": one.part,
            "messages": one.messages()[:-1],
            "answer": one.turns[-1].assistant,
            "log_probabilities": [round(value, 6) for value in values.tokens[index]],
            "prompt_log_probability": round(values.prompt[index].item(), 4),
        }
        for index, one in enumerate(conversations)
    ]
    lines = ",\n".join(json.dumps(item, ensure_ascii=False) for item in items)
    header = f'{{"answer_bound": {ANSWER_BOUND}, "prompt_bound": {PROMPT_BOUND}, "items": [\n'
    (directory / "arithmetic.json").write_text(f"{header}{lines}\n]}}\n", encoding="utf-8")


def main() -> int:
    torch.set_num_threads(2)
    write_reference(EMBEDDED_DIRECTORY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
