"""The embedded model's tokenizer: byte-level BPE with single digits, DeepSeek's special tokens and a chat template like theirs.

Knows the text of the tasks, to learn merges from, and nothing of the model.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools import arithmetic_tasks

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
TOOL_BEGIN = "<｜tool▁output▁begin｜>"
TOOL_END = "<｜tool▁output▁end｜>"
SPECIAL_TOKENS = (
    BOS,
    EOS,
    PAD,
    USER,
    ASSISTANT,
    TOOL_BEGIN,
    TOOL_END,
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<think>",
    "</think>",
)
BOS_ID, EOS_ID, PAD_ID = range(3)

CHAT_TEMPLATE = (
    "{{- bos_token -}}\n"
    "{%- for message in messages if message['role'] == 'system' -%}\n"
    "{{- '\\n\\n' if not loop.first else '' -}}{{- message['content'] -}}\n"
    "{%- endfor -%}\n"
    "{%- for message in messages -%}\n"
    "{%- if message['role'] == 'user' -%}\n"
    f"{{{{- '{USER}' + message['content'] -}}}}\n"
    "{%- elif message['role'] == 'assistant' -%}\n"
    f"{{{{- '{ASSISTANT}' + (message['content'] or '') + eos_token -}}}}\n"
    "{%- elif message['role'] == 'tool' -%}\n"
    f"{{{{- '{TOOL_BEGIN}' + message['content'] + '{TOOL_END}' -}}}}\n"
    "{%- elif message['role'] != 'system' -%}\n"
    "{{- raise_exception('the chat template knows the roles system, user, assistant and tool, not ' + message['role']) -}}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
    f"{{%- if add_generation_prompt -%}}{{{{- '{ASSISTANT}' -}}}}{{%- endif -%}}\n"
)


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer whose merges come from the tasks' own text; the same at every call."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def _corpus() -> list[str]:
    rng = random.Random(0)
    drawn = [arithmetic_tasks.training_turn(rng, 160, first=bool(i % 2))[1] for i in range(2000)]
    questions = [text for turn in drawn for text in (turn.user, turn.assistant)]
    fillers = [arithmetic_tasks.filler(rng, 8) for _ in range(200)]
    return questions + fillers + list(arithmetic_tasks.SYSTEM_PROMPTS) * 20


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template inside the second."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": max_length,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
