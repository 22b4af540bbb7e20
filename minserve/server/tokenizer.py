"""A checkpoint's tokenizer as the edge needs it: prompts to ids, ids to text, BOS, EOS and the chat template.

Knows nothing of HTTP or of requests; text that arrives token by token is detokenizer.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from minserve.errors import CheckpointError, UsageError
from minserve.messages import Vocabulary
from minserve.server.chat_template import ChatTemplate
from minserve.server.detokenizer import Detokenizer
from minserve.server.encoders import AddedToken, Encoder, JsonEncoder, NumberEncoder, TiktokenEncoder, read_file
from minserve.server.token_pieces import TokenPieces


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """The fields of tokenizer_config.json that are read; the named tokens are a string or an object with `content`."""

    bos_token: str | AddedToken | None = None
    eos_token: str | AddedToken | None = None
    unk_token: str | AddedToken | None = None
    sep_token: str | AddedToken | None = None
    pad_token: str | AddedToken | None = None
    cls_token: str | AddedToken | None = None
    mask_token: str | AddedToken | None = None
    add_bos_token: bool | None = None
    added_tokens_decoder: dict[int, AddedToken] = {}
    chat_template: str | list[_NamedTemplate] | None = None

    def named_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and kin to their text."""
        tokens = {name: getattr(self, f"{name}_token") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
        given = {f"{name}_token": token for name, token in tokens.items() if token is not None}
        return {name: token if isinstance(token, str) else token.content for name, token in given.items()}


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _ModelConfig(msgspec.Struct):
    vocab_size: int | None = None
    text_config: _ModelConfig | None = None


_Section = TypeVar("_Section", _TokenizerConfig, _GenerationConfig, _ModelConfig)


class Tokenizer:
    """Read-only after load; every method may be called from any thread."""

    def __init__(
        self, encoder: Encoder, config: _TokenizerConfig, generation: _GenerationConfig, templates: Mapping[str, str]
    ) -> None:
        """`templates`: name to source."""
        self._encoder = encoder
        self.pieces: TokenPieces = encoder.pieces
        named = config.named_tokens()
        self.template = ChatTemplate(templates, named)
        self.bos_token_id = self.token_id(named.get("bos_token"))
        more = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
        ends = [self.token_id(named.get("eos_token")), *more]
        self.eos_token_ids = tuple(dict.fromkeys(end for end in ends if end is not None))
        """Of tokenizer_config.json and generation_config.json; the engine adds config.json's."""
        if config.add_bos_token is None:
            self._leading_ids = encoder.leading_ids()
        else:
            self._leading_ids = [self.bos_token_id] if config.add_bos_token and self.bos_token_id is not None else []

    @classmethod
    def load(
        cls, model_dir: Path, tokenizer_dir: str | None = None, chat_template: str | None = None, *, dummy: bool = False
    ) -> Tokenizer:
        """Reads tokenizer.json or tiktoken.model, the configs and the template beside it.

        `tokenizer_dir` replaces `model_dir` for all but generation_config.json; `chat_template` is a file's path. A `dummy`
        model needs no tokenizer: without one, token ids are written as numbers.
        Raises CheckpointError for missing or damaged files, UsageError for a wrong `tokenizer_dir` or `chat_template`.
        """
        directory = model_dir if tokenizer_dir is None else Path(tokenizer_dir)
        if not directory.is_dir():
            raise UsageError(f"--tokenizer: {directory} is not a directory")
        config = _read(directory / "tokenizer_config.json", _TokenizerConfig)
        generation = _read(model_dir / "generation_config.json", _GenerationConfig)
        encoder = _encoder(directory, config.added_tokens_decoder, dummy=dummy)
        return cls(encoder, config, generation, _templates(directory, config, chat_template))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that the tokenizer knows; the model's own vocabulary may be larger."""
        return len(self.pieces.pieces)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt; with `add_special_tokens` exactly one BOS in front where this tokenizer uses one.

        A long text takes long; call it in a thread then (it releases the GIL).
        """
        token_ids = self._encoder.encode(_without_surrogates(text))
        return self._with_one_bos(token_ids) if add_special_tokens else token_ids

    def fewest_tokens(self, num_bytes: int) -> int:
        """No text of so many UTF-8 bytes has fewer tokens; 0 where nothing is known. For refusing before encoding."""
        limit = self._encoder.bytes_per_token
        return -(-num_bytes // limit) if limit else 0

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are no character become U+FFFD, ids outside the vocabulary nothing."""
        detokenizer = Detokenizer(self.pieces, skip_special_tokens=skip_special_tokens)
        return "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token on its own, its leading space included."""
        return self.pieces.piece(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def vocabulary(self) -> Vocabulary:
        """What each token stands for within a text, as the engines' grammars need it."""
        separator = self.pieces.separator.encode()
        pieces = (
            [separator + piece if piece else piece for piece in self.pieces.pieces] if separator else list(self.pieces.pieces)
        )
        return Vocabulary(pieces, sorted(self.pieces.special))

    def special_token_ids(self) -> dict[str, int]:
        """Text to id of the added tokens that `skip_special_tokens` leaves out."""
        return {text: token_id for text, token_id in self._encoder.added_tokens.items() if token_id in self.pieces.special}

    def token_id(self, token: str | None) -> int | None:
        """The id of an added token by its text, such as `<think>`; None when the tokenizer has no such single token."""
        if token is None:
            return None
        if (token_id := self._encoder.added_tokens.get(token)) is not None:
            return token_id
        token_ids = self._encoder.encode(token)
        return token_ids[0] if len(token_ids) == 1 and self.token_text(token_ids[0]) == token else None

    def _with_one_bos(self, token_ids: list[int]) -> list[int]:
        if not self._leading_ids:
            return token_ids
        num_bos = next((i for i, token_id in enumerate(token_ids) if token_id != self.bos_token_id), len(token_ids))
        token_ids = token_ids[max(num_bos - 1, 0) :]
        if token_ids[: len(self._leading_ids)] == self._leading_ids:
            return token_ids
        return self._leading_ids + token_ids


def _without_surrogates(text: str) -> str:
    """JSON can carry lone surrogates, which are no text: each becomes U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _encoder(directory: Path, added_tokens: Mapping[int, AddedToken], *, dummy: bool) -> Encoder:
    if (path := directory / "tokenizer.json").is_file():
        return JsonEncoder(path, added_tokens)
    if (path := directory / "tiktoken.model").is_file():
        return TiktokenEncoder(path, added_tokens)
    sizes = _read(directory / "config.json", _ModelConfig)
    vocab_size = sizes.vocab_size or (sizes.text_config and sizes.text_config.vocab_size)
    if dummy and vocab_size:
        return NumberEncoder(vocab_size)
    raise CheckpointError(f"{directory}: neither tokenizer.json nor tiktoken.model is there")


def _templates(directory: Path, config: _TokenizerConfig, chosen: str | None) -> dict[str, str]:
    """Name to source. The flag wins, then the template files, then tokenizer_config.json."""
    if chosen is not None:
        try:
            return {"default": Path(chosen).read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--chat-template: {chosen} cannot be read: {error}") from error
    templates: dict[str, str] = {}
    if isinstance(config.chat_template, str):
        templates["default"] = config.chat_template
    elif config.chat_template is not None:
        templates.update((named.name, named.template) for named in config.chat_template)
    if (path := directory / "chat_template.jinja").is_file():
        templates["default"] = _read_text(path)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    return templates


def _read_text(path: Path) -> str:
    try:
        return read_file(path).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is no UTF-8 text: {error}") from error


def _read(path: Path, kind: type[_Section]) -> _Section:
    """A JSON file as `kind`, or its defaults when the file is not there."""
    if not path.is_file():
        return kind()
    try:
        return msgspec.json.decode(read_file(path), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error
