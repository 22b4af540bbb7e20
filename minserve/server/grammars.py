"""Builds the grammar of an answer: a form that the client asked for, tool calls that it demanded, or either. Knows no HTTP.

Grammars are in llguidance's dialect of Lark. The library is imported and run in a worker's thread only, on a request's first
use of it: checking a grammar takes milliseconds, and seconds where a client is out to make it long.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minserve.request import Grammar
from minserve.server.api_errors import bad_request
from minserve.server.call_layouts import ARGUMENTS, NAME, NUMBER, CallLayout
from minserve.server.output_form import OutputForm, checked_schema
from minserve.server.parameter_types import parameter_types

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

Spell = Callable[[str], str]
"""A mark of the tool format as a grammar names it: a special token or a text."""


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFirst:
    """The answer proper comes after a reasoning."""

    closing: str
    opened_by: int | None
    """See Grammar."""


def build_grammar(form: OutputForm | None, calls: ForcedCalls | None, reasoning: ReasoningFirst | None) -> Grammar | None:
    """None when anything may be said. Raises ApiError for what cannot be followed: 400, naming the field."""
    rules = _Rules()
    ways: list[str] = []
    if form is not None and (calls is None or calls.instead):
        ways.append(rules.of_form(form))
    if calls is not None:
        ways.append(rules.of_calls(calls))
    if not ways:
        return None
    lead = "" if reasoning is None else "/\\n{1,2}/? "
    text = f"{_HEADER}start: {lead}answer\nanswer: {' | '.join(ways)}\n{rules.text()}"
    _check(text, form.param if form is not None else "tools")
    if reasoning is None:
        return Grammar(text)
    return Grammar(text, starts_after=reasoning.closing, opened_by=reasoning.opened_by)


def _check(text: str, param: str) -> None:
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise bad_request(f"{param} is too large to be enforced", param)
    import llguidance

    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text)
    if failed:
        reason = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", messages[0].split("\n", 1)[0])
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
            return self._add(" | ".join(map(_literal, form.value)))
        return self._add(f"/{_within_slashes(_without_anchors(form.value))}/")

    def _json(self, schema: Mapping[str, Any]) -> str:
        guidance = {"whitespace_pattern": _SPACE, "coerce_one_of": True}
        return self._add("%json " + json.dumps({**schema, "x-guidance": guidance}))

    def of_calls(self, calls: ForcedCalls) -> str:
        layout = calls.layout

        def spell(part: str) -> str:
            return f"<[{calls.marks[part]}]>" if part in calls.marks else _literal(part)

        types = parameter_types(calls.tools)
        ways = []
        for tool in calls.tools:
            name = tool["function"]["name"]
            if not _CALLABLE.fullmatch(name):
                raise bad_request(
                    f"tools: the function name {name[:60]!r} holds characters that no call can be forced with", "tools"
                )
            schema = _arguments_schema(tool["function"].get("parameters"))
            arguments = self._parameters(schema, types[name]) if layout.tagged else self._json(schema)
            standing_for = {ARGUMENTS: arguments, NUMBER: _NUMBER}
            parts = [standing_for.get(part) or spell(part.replace(NAME, name)) for part in layout.call]
            ways.append(self._add(" ".join(parts)))
        call = self._add(" | ".join(ways))
        between = f"{_literal(layout.between)} " if layout.between else ""
        more = "" if calls.one_call else f" ({between}{call})*"
        return self._add(" ".join([*map(spell, layout.begin), call + more, *map(spell, layout.end)]))

    def _parameters(self, schema: Mapping[str, Any], types: Mapping[str, frozenset[str]]) -> str:
        """Each parameter in its tags, in the schema's order; a text is free but for the end tag."""
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        required = schema.get("required")
        parts = []
        for name, part in (schema.get("properties") or {}).items():
            tag = _literal(f"<parameter={name}>\n")
            if not types.get(name, _STRING) & _STRING:
                value = f"{self._json({**part, **shared})} {_literal(_END_TAG)}"
            elif choices := _texts(part):
                value = f"({' | '.join(map(_literal, choices))}) {_literal(_END_TAG)}"
            else:
                value = self._add("/(?s:.*)/", f"[suffix={_literal(_END_TAG)}]")
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


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without_anchors(regex: str) -> str:
    """A form is matched as a whole anyway."""
    body = regex.removeprefix("^")
    escapes = len(body[:-1]) - len(body[:-1].rstrip("\\"))
    return body[:-1] if body.endswith("$") and escapes % 2 == 0 else body


def _within_slashes(regex: str) -> str:
    """A regular expression as it stands between slashes: those of its own and its line breaks are escaped."""
    return re.sub(r"(?s)\\.|/|\n", lambda match: {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(match[0], match[0]), regex)
