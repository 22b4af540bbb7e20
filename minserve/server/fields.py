"""Reads a JSON object into typed structs; every complaint names the field. Knows nothing of what the fields mean."""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar, get_args

import msgspec

from minserve.server.api_errors import ApiError, bad_request

MAX_ELEMENTS = 1 << 16
"""Most objects and arrays of a body."""
MAX_STRINGS = 1 << 17
"""Most strings of a body."""
MAX_VALUES = 1 << 20
"""Most values of a body, token ids among them."""
MAX_VALUES_OF_FIELD = 1 << 18
"""Most values of a field that is not a prompt."""
_PROMPTS = frozenset({"prompt", "tokens"})
_COUNTED_AT_ONCE = 1 << 20
_LONGEST_COMPLAINT = 300
_UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
_TYPES = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "an array"}
_LENGTHS = {"of length >=": "with a length of at least", "of length <=": "with a length of at most"}
_WORDS = {"`": "", " | ": " or ", "Expected ": "must be ", ", got ": ", not ", "object": "an object", **_TYPES, **_LENGTHS}
"""What msgspec says, in words of JSON."""
_WORD = re.compile("|".join(map(re.escape, _WORDS)))
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_value_decoder = msgspec.json.Decoder()

RawFields = dict[str, msgspec.Raw]
"""An object's fields, undecoded: one that nobody knows costs nothing."""
T = TypeVar("T", bound=msgspec.Struct)


def decode_object(body: bytes | bytearray) -> RawFields:
    """The body's top-level object. Fields that are null are left out, as if they were missing.

    Raises ApiError when it is no object, or holds too many values.
    """
    if not body:
        raise bad_request("The request body is empty; it must be a JSON object", "body")
    _check_structure(body)
    try:
        fields = _object_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(error, "body") from None
    except _UNREADABLE as error:
        raise _unreadable(error, "The request body is not valid JSON", "body") from None
    return {name: raw for name, raw in fields.items() if not is_null(raw)}


def is_null(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:4]) == b"null"


class Reader(Generic[T]):
    """Makes a struct of those fields that it knows."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self._decoders = {field.name: msgspec.json.Decoder(field.type) for field in msgspec.structs.fields(kind)}

    def read(self, fields: RawFields) -> T:
        """Raises ApiError for a value of another type or out of its range."""
        known = {name: decoder for name, decoder in self._decoders.items() if name in fields}
        return self._kind(**{name: decode_value(fields[name], name, decoder) for name, decoder in known.items()})


def decode_value(raw: bytes | bytearray | msgspec.Raw, param: str, decoder: msgspec.json.Decoder[Any] = _value_decoder) -> Any:
    """One value, by default of any type. Raises ApiError naming what is wrong within `param`."""
    if param not in _PROMPTS and _count(raw, b",", MAX_VALUES_OF_FIELD) >= MAX_VALUES_OF_FIELD:
        raise bad_request(f"{param} holds more than {MAX_VALUES_OF_FIELD} values", param, "body_too_complex")
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        if re.fullmatch(r"Expected `(float|int)` [<>]=? \S+", str(error)):
            raise bad_request(f"{param} must be {_bounds(decoder.type)}, not {_shown(raw)}", param) from None
        raise invalid(error, param) from None
    except _UNREADABLE as error:
        raise _unreadable(error, f"{param} cannot be read", param) from None


def _unreadable(error: Exception, said: str, param: str) -> ApiError:
    return bad_request(f"{said}: {'it is nested too deeply' if isinstance(error, RecursionError) else error}", param)


def _bounds(kind: Any) -> str:
    meta = next(meta for part in (kind, *get_args(kind)) for meta in get_args(part) if isinstance(meta, msgspec.Meta))
    said = (("at least", meta.ge), ("above", meta.gt), ("at most", meta.le))
    return " and ".join(f"{words} {bound}" for words, bound in said if bound is not None)


def _shown(raw: bytes | bytearray | msgspec.Raw) -> str:
    """As the client wrote it, cut short: an error must not echo megabytes."""
    text = bytes(memoryview(raw)[:60]).decode("utf-8", "replace")
    return text if len(memoryview(raw)) <= 60 else f"{text}..."


def read_part(part: dict[str, Any], kind: type[T], param: str) -> T:
    """A struct of those members of the object at `param` that it knows. Raises ApiError naming what is wrong."""
    try:
        return msgspec.convert(part, kind)
    except msgspec.ValidationError as error:
        raise invalid(error, param) from None


def invalid(error: msgspec.ValidationError, param: str) -> ApiError:
    """What msgspec has to say of the value at `param`, in a sentence with the name of the field.

    The param is the field, or the object in an array; of an element that is no object, the array.
    """
    split = re.fullmatch(r"(.*?)(?: - at `\$(.*)`)?", str(error), re.DOTALL)
    assert split is not None
    text, path = split[1][:_LONGEST_COMPLAINT], param + (split[2] or "")
    place = path.removesuffix("[...]")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        return bad_request(f"{place}.{missing[1]} is required", f"{place}.{missing[1]}")
    if text.startswith("Expected"):
        said = _WORD.sub(lambda match: _WORDS[match[0]], text)
    elif text.startswith("Invalid enum value"):
        said = "is not supported"
    else:
        said = f"cannot be read: {text}"
    of_object = text.startswith("Expected `object`")
    subject = place if path == place else f"a value in {place}"
    return bad_request(f"{subject} {said}", place if of_object else re.sub(r"\[\d+\]$", "", place))


def spelled(value: Any) -> str:
    """A value in the sentence of an error: as JSON, cut short. Of null and of what is not there the sentence says the same."""
    return "missing" if value is None else _shown(msgspec.json.encode(value))


def _check_structure(body: bytes | bytearray) -> None:
    """Refuses what would take long to decode, since a decoder lets no other thread run, and many small values take longest.

    The marks are counted wherever they stand: a text with so many of them is beyond every model's context.
    """
    limits = ((b",", MAX_VALUES, "values"), (b"[{", MAX_ELEMENTS, "objects and arrays"), (b'"', 2 * MAX_STRINGS, "strings"))
    for marks, limit, what in limits:
        if sum(_count(body, bytes([mark]), limit) for mark in marks) > limit:
            raise bad_request(f"The body holds more than {limit} {what}", "body", "body_too_complex")


def _count(data: bytes | bytearray | msgspec.Raw, mark: bytes, limit: int) -> int:
    """Occurrences of one byte, exact up to `limit`. Counted in pieces: between them other threads run."""
    if len(view := memoryview(data)) <= limit:
        return 0
    return sum(bytes(view[start : start + _COUNTED_AT_ONCE]).count(mark) for start in range(0, len(view), _COUNTED_AT_ONCE))
