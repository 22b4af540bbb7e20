"""Checks the messages and tools of a chat request and brings them into the one form that chat templates are given."""

from __future__ import annotations

from typing import Any

import msgspec

from minserve.server.api_errors import bad_request
from minserve.server.fields import Fields, decode_array, decode_value

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation as `{"role", "content", ...}` dicts: developer is system, lists of text parts are one string.

    `content` is None only for an assistant that called tools. Raises ApiError naming the message and field.
    """
    array = fields.array("messages")
    if array is None:
        raise bad_request("messages is required", "messages")
    if not array:
        raise bad_request("messages must not be empty", "messages")
    return [_message(_object(raw, f"messages[{index}]")) for index, raw in enumerate(array)]


def parse_tools(fields: Fields) -> list[dict[str, Any]] | None:
    """The functions that the model may call, as the client wrote them; None when there are none."""
    array = fields.array("tools")
    if not array:
        return None
    for index, raw in enumerate(array):
        tool = _object(raw, f"tools[{index}]")
        kind = tool.string("type")
        if kind != "function":
            raise bad_request(f'{tool.param("type")} must be "function"', tool.param("type"))
        function = tool.object("function")
        if function is None:
            raise bad_request(f"{tool.param('function')} is required", tool.param("function"))
        if not function.string("name"):
            raise bad_request(f"{function.param('name')} must be a string that is not empty", function.param("name"))
        function.string("description")
        function.object("parameters")
    return [decode_value(raw, f"tools[{index}]") for index, raw in enumerate(array)]


def _object(raw: msgspec.Raw, param: str) -> Fields:
    try:
        return Fields(_object_decoder.decode(raw), f"{param}.")
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise bad_request(f"{param} must be an object", param) from None


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.string("role")
    if role not in _ROLES:
        shown = "missing" if role is None else f"{role[:40]!r}"
        raise bad_request(f"{fields.param('role')} is {shown}; roles are {', '.join(_ROLES)}", fields.param("role"))
    message: dict[str, Any] = {"role": _ROLES[role]}
    calls = _tool_calls(fields) if role == "assistant" else None
    message["content"] = _content(fields, may_be_null=bool(calls))
    if calls:
        message["tool_calls"] = calls
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = fields.string(name)
        if value is not None:
            message[name] = value
    return message


def _content(fields: Fields, may_be_null: bool) -> str | None:
    param = fields.param("content")
    raw = fields.raw("content")
    if raw is None:
        if may_be_null:
            return None
        raise bad_request(f"{param} must be a string or a list of text parts; it may be null only beside tool_calls", param)
    if bytes(memoryview(raw)[:1]) == b"[":
        return "".join(_part(part, f"{param}[{index}]") for index, part in enumerate(decode_array(raw, param)))
    content = decode_value(raw, param)
    if not isinstance(content, str):
        raise bad_request(f"{param} must be a string or a list of text parts", param)
    return content


def _part(raw: msgspec.Raw, param: str) -> str:
    part = _object(raw, param)
    kind = part.string("type")
    if kind != "text":
        shown = "missing" if kind is None else f"{kind[:40]!r}"
        raise bad_request(f"{param} has type {shown}; this model reads only parts of type 'text'", part.param("type"))
    text = part.string("text")
    if text is None:
        raise bad_request(f"{part.param('text')} must be a string", part.param("text"))
    return text


def _tool_calls(fields: Fields) -> list[dict[str, Any]]:
    """`[{"id", "type", "function": {"name", "arguments"}}]`; arguments stay a string or an object, as they came."""
    calls: list[dict[str, Any]] = []
    for index, raw in enumerate(fields.array("tool_calls") or ()):
        call = _object(raw, f"{fields.param('tool_calls')}[{index}]")
        function = call.object("function")
        if function is None:
            raise bad_request(f"{call.param('function')} is required", call.param("function"))
        name = function.string("name")
        if not name:
            raise bad_request(f"{function.param('name')} must be a string that is not empty", function.param("name"))
        arguments = function.value("arguments")
        if arguments is not None and not isinstance(arguments, str | dict):
            param = function.param("arguments")
            raise bad_request(f"{param} must be a string of JSON or an object", param)
        calls.append(
            {
                "id": call.string("id"),
                "type": "function",
                "function": {"name": name, "arguments": "{}" if arguments is None else arguments},
            }
        )
    return calls
