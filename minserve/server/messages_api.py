"""`/v1/messages`: Anthropic's API as an adapter. Its body becomes a chat body, the answer's blocks become content blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from minserve.server.api_errors import ApiError, bad_request
from minserve.server.blocks import Block, BlockWriter
from minserve.server.fields import Reader, decode_object, read_part, spelled
from minserve.server.openai import PASSED_ON, joined_text, text_of

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
RENAMED = {
    "stop": "stop_sequences",
    r"response_format\.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "thinking.type",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r'tool_choice "required"': 'tool_choice "any"',
}
"""Names in errors of the chat body, as patterns, the longer first; and what the client calls them."""


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class _Tool(msgspec.Struct):
    name: Any
    type: Any = None
    input_schema: Any = msgspec.UNSET
    description: Any = None


class _ToolUse(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    id: str | None = None
    input: str | dict[str, Any] | None = None


class _ToolResult(msgspec.Struct):
    tool_use_id: str | None = None


class _ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct, frozen=True):
    type: str | None = None


class _Asked(msgspec.Struct):
    max_tokens: int | None = None
    messages: list[_Message] = []
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: Any = None
    thinking: _Thinking = _Thinking()
    output_config: dict[str, Any] = {}
    tools: list[_Tool] = []
    tool_choice: _ToolChoice | None = None


_asked = Reader(_Asked)
_EFFORTS = {"enabled": "medium", "disabled": "none"}


def chat_body(body: bytes | bytearray, *, counts_only: bool = False) -> bytes:
    """The chat completion that asks for the same. Raises ApiError naming the field."""
    fields = decode_object(body)
    asked = _asked.read(fields)
    if not counts_only and asked.max_tokens is None:
        raise bad_request("max_tokens is required", "max_tokens")
    chat: dict[str, Any] = {name: fields[name] for name in PASSED_ON.intersection(fields)}
    chat["messages"] = _messages(asked)
    if chat["messages"][-1]["role"] == "assistant" and "tool_calls" not in chat["messages"][-1]:
        chat["continue_final_message"] = True
    chat["stop"] = asked.stop_sequences
    chat["reasoning_effort"] = _EFFORTS.get(asked.thinking.type or "")
    form = asked.output_config.get("format")
    of_schema = isinstance(form, dict) and {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}
    chat["response_format"] = of_schema or form
    chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(asked.tools)]
    if (choice := asked.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        choices = {"auto": "auto", "any": "required", "none": "none", "tool": named}
        if choice.type not in choices:
            raise bad_request(f"tool_choice.type must be one of {', '.join(choices)}", "tool_choice.type")
        chat["tool_choice"] = choices[choice.type]
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return msgspec.json.encode(chat)


def _messages(asked: _Asked) -> list[dict[str, Any]]:
    if not asked.messages:
        raise bad_request("messages must be a list that is not empty", "messages")
    messages: list[dict[str, Any]] = []
    if asked.system is not None:
        messages.append({"role": "system", "content": joined_text(asked.system, "system")})
    for index, message in enumerate(asked.messages):
        _add_message(messages, message, f"messages[{index}]")
    return messages


def _add_message(messages: list[dict[str, Any]], message: _Message, param: str) -> None:
    """Results of tools, which are blocks of a user's message here, are messages of their own for chat models."""
    role = message.role
    if role not in ("user", "assistant"):
        raise bad_request(f'{param}.role must be "user" or "assistant"', f"{param}.role")
    if isinstance(message.content, str):
        messages.append({"role": role, "content": message.content})
        return
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        where = f"{param}.content[{index}]"
        kind = block.get("type")
        if kind == "text":
            texts.append(text_of(block, where))
        elif kind == "tool_use" and role == "assistant":
            use = read_part(block, _ToolUse, where)
            function = {"name": use.name, "arguments": use.input or {}}
            calls.append({"id": use.id, "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = joined_text(block.get("content") or "", f"{where}.content")
            result = read_part(block, _ToolResult, where)
            messages.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": text})
        elif kind not in ("thinking", "redacted_thinking"):  # earlier thoughts are left out, as templates do
            allowed = '"text" or "tool_use"' if role == "assistant" else '"text" or "tool_result"'
            raise bad_request(f"{where}.type is {spelled(kind)}; of the {role} it must be {allowed}", f"{where}.type")
    if calls:
        messages.append({"role": role, "content": "".join(texts) or None, "tool_calls": calls})
    elif texts or not messages or messages[-1]["role"] != "tool":
        messages.append({"role": role, "content": "".join(texts)})


def _tool(tool: _Tool, param: str) -> dict[str, Any]:
    if tool.input_schema is msgspec.UNSET and tool.type not in (None, "custom"):  # one that Anthropic's servers would run
        raise bad_request(f'{param}.type is {spelled(tool.type)}; it must be "custom"', f"{param}.type")
    if tool.input_schema is msgspec.UNSET:
        raise bad_request(f"{param}.input_schema is required", f"{param}.input_schema")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def told(error: ApiError) -> dict[str, Any]:
    """An error as clients of this API read it."""
    own = {413: "request_too_large", 499: "api_error", 500: "api_error", 503: "overloaded_error"}
    return {"type": "error", "error": {"type": own.get(error.status, error.type), "message": error.message}}


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""Kind of block to the type and the field of what is added to it."""


class MessageWriter(BlockWriter):
    def begun(self) -> Iterable[dict[str, Any]]:
        yield {"type": "message_start", "message": {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}}

    def opened(self, block: Block) -> Iterable[dict[str, Any]]:
        yield {"type": "content_block_start", "index": block.index, "content_block": _content_block(block)}

    def grown(self, block: Block, text: str) -> dict[str, Any]:
        kind, field = _DELTAS[block.kind]
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, field: text}}

    def closed(self, block: Block) -> Iterable[dict[str, Any]]:
        yield {"type": "content_block_stop", "index": block.index}

    def ended(self) -> Iterable[dict[str, Any]]:
        yield {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> dict[str, Any]:
        return told(error)

    def whole(self) -> dict[str, Any]:
        return {**self._message(), "content": [_content_block(block) for block in self.blocks], **self._stop()}

    def _message(self) -> dict[str, Any]:
        about = {"id": self.generation.id, "type": "message", "role": "assistant", "model": self.generation.options.model}
        return {**about, "usage": self._usage()}

    def _stop(self) -> dict[str, Any]:
        matched = self.generation.choices[0].stop_string
        reason = "stop_sequence" if matched else _STOP_REASONS.get(self.finish_reason, "end_turn")
        if self.blocks and self.blocks[-1].kind == "call" and reason == "end_turn":
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": matched}

    def _usage(self) -> dict[str, int]:
        """Tokens read from the cache are counted apart from the other input tokens."""
        counts = self.generation.usage()
        return {
            "input_tokens": counts.prompt_tokens - counts.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached_tokens,
            "output_tokens": counts.completion_tokens,
        }


def _content_block(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    try:
        arguments = msgspec.json.decode(block.text or "{}", type=dict[str, Any])
    except msgspec.MsgspecError:
        arguments = {}  # what the model wrote badly is empty
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
