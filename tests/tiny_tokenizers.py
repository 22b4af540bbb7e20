"""Builds small tokenizers of every kind that the server reads, each a directory as a checkpoint ships it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
THINK = "<think>"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. 12 + 345 = 357\n",
    "안녕하세요 세계, こんにちは世界, 你好世界 👍🏽 👩‍👩‍👧 é ü ñ\n",
    "def add(a, b):\n    return a + b  # sum\n",
] * 4
KINDS = ("byte_level", "sentencepiece", "metaspace", "word_level")


def write_tokenizer(directory: Path, kind: str, **config: Any) -> Path:
    """A tokenizer.json of one of KINDS, and a tokenizer_config.json with `config` beside the usual fields."""
    tokenizer = {"byte_level": _byte_level, "sentencepiece": _sentencepiece, "metaspace": _metaspace, "word_level": _word_level}[
        kind
    ]()
    # "né e" holds letters of the byte alphabet beside a space, which is not one of them.
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (THINK, "</think>", "né e")])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return _write_config(directory, config)


def write_tiktoken(directory: Path, words: list[bytes], added_tokens: dict[int, tuple[str, bool]], **config: Any) -> Path:
    """A tiktoken.model: the 256 bytes, then `words` with everything that merges into them; specials are (text, special)."""
    tokens: dict[bytes, int] = {bytes([byte]): byte for byte in range(256)}
    for word in words:
        for end in range(2, len(word) + 1):
            tokens.setdefault(word[:end], len(tokens))
    directory.mkdir(parents=True, exist_ok=True)
    lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in tokens.items()]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    named = {str(len(tokens) + offset): {"content": text, "special": special} for offset, (text, special) in added_tokens.items()}
    return _write_config(directory, {"added_tokens_decoder": named, **config})


def _write_config(directory: Path, config: dict[str, Any]) -> Path:
    defaults = {"bos_token": BOS, "eos_token": {"content": EOS, "special": True}}
    (directory / "tokenizer_config.json").write_text(json.dumps({**defaults, **config}))
    return directory


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=[BOS, EOS, PAD], show_progress=False),
    )
    return tokenizer


def _sentencepiece() -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(CORPUS[:1], trainers.BpeTrainer(vocab_size=80, show_progress=False))
    parts = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", BOS, EOS, PAD, *byte_tokens, *sorted(parts["vocab"], key=parts["vocab"].__getitem__)]
    vocabulary = {token: token_id for token_id, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [tuple(pair) for pair in parts["merges"]], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", BOS, EOS, PAD])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return tokenizer


def _metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", BOS, EOS, PAD], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", BOS, EOS, PAD], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer
