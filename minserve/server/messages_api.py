"""`/v1/messages`: Anthropic's API as an adapter. Its body becomes a chat body, the answer's blocks become content blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from minserve.server.api_errors import ApiError, bad_request
from minserve.server.blocks import Block, BlockWriter
from minserve.server.fields import Fields, decode_object

_PASSED_ON = ("model", "temperature", "top_p", "top_k", "stream", "max_tokens", "seed", "chat_template_kwargs", "ignore_eos")
"""Fields that chat completions read alike."""
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
RENAMED = {"stop": "stop_sequences", "response_format": "output_config.format", "reasoning_effort": "thinking.type"}
"""Names in errors of the chat body, and what the client calls them."""


def chat_body(body: bytes | bytearray, *, counts_only: bool = False) -> tuple[bytes, Fields]:
    """The chat completion that asks for the same, and the fields as they came. Raises ApiError naming the field."""
    fields = decode_object(body)
    if not counts_only and not fields.has("max_tokens"):
        raise bad_request("max_tokens is required", "max_tokens")
    chat: dict[str, Any] = {name: fields.value(name) for name in _PASSED_ON if fields.has(name)}
    chat["messages"] = _messages(fields)
    if chat["messages"][-1]["role"] == "assistant" and "tool_calls" not in chat["messages"][-1]:
        chat["continue_final_message"] = True
    if fields.has("stop_sequences"):
        chat["stop"] = fields.value("stop_sequences")
    if (thinking := fields.object("thinking")) is not None:
        efforts = {"enabled": "medium", "disabled": "none"}
        chat["reasoning_effort"] = efforts.get(thinking.string("type") or "")
    output = fields.object("output_config")
    if output is not None and isinstance(form := output.value("format"), dict):
        chat["response_format"] = {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}
    tools = fields.value("tools")
    if tools:
        chat["tools"] = _tools(tools)
    choice = fields.object("tool_choice")
    if choice is not None:
        kind = choice.string("type")
        named = {"type": "function", "function": {"name": choice.string("name")}}
        choices: dict[str | None, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": named}
        if kind not in choices:
            raise bad_request(f"tool_choice.type must be one of {', '.join(map(str, choices))}", "tool_choice.type")
        chat["tool_choice"] = choices[kind]
        chat["parallel_tool_calls"] = not choice.boolean("disable_parallel_tool_use", False)
    return msgspec.json.encode(chat), fields


def _messages(fields: Fields) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    system = fields.value("system")
    if system is not None:
        messages.append({"role": "system", "content": system if isinstance(system, str) else _texts(system, "system")})
    given = fields.value("messages")
    if not isinstance(given, list) or not given:
        raise bad_request("messages must be a list that is not empty", "messages")
    for index, message in enumerate(given):
        _add_message(messages, message, f"messages[{index}]")
    return messages


def _add_message(messages: list[dict[str, Any]], message: Any, param: str) -> None:
    """Results of tools, which are blocks of a user's message here, are messages of their own for chat models."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise bad_request(f'{param}.role must be "user" or "assistant"', f"{param}.role")
    content = message.get("content")
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_request(f"{param}.content must be a string or a list of blocks", f"{param}.content")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        where = f"{param}.content[{index}]"
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, where))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = block.get("content") or ""
            text = result if isinstance(result, str) else _texts(result, f"{where}.content")
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind not in ("thinking", "redacted_thinking"):  # earlier thoughts are left out, as templates do
            raise bad_request(f"{where} has type {str(kind)[:40]!r}, which is not supported here", f"{where}.type")
    if calls:
        messages.append({"role": role, "content": "".join(texts) or None, "tool_calls": calls})
    elif texts or not messages or messages[-1]["role"] != "tool":
        messages.append({"role": role, "content": "".join(texts)})


def _texts(blocks: Any, param: str) -> str:
    if not isinstance(blocks, list):
        raise bad_request(f"{param} must be a string or a list of text blocks", param)
    return "".join(_text(block, f"{param}[{index}]") for index, block in enumerate(blocks))


def _text(block: Any, param: str) -> str:
    text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
    if not isinstance(text, str):
        raise bad_request(f"{param} must be a block of text", param)
    return text


def _tools(tools: Any) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for index, tool in enumerate(tools if isinstance(tools, list) else [None]):
        if not isinstance(tool, dict) or "input_schema" not in tool:
            raise bad_request(f"tools[{index}] must be an object with name and input_schema", f"tools[{index}]")
        function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
        made.append({"type": "function", "function": {key: value for key, value in function.items() if value is not None}})
    return made


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode(_error(error))


def _error(error: ApiError) -> dict[str, Any]:
    """An error as clients of this API read it."""
    own = {413: "request_too_large", 499: "api_error", 500: "api_error", 503: "overloaded_error"}
    return {"type": "error", "error": {"type": own.get(error.status, error.type), "message": error.message}}


class MessageWriter(BlockWriter):
    def begun(self) -> Iterable[dict[str, Any]]:
        yield {"type": "message_start", "message": {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}}

    def opened(self, block: Block, index: int) -> Iterable[dict[str, Any]]:
        empty = Block(block.kind, [], block.call_id, block.name)
        yield {"type": "content_block_start", "index": index, "content_block": _content_block(empty)}

    def grown(self, block: Block, index: int, text: str) -> dict[str, Any]:
        kind, field = {
            "reasoning": ("thinking_delta", "thinking"),
            "text": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: text}}

    def closed(self, block: Block, index: int) -> Iterable[dict[str, Any]]:  # noqa: ARG002 - the index says which
        yield {"type": "content_block_stop", "index": index}

    def ended(self) -> Iterable[dict[str, Any]]:
        yield {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> dict[str, Any]:
        return _error(error)

    def whole(self) -> dict[str, Any]:
        return {**self._message(), "content": [_content_block(block) for block in self.blocks], **self._stop()}

    def _message(self) -> dict[str, Any]:
        generation = self.generation
        return {
            "id": generation.id,
            "type": "message",
            "role": "assistant",
            "model": generation.options.model,
            "usage": self._usage(),
        }

    def _stop(self) -> dict[str, Any]:
        matched = self.generation.choices[0].stop_string
        reason = "stop_sequence" if matched else _STOP_REASONS.get(self.finish_reason, "end_turn")
        if self.blocks and self.blocks[-1].kind == "call" and reason == "end_turn":
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": matched}

    def _usage(self) -> dict[str, int]:
        """Tokens read from the cache are counted apart from the other input tokens."""
        counts = self.generation.usage()
        cached = counts.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": counts.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts.completion_tokens,
        }


def _content_block(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(block.text)}


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object; what the model wrote badly is empty."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
