"""OpenAI's request bodies, checked field by field, become records. Knows nothing of tokenizers, engines or answers.

What fails here raises ApiError naming the field, and reaches no engine. Unknown fields are ignored, because clients send each
other's extensions; fields that would change the answer and are not supported are refused.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import msgspec

from minserve.server.api_errors import bad_request
from minserve.server.fields import RawFields, Reader, decode_value, invalid, spelled
from minserve.server.options import ModelFacts, TopLogprobs, check_length, check_vocabulary

MAX_SEQUENCES = 2048
"""Prompts times choices of one body."""
_ids_decoder = msgspec.json.Decoder(list[int])
_prompts_decoder = msgspec.json.Decoder(str | list[str | list[int]])


class CompletionFields(msgspec.Struct):
    """Those of /v1/completions alone."""

    prompt: msgspec.Raw
    echo: bool = False
    logprobs: TopLogprobs | None = None
    add_special_tokens: bool = True


class ChatFields(msgspec.Struct):
    """Those of /v1/chat/completions that say nothing of the conversation."""

    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None


_Name = Annotated[str, msgspec.Meta(min_length=1)]


class _SpokenCall(msgspec.Struct):
    name: _Name
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _SpokenCall
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_ToolCall] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class _Function(msgspec.Struct):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Function


class _ConversationFields(msgspec.Struct):
    messages: list[_Message] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None


_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop", "ignore_eos"}
PASSED_ON = {"model", "stream", "max_tokens", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", *_SAMPLING}
"""Fields that other APIs spell alike."""

_conversation = Reader(_ConversationFields)


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """A conversation and how its template is to write it."""

    messages: list[dict[str, Any]]
    """`{"role", "content", ...}`: developer is system, parts of text are one string; content is None only beside tool calls."""
    tools: list[dict[str, Any]] | None
    """As the client wrote them; None when the model may not call."""
    add_generation_prompt: bool
    continue_final_message: bool
    template_arguments: dict[str, Any]
    forces_calls: bool
    """The answer has to be tool calls."""
    function: str | None
    """The one that has to be called, where the client named it."""
    one_call: bool
    """The client wants no more than one call."""


def parse_conversation(fields: RawFields) -> Chat:
    """What a chat template is given."""
    asked = _conversation.read(fields)
    if not asked.messages:
        raise bad_request("messages is required" if asked.messages is None else "messages must not be empty", "messages")
    for index, tool in enumerate(asked.tools):
        if tool.get("type") != "function":
            param = f"tools[{index}].type"
            raise bad_request(f'{param} is {spelled(tool.get("type"))}; it must be "function"', param)
    try:
        names = [tool.function.name for tool in msgspec.convert(asked.tools, list[_Tool])]
    except msgspec.ValidationError as error:
        raise invalid(error, "tools") from None
    function = _chosen_function(asked.tool_choice, names)
    continued, opens_answer = asked.continue_final_message, asked.add_generation_prompt
    if continued and opens_answer:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise bad_request(message, "continue_final_message")
    return Chat(
        messages=[_message(message, f"messages[{index}]") for index, message in enumerate(asked.messages)],
        tools=None if asked.tool_choice == "none" else asked.tools or None,
        add_generation_prompt=not continued if opens_answer is None else opens_answer,
        continue_final_message=continued,
        template_arguments=_template_arguments(asked),
        forces_calls=function is not None or asked.tool_choice == "required",
        function=function,
        one_call=function is not None or not asked.parallel_tool_calls,
    )


def parse_prompts(raw: msgspec.Raw, facts: ModelFacts) -> list[str | list[int]]:
    """`prompt` in its four forms: a string, strings, token ids, lists of token ids. Ids are within the vocabulary."""
    start = bytes(memoryview(raw)[:65])
    if start[:1] == b"[" and start[1:].lstrip()[:1] not in (b'"', b"["):
        # The length is read off the commas: decoding millions of numbers would stall every thread.
        check_length(bytes(raw).count(b",") + 1, facts.context_length, "prompt")
        decoded: Any = [decode_value(raw, "prompt", _ids_decoder)]
    else:
        decoded = decode_value(raw, "prompt", _prompts_decoder)
    prompts: list[str | list[int]] = [decoded] if isinstance(decoded, str) else decoded
    if len(set(map(type, prompts))) > 1:
        raise bad_request("prompt must be a string, strings, token ids or lists of token ids", "prompt")
    if len(prompts) > MAX_SEQUENCES:
        raise bad_request(f"{len(prompts)} prompts are over the limit of {MAX_SEQUENCES}", "prompt")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            param = prompt_name(index, len(prompts))
            check_length(len(prompt), facts.context_length, param)
            if not prompt:
                raise bad_request(f"{param} must hold at least one token", param)
            check_vocabulary(prompt, param, facts)
    return prompts


def prompt_name(index: int, count: int) -> str:
    """How errors call one of `count` prompts."""
    return "prompt" if count == 1 else f"prompt[{index}]"


def _template_arguments(asked: _ConversationFields) -> dict[str, Any]:
    """`chat_template_kwargs`, without the names that the server itself gives to templates; before them what they say otherwise,
    `reasoning_effort`, in the words of DeepSeek's, Kimi's and Qwen's templates.
    """
    for name in ("messages", "tools", "add_generation_prompt", "self"):
        if name in asked.chat_template_kwargs:
            raise bad_request(f"chat_template_kwargs must not set {name}", "chat_template_kwargs")
    if asked.reasoning_effort is None:
        return asked.chat_template_kwargs
    thinks = asked.reasoning_effort != "none"
    return {
        "reasoning_effort": asked.reasoning_effort,
        "enable_thinking": thinks,
        "thinking": thinks,
        **asked.chat_template_kwargs,
    }


def _chosen_function(choice: Any, names: list[str]) -> str | None:
    """The one that `tool_choice` names, if it is of that form. `names`: of the request's tools."""
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        if name is None:
            raise bad_request("tool_choice must name a function of tools", "tool_choice")
        if not isinstance(name, str) or name not in names:
            raise bad_request(f"tool_choice names {spelled(name)}, which is not among the tools", "tool_choice")
        return name
    if choice not in ("none", "auto", "required"):
        message = 'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        raise bad_request(message, "tool_choice")
    if choice == "required" and not names:
        raise bad_request('tool_choice "required" needs tools', "tool_choice")
    return None


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def checked_role(role: Any, param: str) -> str:
    """Of the message at `param`, as templates know it. Raises ApiError."""
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"{param}.role is {spelled(role)}; it must be {' or '.join(map(spelled, _ROLES))}", f"{param}.role")
    return _ROLES[role]


def _message(message: _Message, param: str) -> dict[str, Any]:
    made: dict[str, Any] = {"role": checked_role(message.role, param), "content": None}
    if message.tool_calls and message.role == "assistant":
        made["tool_calls"] = list(map(_spoken, message.tool_calls))
    if message.content is not None or "tool_calls" not in made:
        made["content"] = joined_text(message.content, f"{param}.content")
    beside = {name: getattr(message, name) for name in ("name", "tool_call_id", "reasoning_content")}
    return {**made, **{name: value for name, value in beside.items() if value is not None}}


def _spoken(call: _ToolCall) -> dict[str, Any]:
    """Arguments stay a string or an object, as they came."""
    arguments = "{}" if call.function.arguments is None else call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def joined_text(content: Any, param: str, types: tuple[str, ...] = ("text",)) -> str:
    """A message's content: a string, or parts of text, which become one. Raises ApiError naming the part."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{param} must be a string or a list of text parts; it may be null only beside tool calls", param)
    return "".join(text_of(part, f"{param}[{index}]", types) for index, part in enumerate(content))


def text_of(part: Any, param: str, types: tuple[str, ...] = ("text",)) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in types:
        allowed = " or ".join(map(spelled, types))
        raise bad_request(f"{param}.type is {spelled(kind)}; this model reads only text, of type {allowed}", f"{param}.type")
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{param}.text must be a string", f"{param}.text")
    text: str = part["text"]
    return text
