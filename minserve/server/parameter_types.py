"""What a tool's JSON schema says of its parameters' types, and plain text read as such a type. Knows no tool-call format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ParameterTypes = Mapping[str, frozenset[str]]
"""Of one function: parameter name to the JSON types that its schema allows; a parameter without any is missing."""

_DEEPEST = 16
"""Levels of references and combinations that are followed."""
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
    value = _parsed(stripped)
    kind = _NAMES.get(type(value), "")
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
    found = {name: frozenset(_types(part, schema, _DEEPEST)) for name, part in properties.items()}
    return {name: types for name, types in found.items() if types}


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return
    named = schema.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, list):
        yield from (name for name in named if isinstance(name, str))
    else:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if isinstance(values, list):
            yield from (_NAMES[type(value)] for value in values if type(value) in _NAMES)
    for combination in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(combination)
        if isinstance(parts, list):
            for part in parts:
                yield from _types(part, root, depth - 1)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types(_resolve(reference, root), root, depth - 1)


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """A reference into the same schema, such as `#/$defs/Point`; None when it leads nowhere."""
    start, *steps = reference.split("/")
    found: Any = root if start == "#" else None
    for step in steps:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _Unreadable()


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class _Unreadable:
    """Stands for text that is no JSON; of no JSON type."""
