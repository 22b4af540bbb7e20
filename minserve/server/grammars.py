"""The grammar of an answer: a form that the client asked for, tool calls that it demanded, or either. Knows no HTTP.

Fields are checked as far as they can be without compiling anything, then the grammar is built, in llguidance's dialect of Lark.
The library is imported and run in a worker's thread only, on a request's first use of it: checking a grammar takes milliseconds,
and seconds where a client is out to make it long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from minserve.request import Grammar
from minserve.server.api_errors import bad_request
from minserve.server.fields import RawFields, Reader, decode_value, spelled
from minserve.server.qwen_calls import json_string, parameter_types, resolve
from minserve.server.tool_formats import ARGUMENTS, NAME, NUMBER, CallLayout

MAX_SCHEMA_LENGTH = 1 << 17
"""Characters of its JSON."""
MAX_DEPTH = 128
"""Of a schema's objects and arrays."""
MAX_REGEX_LENGTH = 1 << 14
MAX_CHOICES = 2048
MAX_CHOICES_LENGTH = 1 << 17
"""Characters of all choices together."""
MAX_MULTIPLE = 10_000
"""Product of a schema's `multipleOf` numbers, decimal points left out: the states that a grammar needs to count remainders."""
MAX_PATTERNS = 8
"""Patterns that one text has to match at once: whether any text does is found out in time and memory that double with each."""
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


class _FormFields(msgspec.Struct):
    response_format: dict[str, Any] = {}
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    structured_outputs: dict[str, Any] = {}


_form_fields = Reader(_FormFields)


def parse_form(fields: RawFields) -> OutputForm | None:
    """`response_format`, `guided_json`, `guided_regex`, `guided_choice` and `structured_outputs`, at most one of them.

    Raises ApiError naming the field.
    """
    asked = _form_fields.read(fields)
    structured = asked.structured_outputs
    for name in ("grammar", "structural_tag"):
        if structured.get(name) is not None:
            raise bad_request(f"structured_outputs.{name} is not supported", f"structured_outputs.{name}")
    found = [_response_format(asked.response_format)] if "response_format" in fields else []
    for value, param, make in (
        (asked.guided_json, "guided_json", _schema),
        (asked.guided_regex, "guided_regex", _regex),
        (asked.guided_choice, "guided_choice", _choice),
        (structured.get("json"), "structured_outputs.json", _schema),
        (structured.get("regex"), "structured_outputs.regex", _regex),
        (structured.get("choice"), "structured_outputs.choice", _choice),
        (structured.get("json_object") or None, "structured_outputs.json_object", _any_object),
    ):
        if value is not None:
            found.append(make(value, param))
    forms = [form for form in found if form is not None]
    if len(forms) > 1:
        message = f"{forms[0].param} and {forms[1].param} exclude each other"
        raise bad_request(message, forms[1].param)
    return forms[0] if forms else None


def _response_format(asked: dict[str, Any]) -> OutputForm | None:
    kind, named = asked.get("type"), asked.get("json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        return _any_object(True, "response_format")
    if kind != "json_schema":
        message = f'response_format.type is {spelled(kind)}; it must be "text", "json_object" or "json_schema"'
        raise bad_request(message, "response_format.type")
    param = "response_format.json_schema"
    if not isinstance(named, dict):
        raise bad_request(f"{param} must be an object with the member schema", param)
    return _schema(named.get("schema"), f"{param}.schema")


def _any_object(wanted: Any, param: str) -> OutputForm:
    if wanted is not True:
        raise bad_request(f"{param} must be true or false", param)
    return OutputForm("schema", {"type": "object"}, param)


def _schema(value: Any, param: str) -> OutputForm:
    """A schema, or the text of one."""
    if isinstance(value, str):
        value = decode_value(value.encode("utf-8", "replace"), param)
    with contextlib.suppress(RecursionError):  # which is said better below
        if len(json.dumps(value)) > MAX_SCHEMA_LENGTH:
            raise bad_request(f"{param} is over the limit of {MAX_SCHEMA_LENGTH} characters", param)
    return OutputForm("schema", checked_schema(value, param), param)


def _regex(value: Any, param: str) -> OutputForm:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_REGEX_LENGTH:
        raise bad_request(f"{param} must be a string of 1 to {MAX_REGEX_LENGTH} characters", param)
    return OutputForm("regex", value, param)


def _choice(value: Any, param: str) -> OutputForm:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise bad_request(f"{param} must be an array of strings that are not empty, at least one", param)
    if len(value) > MAX_CHOICES or sum(map(len, value)) > MAX_CHOICES_LENGTH:
        raise bad_request(f"{param} holds at most {MAX_CHOICES} strings of {MAX_CHOICES_LENGTH} characters together", param)
    return OutputForm("choice", tuple(dict.fromkeys(value)), param)


def checked_schema(schema: Any, param: str) -> dict[str, Any]:
    """A JSON schema without what cannot be enforced and may be ignored. Raises ApiError for what would explode."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise bad_request(f"{param} must be a JSON schema: an object", param)
    multiples: list[int] = []
    try:
        made: dict[str, Any] = _clean(schema, MAX_DEPTH, multiples)
        num_patterns = _patterns_at_once(made)
    except RecursionError:
        raise bad_request(f"{param} has more than {MAX_DEPTH} levels of references or nesting", param) from None
    product = 1
    for multiple in multiples:
        product = min(product * multiple, MAX_MULTIPLE + 1)
    if product > MAX_MULTIPLE:
        raise bad_request(f"{param}: the numbers of multipleOf are too large to be enforced", param)
    if num_patterns > MAX_PATTERNS:
        raise bad_request(f"{param} may hold one value to {num_patterns} patterns at once; {MAX_PATTERNS} are possible", param)
    return made


def _patterns_at_once(root: dict[str, Any]) -> int:
    """How many patterns of a schema one text may have to match together: rather too many than too few."""
    everywhere = json.dumps(root).count('"pattern"')
    known: dict[int, int] = {}

    def counted(part: Any, depth: int) -> int:
        """What stands side by side adds up, of alternatives and of what holds for different values the most counts."""
        if isinstance(part, list):
            return max((counted(element, depth) for element in part), default=0)
        if not isinstance(part, dict):
            return 0
        if depth == 0:
            raise RecursionError
        if id(part) in known:
            return known[id(part)]
        known[id(part)] = 0  # while it is counted: a reference back to it adds nothing
        count = int(isinstance(part.get("pattern"), str))
        for key, value in part.items():
            if key == "allOf" and isinstance(value, list):
                count += sum(counted(element, depth - 1) for element in value)
            elif key == "$ref" and isinstance(value, str):
                target = resolve(value, root)
                count += everywhere if target is None else counted(target, depth - 1)
            elif key in ("properties", "patternProperties") and isinstance(value, dict):
                count += counted(list(value.values()), depth - 1)
            elif key not in ("$defs", "definitions", *_DATA):
                count += counted(value, depth - 1)
        known[id(part)] = count
        return count

    return counted(root, MAX_DEPTH)


def _clean(part: Any, depth: int, multiples: list[int]) -> Any:
    """A schema or a part of one without unknown formats; adds what it may only hold multiples of."""
    if depth == 0:
        raise RecursionError
    if isinstance(part, list):
        return [_clean(element, depth - 1, multiples) for element in part]
    if not isinstance(part, dict):
        return part
    multiples.append(_digits(part.get("multipleOf")))
    known = {key: value for key, value in part.items() if key != "format" or not isinstance(value, str) or value in _FORMATS}
    return {key: value if key in _DATA else _clean(value, depth - 1, multiples) for key, value in known.items()}


def _digits(number: Any) -> int:
    """Those of a number without its decimal point: 0.25 is 25. Of anything else 1."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return 1
    plain = f"{abs(decimal.Decimal(repr(number))).normalize():f}"
    return max(1, int(plain.replace(".", "")))


MAX_GRAMMAR_LENGTH = 1 << 20
_HEADER = '%llguidance {"no_forcing": true}\n'  # the model chooses how to spell in tokens what the grammar leaves no choice of
_SPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,64}"
"""White space within JSON: without a bound a model may write nothing else."""
_CALLABLE = re.compile(r"[^\s<>{}\"'\\:`=]{1,128}")
_STRING = frozenset({"string"})
_OPENING = frozenset({"anyOf", "allOf", "oneOf", "$ref", "patternProperties"})
"""Beside these, `properties` need not be all that a schema names."""
_NUMBER = "/[0-9]{1,3}/"
_END_TAG = "\n</parameter>\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForcedCalls:
    """Tool calls as the only or as one possible answer."""

    layout: CallLayout
    marks: Mapping[str, int]
    """Marks that are special tokens, with their ids."""
    tools: Sequence[Mapping[str, Any]]
    """Those that may be called."""
    one_call: bool
    instead: bool
    """Beside a form: the answer may be in either."""


def build_grammar(
    form: OutputForm | None, calls: ForcedCalls | None = None, starts_after: str = "", opened_by: int | None = None
) -> Grammar | None:
    """None when anything may be said. The last two: see Grammar. Raises ApiError 400, naming the field, for what cannot be."""
    rules = _Rules()
    ways: list[str] = []
    if form is not None and (calls is None or calls.instead):
        ways.append(rules.of_form(form))
    if calls is not None:
        ways.append(rules.of_calls(calls))
    if not ways:
        return None
    lead = "/\\n{1,2}/? " if starts_after else ""
    text = f"{_HEADER}start: {lead}answer\nanswer: {' | '.join(ways)}\n{rules.text()}"
    _check(text, form.param if form is not None else "tools")
    return Grammar(text, starts_after, opened_by)


def _check(text: str, param: str) -> None:
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise bad_request(f"{param} is too large to be enforced", param)
    import llguidance

    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text)
    if failed:
        reason = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", messages[0].split("\n", 1)[0])
        if fault := re.search(
            r"^error: (.*)", messages[0], re.MULTILINE
        ):  # of a regular expression, below a drawing of its place
            reason = f"{reason[:200]} {fault[1]}"
        raise bad_request(f"{param} cannot be enforced: {reason[:300]}", param)


class _Rules:
    """The rules of one grammar, each with a name of its own."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines)

    def _add(self, body: str, options: str = "") -> str:
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        return name

    def of_form(self, form: OutputForm) -> str:
        if form.kind == "schema":
            return self._json(form.value)
        if form.kind == "choice":
            return self._add(" | ".join(map(json_string, form.value)))
        return self._add(_regex_literal(form.value))

    def _json(self, schema: Mapping[str, Any]) -> str:
        guidance = {"whitespace_pattern": _SPACE, "coerce_one_of": True}
        return self._add("%json " + json.dumps({**schema, "x-guidance": guidance}))

    def of_calls(self, calls: ForcedCalls) -> str:
        layout = calls.layout

        def spell(text: str, name: str = "", arguments: str = "") -> str:
            """A rule's body: tags that are special tokens by their ids, the rest of the text to the letter."""
            ids = {mark: f"<[{token_id}]>" for mark, token_id in calls.marks.items()}
            known = {**ids, ARGUMENTS: arguments, NUMBER: _NUMBER}
            parts = filter(None, re.split(r"(<[^<>\n]+>|\{arguments\}|\{number\})", text))
            return " ".join(known.get(part) or json_string(part.replace(NAME, name)) for part in parts)

        types = parameter_types(calls.tools)
        ways = []
        for tool in calls.tools:
            name = tool["function"]["name"]
            if not _CALLABLE.fullmatch(name):
                message = f"tools: the function name {name[:60]!r} holds characters that no call can be forced with"
                raise bad_request(message, "tools")
            schema = _arguments_schema(tool["function"].get("parameters"))
            arguments = self._parameters(schema, types[name]) if layout.tagged else self._json(schema)
            ways.append(self._add(spell(layout.call, name, arguments)))
        call = self._add(" | ".join(ways))
        more = "" if calls.one_call else f" ({spell(layout.between)} {call})*"
        return self._add(f"{spell(layout.begin)} {call}{more} {spell(layout.end)}")

    def _parameters(self, schema: Mapping[str, Any], types: Mapping[str, frozenset[str]]) -> str:
        """Each parameter in its tags, in the schema's order; a text is free but for the end tag."""
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        required = schema.get("required")
        parts = []
        for name, part in (schema.get("properties") or {}).items():
            tag = json_string(f"<parameter={name}>\n")
            if not types.get(name, _STRING) & _STRING:
                value = f"{self._json({**part, **shared})} {json_string(_END_TAG)}"
            elif choices := _texts(part):
                value = f"({' | '.join(map(json_string, choices))}) {json_string(_END_TAG)}"
            else:
                value = self._add("/(?s:.*)/", f"[suffix={json_string(_END_TAG)}]")
            optional = "" if isinstance(required, list) and name in required else "?"
            parts.append(self._add(f"{tag} {value}") + optional)
        return self._add(" ".join(parts) or '""')


def _arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of one function: always an object, and one of the named parameters alone unless the schema says otherwise."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = checked_schema(parameters, "tools")
    if "properties" in schema and not _OPENING.intersection(schema):
        schema = {"additionalProperties": False, **schema}
    return {"type": "object", **schema}


def _texts(schema: Any) -> list[str]:
    """The texts that a parameter may have, where its schema counts them all up."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    return values if isinstance(values, list) and values and all(isinstance(value, str) and value for value in values) else []


def _regex_literal(regex: str) -> str:
    """Between slashes, where its own slashes and line breaks are escaped. Anchors go: a form is matched as a whole anyway."""
    body = regex.removeprefix("^")
    escapes = len(body[:-1]) - len(body[:-1].rstrip("\\"))
    if body.endswith("$") and escapes % 2 == 0:
        body = body[:-1]
    escaped = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return "/" + re.sub(r"(?s)\\.|/|\n", lambda match: escaped.get(match[0], match[0]), body) + "/"
