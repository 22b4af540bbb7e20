"""Reads tool calls as Qwen models write them. Knows nothing of tokens, streaming or HTTP.

Two styles, told apart as they come: a JSON object within tags (Hermes), and tags within tags (Qwen3-Coder). The values of the
latter are plain text; what a tool's JSON schema says of its parameters' types makes them JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from minserve.server.tool_calls import (
    LONGEST_HEADER,
    CallArguments,
    CallStart,
    JsonExtent,
    Reading,
    Source,
    read_content,
    read_object,
    read_until,
    skip_ends,
    skip_space,
    take_mark,
    unfinished_mark,
)

ParameterTypes = Mapping[str, frozenset[str]]
"""Of one function: parameter name to the JSON types that its schema allows; a parameter without any is missing."""

_MOST_PARTS = 64
"""Parts of a parameter's schema that are looked at, each once: references may go round and multiply."""
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array", dict: "object"}


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, ParameterTypes]:
    """By function name. Schemas may be anything that is a JSON object."""
    return {tool["function"]["name"]: _of_function(tool["function"].get("parameters") or {}) for tool in tools}


def json_value(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that was written as plain text, in the first form of its types that it has; else it is a string."""
    stripped = text.strip()
    lowered = stripped.lower()
    if "null" in types and lowered in ("null", "none"):
        return "null"
    if "boolean" in types and lowered in ("true", "false"):
        return lowered
    try:
        kind = _NAMES[type(msgspec.json.decode(stripped))]
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        kind = ""
    if kind in types or (kind == "integer" and "number" in types):
        return stripped
    if kind == "number" and "integer" in types and float(stripped).is_integer():
        return str(int(float(stripped)))
    return json_string(text)


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _of_function(schema: Mapping[str, Any]) -> ParameterTypes:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    found = {name: _types(part, schema) for name, part in properties.items()}
    return {name: types for name, types in found.items() if types}


def _types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    found: set[str] = set()
    seen: set[int] = set()
    waiting = [schema]
    while waiting and len(seen) < _MOST_PARTS:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        named = part.get("type")
        if isinstance(named, str):
            found.add(named)
        elif isinstance(named, list):
            found.update(name for name in named if isinstance(name, str))
        else:
            values = part.get("enum", [part["const"]] if "const" in part else [])
            if isinstance(values, list):
                found.update(_NAMES[type(value)] for value in values if type(value) in _NAMES)
        for combination in ("anyOf", "oneOf", "allOf"):
            if isinstance(parts := part.get(combination), list):
                waiting += parts
        if isinstance(reference := part.get("$ref"), str):
            waiting.append(resolve(reference, root))
    return frozenset(found)


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """A reference into the same schema, such as `#/$defs/Point`; None when it leads nowhere."""
    start, *steps = reference.split("/")
    found: Any = root if start == "#" else None
    for step in steps:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_HERMES_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\\s]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_AFTER_PARAMETER = (_PARAMETER, _FUNCTION_END, CALL_END)
_NOT_IN_NAMES = (" ", "\n", "=", '"')
_TEXT = frozenset({"string"})


def read_qwen(source: Source, types: Mapping[str, ParameterTypes]) -> Reading[None]:
    ends: tuple[str, ...] = ()
    any_call = False
    while True:
        space, mark = yield from read_content(source, (CALL_BEGIN, _FUNCTION, *ends), after_call=any_call)
        if mark is None:
            return
        if mark in ends:
            ends = (CALL_END,) if mark == _FUNCTION_END else ()
            continue
        before = space + mark
        if mark == _FUNCTION:  # the outer tag was forgotten; prose may quote the tag too, so the function must exist
            began = yield from _read_function(source, before, types, must_exist=True)
        else:
            before += yield from skip_space(source)
            if source.text.startswith("{"):
                began = yield from _read_hermes(source, before)
            elif (yield from take_mark(source, _FUNCTION)):
                began = yield from _read_function(source, before + _FUNCTION, types, must_exist=False)
            else:
                began = False
                yield before
        if began:
            any_call = True
            ends = () if (yield from skip_ends(source, CALL_END)) else (_FUNCTION_END, CALL_END)


def _read_hermes(source: Source, before: str) -> Reading[bool]:
    """A JSON object with the members `name` and `arguments`. In any other order than that it is known only at its end.

    Returns whether it was a call; else it was yielded as content, after `before`.
    """
    extent = JsonExtent()
    length = 0
    while (head := _HERMES_HEAD.match(source.text, 0, LONGEST_HEADER)) is None:
        length += extent.feed(source.text[length:])
        if extent.whole:
            return (yield from _hermes_call(before, source.take(length)))
        if extent.broken or source.ended:
            yield before + source.take(length)
            return False
        yield None
    source.take(head.end())
    yield CallStart(head[1])
    yield from read_object(source, (CALL_END,))
    yield from skip_ends(source, "}")
    return True


def _hermes_call(before: str, text: str) -> Reading[bool]:
    """A whole object. Arguments that are a string hold the JSON themselves."""
    try:
        call, spelled = json.loads(text, strict=False), _spelled_members(text)
    except (ValueError, RecursionError):
        call, spelled = {}, {}
    name = call.get("name")
    if not isinstance(name, str) or not name or not name.isprintable():
        yield before + text
        return False
    key = "arguments" if "arguments" in call else "parameters"
    arguments = call.get(key)
    yield CallStart(name)
    if isinstance(arguments, str):
        yield CallArguments(arguments.encode("utf-8", "replace").decode() or "{}")
    else:
        yield CallArguments("{}" if arguments is None else spelled[key])
    return True


def _spelled_members(text: str) -> dict[str, str]:
    """The members of a valid JSON object, each value as it is spelled in the text."""
    decoder = json.JSONDecoder(strict=False)
    spelled: dict[str, str] = {}
    position = _past_punctuation(text, 1)
    while text[position] != "}":
        key, end = decoder.raw_decode(text, position)
        start = _past_punctuation(text, end)
        _, end = decoder.raw_decode(text, start)
        spelled[key] = text[start:end]
        position = _past_punctuation(text, end)
    return spelled


def _past_punctuation(text: str, position: int) -> int:
    while text[position] in " \t\r\n,:":
        position += 1
    return position


def _read_function(source: Source, before: str, types: Mapping[str, ParameterTypes], must_exist: bool) -> Reading[bool]:
    """`NAME>`, parameters each in its tags, and the function's end tag. Returns what `_read_hermes` does."""
    name, end = yield from read_until(source, (">", "<", *_NOT_IN_NAMES), LONGEST_HEADER)
    if end != ">" or not name or (must_exist and name not in types):
        source.put_back(end or "")
        yield before + name
        return False
    yield CallStart(name)
    separator = "{"
    while True:
        yield from skip_space(source)
        tag = yield from take_mark(source, _PARAMETER, _FUNCTION_END)
        if tag != _PARAMETER:
            break
        key, end = yield from read_until(source, (">", "<", "\n"), LONGEST_HEADER)
        if end != ">":
            source.put_back(tag + key + (end or ""))
            break
        yield CallArguments(f"{separator}{json_string(key)}: ")
        separator = ", "
        yield from _read_parameter(source, types.get(name, {}).get(key, _TEXT))
    if source.ended and not tag:
        source.take(len(source.text))  # cut off: what there is of the arguments stays open
    else:
        yield CallArguments("{}" if separator == "{" else "}")
    return True


def _read_parameter(source: Source, types: frozenset[str]) -> Reading[None]:
    """A value up to its end tag. Text is passed on as it comes, in JSON's spelling; other types must be seen whole."""
    on_own_lines = bool((yield from take_mark(source, "\n")))
    if types == _TEXT:
        yield CallArguments('"')
    value = ""
    while True:
        certain, taken = _parameter_extent(source, on_own_lines)
        if types == _TEXT:
            if certain:
                yield CallArguments(json_string(source.text[:certain])[1:-1])
        else:
            value += source.text[:certain]
        source.take(taken or certain)
        if taken:
            yield CallArguments('"' if types == _TEXT else json_value(value, types))
            return
        if source.ended:
            if value:
                yield CallArguments(value)
            source.take(len(source.text))
            return
        yield None


def _parameter_extent(source: Source, on_own_lines: bool) -> tuple[int, int]:
    """Characters that surely belong to the value, and characters up to behind its end tag, 0 when that has not come.

    The format has no way to quote. An end tag counts where a tag follows that may follow, and with a line break on either side
    of it if the value began on a line of its own; else it is part of the value.
    """
    text = source.text
    tag = text.find(_PARAMETER_END)
    while tag >= 0:
        end = tag + len(_PARAMETER_END)
        follows = text[end:].lstrip()
        breaks_before = text[:tag].endswith("\n")
        may_end = not on_own_lines or breaks_before or "\n" in text[end : len(text) - len(follows)]
        if may_end and follows.startswith(_AFTER_PARAMETER):
            return tag - breaks_before, end
        if (may_end or not follows) and any(mark.startswith(follows) for mark in _AFTER_PARAMETER):
            return tag - breaks_before, end if source.ended else 0
        tag = text.find(_PARAMETER_END, end)
    return len(text) - unfinished_mark(text, ("\n" + _PARAMETER_END, _PARAMETER_END)), 0
