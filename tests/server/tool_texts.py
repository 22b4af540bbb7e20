"""Writes tool calls in every format that the server reads, independently of its readers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Call = tuple[str, dict[str, Any]]


class Style(NamedTuple):
    """One way of writing calls: the reader's format, and the text of some calls."""

    format: str
    write: Callable[[Sequence[Call]], str]
    ids: bool = False


def _json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def deepseek_v3(calls: Sequence[Call]) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    texts = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


def kimi_k2(calls: Sequence[Call]) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(texts) + "<|tool_calls_section_end|>"


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>' for name, arguments in calls
    )


def hermes_arguments_first(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"arguments": {_json(arguments)}, "name": "{name}"}}\n</tool_call>' for name, arguments in calls
    )


def qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_tags(*call)}\n</tool_call>" for call in calls)


def qwen3_coder_bare(calls: Sequence[Call]) -> str:
    """As Qwen3-Coder writes it when it forgets the outer tag's beginning."""
    return "\n".join(f"{_tags(*call)}\n</tool_call>" for call in calls)


def _tags(name: str, arguments: dict[str, Any]) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<function={name}>\n{parameters}</function>"


STYLES = {
    "deepseek_v3": Style("deepseek", deepseek_v3),
    "deepseek_v31": Style("deepseek", deepseek_v31),
    "kimi_k2": Style("kimi_k2", kimi_k2, ids=True),
    "hermes": Style("qwen", hermes),
    "hermes_arguments_first": Style("qwen", hermes_arguments_first),
    "qwen3_coder": Style("qwen", qwen3_coder),
    "qwen3_coder_bare": Style("qwen", qwen3_coder_bare),
}


def tool(name: str, **types: str | list[str]) -> dict[str, Any]:
    """A tool whose parameters have these JSON types."""
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
