"""What a client asks of an answer's form: the fields of a request, checked as far as they can be without compiling anything.

Knows nothing of grammars, tools or reasoning.
"""

from __future__ import annotations

import dataclasses
import decimal
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from minserve.server.api_errors import bad_request
from minserve.server.fields import Fields, decode_value

MAX_SCHEMA_BYTES = 1 << 17
MAX_DEPTH = 128
"""Of a schema's objects and arrays."""
MAX_REGEX_LENGTH = 1 << 14
MAX_CHOICES = 2048
MAX_CHOICES_LENGTH = 1 << 17
"""Characters of all choices together."""
MAX_MULTIPLE = 10_000
"""Product of a schema's `multipleOf` numbers, decimal points left out: the states that a grammar needs to count remainders."""
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Those that can be enforced; JSON Schema says of unknown ones that they mean nothing."""
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
"""Keywords whose values are data, not schemas."""


@dataclasses.dataclass(frozen=True, slots=True)
class OutputForm:
    """Exactly one of a JSON schema, a regular expression and a list of texts."""

    kind: Literal["schema", "regex", "choice"]
    value: Any
    """dict[str, Any], str or tuple[str, ...]."""
    param: str
    """The field that asked for it, for errors."""


def parse_form(fields: Fields) -> OutputForm | None:
    """`response_format`, `guided_json`, `guided_regex`, `guided_choice` and `structured_outputs`, at most one of them.

    Raises ApiError naming the field.
    """
    found = [form for form in (_response_format(fields), *_guided(fields), *_structured_outputs(fields)) if form is not None]
    if len(found) > 1:
        message = f"{found[0].param} and {found[1].param} exclude each other"
        raise bad_request(message, found[1].param)
    return found[0] if found else None


def _response_format(fields: Fields) -> OutputForm | None:
    asked = fields.object("response_format")
    if asked is None:
        return None
    kind = asked.string("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return OutputForm("schema", {"type": "object"}, "response_format")
    if kind != "json_schema":
        message = f"response_format.type is {str(kind)[:40]!r}; it must be 'text', 'json_object' or 'json_schema'"
        raise bad_request(message, "response_format.type")
    named = asked.object("json_schema")
    if named is None:
        raise bad_request("response_format.json_schema is required", "response_format.json_schema")
    raw = named.raw("schema")
    if raw is None:
        raise bad_request("response_format.json_schema.schema is required", "response_format.json_schema.schema")
    return _schema(raw, "response_format.json_schema.schema")


def _guided(fields: Fields) -> Iterator[OutputForm | None]:
    yield _json_field(fields, "guided_json")
    yield _regex_field(fields, "guided_regex")
    yield _choice_field(fields, "guided_choice")


def _structured_outputs(fields: Fields) -> Iterator[OutputForm | None]:
    asked = fields.object("structured_outputs")
    if asked is None:
        return
    for name in ("grammar", "structural_tag"):
        if asked.has(name):
            raise bad_request(f"structured_outputs.{name} is not supported", f"structured_outputs.{name}")
    yield _json_field(asked, "json")
    yield _regex_field(asked, "regex")
    yield _choice_field(asked, "choice")
    if asked.boolean("json_object", False):
        yield OutputForm("schema", {"type": "object"}, asked.param("json_object"))


def _json_field(fields: Fields, name: str) -> OutputForm | None:
    """A schema, or the text of one."""
    raw = fields.raw(name)
    if raw is None:
        return None
    value = decode_value(raw, fields.param(name))
    return _schema(value.encode("utf-8", "replace") if isinstance(value, str) else raw, fields.param(name))


def _regex_field(fields: Fields, name: str) -> OutputForm | None:
    regex = fields.string(name)
    if regex is None:
        return None
    if not 0 < len(regex) <= MAX_REGEX_LENGTH:
        raise bad_request(f"{fields.param(name)} must have 1 to {MAX_REGEX_LENGTH} characters", fields.param(name))
    return OutputForm("regex", regex, fields.param(name))


def _choice_field(fields: Fields, name: str) -> OutputForm | None:
    choices = fields.value(name)
    if choices is None:
        return None
    param = fields.param(name)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise bad_request(f"{param} must be an array of strings that are not empty, at least one", param)
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_CHOICES_LENGTH:
        raise bad_request(f"{param} holds at most {MAX_CHOICES} strings of {MAX_CHOICES_LENGTH} characters together", param)
    return OutputForm("choice", tuple(dict.fromkeys(choices)), param)


def _schema(raw: bytes | msgspec.Raw, param: str) -> OutputForm:
    if len(bytes(raw)) > MAX_SCHEMA_BYTES:
        raise bad_request(f"{param} is over the limit of {MAX_SCHEMA_BYTES} bytes", param)
    return OutputForm("schema", checked_schema(decode_value(raw, param), param), param)


def checked_schema(schema: Any, param: str) -> dict[str, Any]:
    """A JSON schema without what cannot be enforced and may be ignored. Raises ApiError for what would explode."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise bad_request(f"{param} must be a JSON schema: an object", param)
    try:
        cleaned, multiples = _clean(schema, MAX_DEPTH)
    except _TooDeepError:
        raise bad_request(f"{param} is nested more than {MAX_DEPTH} levels deep", param) from None
    if multiples > MAX_MULTIPLE:
        raise bad_request(f"{param}: the numbers of multipleOf are too large to be enforced", param)
    made: dict[str, Any] = cleaned
    return made


class _TooDeepError(Exception):
    pass


def _clean(part: Any, depth: int) -> tuple[Any, int]:
    """A schema or a part of one without unknown formats, and the product of its multiples."""
    if depth == 0:
        raise _TooDeepError
    if isinstance(part, list):
        cleaned = [_clean(element, depth - 1) for element in part]
        return [element for element, _ in cleaned], _product([multiple for _, multiple in cleaned])
    if not isinstance(part, dict):
        return part, 1
    made: dict[str, Any] = {}
    multiples = [_multiple(part.get("multipleOf"))]
    for key, value in part.items():
        if key in _DATA:
            made[key] = value
        elif not (key == "format" and isinstance(value, str) and value not in _FORMATS):
            made[key], multiple = _clean(value, depth - 1)
            multiples.append(multiple)
    return made, _product(multiples)


def _product(numbers: list[int]) -> int:
    product = 1
    for number in numbers:
        product = min(product * number, MAX_MULTIPLE + 1)
    return product


def _multiple(value: Any) -> int:
    """The digits of a number without its decimal point: 0.25 is 25."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1
    sign, digits, exponent = decimal.Decimal(repr(value)).as_tuple()
    del sign
    if not isinstance(exponent, int) or exponent > 18:
        return MAX_MULTIPLE + 1
    number: int = int("".join(map(str, digits))) * 10 ** max(0, exponent)
    while exponent < 0 and number and number % 10 == 0:
        number, exponent = number // 10, exponent + 1
    return max(1, number)
