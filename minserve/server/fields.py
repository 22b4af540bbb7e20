"""Reads one JSON object field by field; every complaint names the field. Knows nothing of what the fields mean."""

from __future__ import annotations

from typing import Any

import msgspec

from minserve.server.api_errors import bad_request

MAX_ELEMENTS = 1 << 16
"""Most objects and arrays of a body."""
MAX_STRINGS = 1 << 17
"""Most strings of a body."""
MAX_VALUES = 1 << 20
"""Most values of a body, token ids among them."""
MAX_VALUES_OF_FIELD = 1 << 18
"""Most values of a field that is not a prompt."""
_COUNTED_AT_ONCE = 1 << 20
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_value_decoder = msgspec.json.Decoder()
_array_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def decode_object(body: bytes | bytearray) -> Fields:
    """The body's top-level object, its values still undecoded. Raises ApiError when it is not one, or holds too many values."""
    _check_structure(body)
    try:
        return Fields(_object_decoder.decode(body))
    except msgspec.ValidationError as error:
        raise bad_request(f"The request body must be a JSON object: {error}", "body") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"The request body is not valid JSON: {error}", "body") from None


def is_integer(value: Any) -> bool:
    """JSON's true and false are no integers, although Python's are."""
    return type(value) is int


def is_number(value: Any) -> bool:
    return type(value) is int or type(value) is float


class Fields:
    """A JSON object whose values are decoded when asked for: a field that nobody knows costs nothing."""

    def __init__(self, raw: dict[str, msgspec.Raw], path: str = ""):
        self._raw = raw
        self._path = path

    def param(self, name: str) -> str:
        """The field's full name, as errors give it."""
        return f"{self._path}{name}"

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        raw = self._raw.get(name)
        return raw is not None and bytes(memoryview(raw)[:4]) != b"null"

    def raw(self, name: str) -> msgspec.Raw | None:
        """The field's undecoded JSON, not copied; None when it is missing or null."""
        return self._raw[name] if self.has(name) else None

    def value(self, name: str) -> Any:
        """The decoded value; None when missing or null."""
        raw = self._raw.get(name)
        return None if raw is None else decode_value(raw, self.param(name))

    def values(self) -> dict[str, Any]:
        """All fields, decoded."""
        return {name: self.value(name) for name in self._raw}

    def boolean(self, name: str, default: bool) -> bool:
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad_request(f"{self.param(name)} must be true or false, not {_shown(value)}", self.param(name))
        return value

    def string(self, name: str) -> str | None:
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise bad_request(f"{self.param(name)} must be a string, not {_shown(value)}", self.param(name))
        return value

    def integer(self, name: str, least: int, most: int | None = None) -> int | None:
        value = self.value(name)
        if value is None:
            return None
        if not is_integer(value):
            raise bad_request(f"{self.param(name)} must be an integer, not {_shown(value)}", self.param(name))
        if value < least or (most is not None and value > most):
            raise bad_request(f"{self.param(name)} must be {_range(least, most)}, not {_shown(value)}", self.param(name))
        number: int = value
        return number

    def number(self, name: str, least: float, most: float, *, above_least: bool = False) -> float | None:
        """A float in [least, most], or in (least, most] with `above_least`."""
        value = self.value(name)
        if value is None:
            return None
        if not is_number(value):
            raise bad_request(f"{self.param(name)} must be a number, not {_shown(value)}", self.param(name))
        if not least <= value <= most or (above_least and value == least):
            low = f"above {least:g}" if above_least else f"at least {least:g}"
            message = f"{self.param(name)} must be {low} and at most {most:g}, not {_shown(value)}"
            raise bad_request(message, self.param(name))
        return float(value)

    def object(self, name: str) -> Fields | None:
        raw = self.raw(name)
        return None if raw is None else _fields(raw, self.param(name))

    def objects(self, name: str) -> list[Fields] | None:
        """The elements of an array of objects."""
        array = self.array(name)
        return None if array is None else [_fields(raw, f"{self.param(name)}[{index}]") for index, raw in enumerate(array)]

    def array(self, name: str) -> list[msgspec.Raw] | None:
        """The elements, still undecoded."""
        if (raw := self.raw(name)) is None:
            return None
        _check_number(raw, self.param(name))
        try:
            return _array_decoder.decode(raw)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise bad_request(f"{self.param(name)} must be an array", self.param(name)) from None


def decode_value(raw: bytes | msgspec.Raw, param: str) -> Any:
    if bytes(memoryview(raw)[:1]) in (b"[", b"{"):
        _check_number(raw, param)
    try:
        return _value_decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"{param} cannot be read: {error}", param) from None


def _fields(raw: msgspec.Raw, param: str) -> Fields:
    try:
        return Fields(_object_decoder.decode(raw), f"{param}.")
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise bad_request(f"{param} must be an object", param) from None


def _check_structure(body: bytes | bytearray) -> None:
    """Refuses what would take long to decode, since a decoder lets no other thread run, and many small values take longest.

    The marks are counted wherever they stand: a text with so many of them is beyond every model's context.
    """
    limits = ((b",", MAX_VALUES, "values"), (b"[{", MAX_ELEMENTS, "objects and arrays"), (b'"', 2 * MAX_STRINGS, "strings"))
    for marks, limit, what in limits:
        if sum(_count(body, bytes([mark]), limit) for mark in marks) > limit:
            raise bad_request(f"The body holds more than {limit} {what}", "body", "body_too_complex")


def _check_number(raw: bytes | msgspec.Raw, param: str) -> None:
    if _count(raw, b",", MAX_VALUES_OF_FIELD) >= MAX_VALUES_OF_FIELD:
        raise bad_request(f"{param} holds more than {MAX_VALUES_OF_FIELD} values", param, "body_too_complex")


def _count(data: bytes | bytearray | msgspec.Raw, mark: bytes, limit: int) -> int:
    """Occurrences of one byte, exact up to `limit`. Counted in pieces: between them other threads run."""
    if len(view := memoryview(data)) <= limit:
        return 0
    return sum(bytes(view[start : start + _COUNTED_AT_ONCE]).count(mark) for start in range(0, len(view), _COUNTED_AT_ONCE))


def _range(least: int, most: int | None) -> str:
    return f"at least {least}" if most is None else f"between {least} and {most}"


def _shown(value: Any) -> str:
    """The value as the client wrote it, cut short: an error must not echo megabytes."""
    if is_integer(value):
        return str(value) if abs(value) < 1 << 128 else "a very large integer"
    text = msgspec.json.encode(value).decode("utf-8", "replace")
    return text if len(text) <= 60 else f"{text[:57]}..."
