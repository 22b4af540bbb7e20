"""Writes `arithmetic.json`: the held-out conversations of `minserve eval arithmetic` and the embedded model's float32 values.

`python -m tools.held_out_reference` renews the file of the checkpoint inside the package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

from minserve.config import EMBEDDED_DIRECTORY
from tools import arithmetic_tasks
from tools.embedded_checkpoint import load_checkpoint
from tools.embedded_measure import measure
from tools.training_batches import CachedEncoder

SEED = 7
OF_EACH = 80
ANSWER_BOUND = 0.01
PROMPT_BOUND = 0.02
"""Both in nats. What bf16 costs is several times smaller, what the smallest fault costs several times larger: see fault_table."""


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
