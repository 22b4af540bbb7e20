"""`/v1/responses`: OpenAI's newer API as an adapter. Its body becomes a chat body, the answer's blocks become output items.

Nothing is stored: what refers to something stored is refused, `store` is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from minserve.server.api_errors import ApiError, bad_request
from minserve.server.blocks import Block, BlockWriter
from minserve.server.fields import Reader, decode_object, read_part, spelled
from minserve.server.generation import Generation
from minserve.server.openai import PASSED_ON, checked_role, joined_text

_TEXT_TYPES = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
RENAMED = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    r"response_format\.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
}
"""Names in errors of the chat body, as patterns, the longer first; and what the client calls them."""


class Asked(msgspec.Struct, kw_only=True):
    """What is read here; of some fields no more than that they are there."""

    input: str | list[dict[str, Any]] = []
    instructions: str | None = None
    max_output_tokens: Any = None
    metadata: Any = {}
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    parallel_tool_calls: bool = True
    background: bool = False
    user: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None


class _CallItem(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    arguments: str | dict[str, Any] | None = None
    call_id: str | None = None


class _OutputItem(msgspec.Struct):
    call_id: str | None = None


_asked = Reader(Asked)


def chat_body(body: bytes | bytearray) -> tuple[bytes, Asked]:
    """The chat completion that asks for the same, and what was asked. Raises ApiError naming the field."""
    fields = decode_object(body)
    asked = _asked.read(fields)
    for name in ("previous_response_id", "conversation", "prompt"):
        if name in fields:
            raise bad_request(f"{name}: nothing is stored here; send the whole conversation", name)
    if asked.background:
        raise bad_request("background responses are not supported", "background")
    chat: dict[str, Any] = {name: fields[name] for name in PASSED_ON.intersection(fields)}
    chat["messages"] = _messages(asked)
    chat["max_tokens"] = asked.max_output_tokens
    chat["tools"] = [_tool(tool, f"tools[{index}].type") for index, tool in enumerate(asked.tools)]
    choice = asked.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    chat["reasoning_effort"] = asked.reasoning.get("effort")
    chat["response_format"] = form = asked.text.get("format")
    if isinstance(form, dict):
        schema = {key: value for key, value in form.items() if key != "type"}
        chat["response_format"] = {"type": form.get("type"), "json_schema": schema}
    return msgspec.json.encode(chat), asked


def _messages(asked: Asked) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if asked.instructions is not None:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    if not asked.input:
        raise bad_request("input must be a string or a list of items", "input")
    for index, item in enumerate(asked.input):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], param: str) -> None:
    """Calls of one turn become one assistant message, as chat models know them."""
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        content = joined_text(item.get("content"), f"{param}.content", _TEXT_TYPES)
        messages.append({"role": checked_role(item.get("role"), param), "content": content})
    elif kind == "function_call":
        made = read_part(item, _CallItem, param)
        call = {"id": made.call_id, "type": "function", "function": {"name": made.name, "arguments": made.arguments}}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = joined_text(item.get("output"), f"{param}.output", _TEXT_TYPES)
        messages.append({"role": "tool", "tool_call_id": read_part(item, _OutputItem, param).call_id, "content": content})
    elif kind != "reasoning":  # earlier reasoning is left out, as templates do
        allowed = '"message", "function_call", "function_call_output" or "reasoning"'
        raise bad_request(f"{param}.type is {spelled(kind)}; it must be {allowed}", f"{param}.type")


def _tool(tool: dict[str, Any], param: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_request(f'{param} is {spelled(tool.get("type"))}; it must be "function"', param)
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return tool if isinstance(tool.get("function"), dict) else {"type": "function", "function": function}


_KINDS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
"""Kind of block to the name of its events."""
_ECHOED = "instructions", "max_output_tokens", "metadata", "tools", "tool_choice", "parallel_tool_calls", "user", "background"
"""Fields that the answer repeats."""


class ResponseWriter(BlockWriter):
    def __init__(self, generation: Generation, asked: Asked) -> None:
        super().__init__(generation)
        self._number = 0
        sampling = generation.options.sampling
        self._settings = {
            **{name: getattr(asked, name) for name in _ECHOED},
            "text": {"format": {"type": "text"}, **asked.text},
            "model": generation.options.model,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **asked.reasoning},
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }

    def begun(self) -> Iterable[dict[str, Any]]:
        for name in ("created", "in_progress"):
            yield self._told(f"response.{name}", response=self._response("in_progress"))

    def opened(self, block: Block) -> Iterable[dict[str, Any]]:
        yield self._told("response.output_item.added", output_index=block.index, item=self._item(block, "in_progress"))
        if block.kind != "call":
            yield self._within(block, "response.content_part.added", part=_part(block))

    def grown(self, block: Block, text: str) -> dict[str, Any]:
        return self._within(block, f"response.{_KINDS[block.kind]}.delta", delta=text)

    def closed(self, block: Block) -> Iterable[dict[str, Any]]:
        done = f"response.{_KINDS[block.kind]}.done"
        if block.kind == "call":
            yield self._within(block, done, name=block.name, arguments=block.text)
        else:
            yield self._within(block, done, text=block.text)
            yield self._within(block, "response.content_part.done", part=_part(block))
        yield self._told("response.output_item.done", output_index=block.index, item=self._whole_item(block))

    def ended(self) -> Iterable[dict[str, Any]]:
        whole = self.whole()
        yield self._told(f"response.{whole['status']}", response=whole)

    def failed(self, error: ApiError) -> dict[str, Any]:
        return self._told("error", code=error.code or str(error.status), message=error.message, param=error.param)

    def whole(self) -> dict[str, Any]:
        return self._response("incomplete" if self.finish_reason == "length" else "completed")

    def _response(self, status: str) -> dict[str, Any]:
        generation = self.generation
        counts = generation.usage() if status != "in_progress" else None
        return {
            "id": generation.id,
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(map(self._whole_item, self.blocks)),
            "usage": counts
            and {
                "input_tokens": counts.prompt_tokens,
                "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": counts.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
                "total_tokens": counts.prompt_tokens + counts.completion_tokens,
            },
            **self._settings,
        }

    def _whole_item(self, block: Block) -> dict[str, Any]:
        cut = block is self.blocks[-1] and self.finish_reason == "length"
        return self._item(block, "incomplete" if cut else "completed")

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        base = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            return {**base, "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text}
        content = [_part(block)] if block.parts else []
        if block.kind == "reasoning":
            return {**base, "type": "reasoning", "summary": [], "content": content}
        return {**base, "type": "message", "role": "assistant", "content": content}

    def _item_id(self, block: Block) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        return f"{prefix}_{self.generation.id.removeprefix('resp_')}{block.index}"

    def _within(self, block: Block, kind: str, **more: Any) -> dict[str, Any]:
        """An event of an item or of its one part of content."""
        if block.kind != "call":
            more["content_index"] = 0
        if kind.startswith("response.output_text"):
            more["logprobs"] = []
        return self._told(kind, item_id=self._item_id(block), output_index=block.index, **more)

    def _told(self, kind: str, **more: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
