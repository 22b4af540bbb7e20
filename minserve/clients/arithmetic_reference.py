"""The stored side of the arithmetic eval: held-out conversations, their right answers, what float32 gave them. Knows no HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2.sandbox
import msgspec
from tokenizers import Tokenizer

from minserve.config import EMBEDDED_DIRECTORY


class Item(msgspec.Struct, frozen=True):
    """One held-out question."""

    part: str
    messages: list[dict[str, str]]
    answer: str
    log_probabilities: list[float]
    """Of the right answer's tokens, and the end of the turn; float32, in nats."""
    prompt_log_probability: float
    """Sum over the prompt's tokens, the first not counted."""


class Reference(msgspec.Struct, frozen=True):
    """A whole reference file."""

    answer_bound: float
    """Most drift of an answer's log-probability, mean over answers."""
    prompt_bound: float
    """Most drift of a prompt token's log-probability, mean over tokens."""
    items: list[Item]


def load_reference(directory: Path = EMBEDDED_DIRECTORY) -> Reference:
    return msgspec.json.decode((directory / "arithmetic.json").read_bytes(), type=Reference)


class PromptTokens:
    """Token ids of an item's prompt and answer, by the checkpoint's own tokenizer and chat template."""

    def __init__(self, directory: Path = EMBEDDED_DIRECTORY) -> None:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        self._names = {name: config[name] for name in ("bos_token", "eos_token")}
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(config["chat_template"])
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def of(self, item: Item) -> tuple[list[int], list[int]]:
        """(prompt, right answer with the end of the turn)."""
        prompt, answer = (self._tokenizer.encode(text, add_special_tokens=False).ids for text in self.texts(item))
        return prompt, answer

    def texts(self, item: Item) -> tuple[str, str]:
        """The same as texts, special tokens written out."""
        prompt = self._template.render(messages=item.messages, add_generation_prompt=True, **self._names)
        return prompt, item.answer + self._names["eos_token"]
