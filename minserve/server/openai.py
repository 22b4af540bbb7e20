"""OpenAI's request bodies, checked field by field, become records. Knows nothing of tokenizers, engines or answers.

Nothing that fails here reaches the engine. Unknown fields are ignored, because clients send each other's extensions; fields
that would change the answer and are not supported are refused.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

import msgspec

from minserve.server.api_errors import ApiError, bad_request
from minserve.server.fields import Fields, decode_object, decode_value
from minserve.server.grammars import OutputForm, parse_form
from minserve.server.options import (
    MAX_TOP_LOGPROBS,
    ModelFacts,
    Options,
    check_length,
    check_vocabulary,
    parse_options,
    token_ids,
)

MAX_SEQUENCES = 2048
"""Prompts times choices of one body."""
_id_lists_decoder = msgspec.json.Decoder(list[list[int]])
_texts_decoder = msgspec.json.Decoder(list[str])


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionRequest:
    options: Options
    form: OutputForm | None
    prompts: list[str | list[int]]
    """Texts, or token ids within the vocabulary."""
    add_special_tokens: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may or must call."""

    kind: Literal["none", "auto", "required", "named"]
    name: str | None = None
    """Of the function to call, for kind "named"."""
    one_call: bool = False
    """The client wants no more than one call."""

    @property
    def forced(self) -> bool:
        return self.kind in ("required", "named")


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """A conversation and how its template is to write it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_arguments: dict[str, Any]
    tool_choice: ToolChoice


@dataclasses.dataclass(frozen=True, slots=True)
class ChatRequest:
    options: Options
    form: OutputForm | None
    chat: Chat


def parse_completion(body: bytes | bytearray, facts: ModelFacts) -> CompletionRequest:
    """A body of /v1/completions. Raises ApiError naming the field."""
    fields = decode_object(body)
    model = _model(fields, facts)
    echo = fields.boolean("echo", False)
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    options = parse_options(fields, facts, model, echo=echo, logprobs=logprobs)
    prompts = parse_prompts(fields, facts)
    if len(prompts) * options.best_of > MAX_SEQUENCES:
        message = f"{len(prompts)} prompts with {options.best_of} choices each are over the limit of {MAX_SEQUENCES} sequences"
        raise bad_request(message, "prompt")
    return CompletionRequest(options, parse_form(fields), prompts, fields.boolean("add_special_tokens", True))


def parse_chat(body: bytes | bytearray, facts: ModelFacts) -> ChatRequest:
    """A body of /v1/chat/completions. Raises ApiError naming the field."""
    fields = decode_object(body)
    model = _model(fields, facts)
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    wanted = fields.boolean("logprobs", False)
    if top and not wanted:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    options = parse_options(fields, facts, model, echo=False, logprobs=(top or 0) if wanted else None)
    return ChatRequest(options, parse_form(fields), parse_conversation(fields))


def parse_conversation(fields: Fields) -> Chat:
    """What a chat template is given."""
    tools = parse_tools(fields)
    choice = _tool_choice(fields, [tool["function"]["name"] for tool in tools or ()])
    if choice.kind == "none":
        tools = None
    continued = fields.boolean("continue_final_message", False)
    generation_prompt = fields.boolean("add_generation_prompt", not continued)
    if continued and generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise bad_request(message, "continue_final_message")
    return Chat(parse_messages(fields), tools, generation_prompt, continued, _template_arguments(fields), choice)


def parse_prompts(fields: Fields, facts: ModelFacts) -> list[str | list[int]]:
    """`prompt` in its four forms: a string, strings, token ids, lists of token ids."""
    raw = fields.raw("prompt")
    if raw is None:
        raise bad_request("prompt is required", "prompt")
    if bytes(memoryview(raw)[:1]) != b"[":
        return [_one_prompt(raw, "prompt", facts)]
    start = bytes(memoryview(raw)[1:65]).lstrip()[:1]
    if start not in (b'"', b"["):
        return [_one_prompt(raw, "prompt", facts)]
    prompts = _several_prompts(raw, texts=start == b'"')
    if len(prompts) > MAX_SEQUENCES:
        raise bad_request(f"{len(prompts)} prompts are over the limit of {MAX_SEQUENCES}", "prompt")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            _check_prompt_ids(prompt, prompt_name(index, len(prompts)), facts)
    return prompts


def _several_prompts(raw: msgspec.Raw, *, texts: bool) -> list[str | list[int]]:
    """Decoded in one go, for a decoder that knows the type stops at the first wrong element."""
    try:
        return list((_texts_decoder if texts else _id_lists_decoder).decode(raw))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        where = re.search(r"\$(\[\d+\])", str(error))
        kind = "strings" if texts else "lists of token ids"
        raise bad_request(f"prompt must hold {kind} only: {error}", f"prompt{where[1] if where else ''}") from None


def _check_prompt_ids(ids: list[int], param: str, facts: ModelFacts) -> None:
    check_length(len(ids), facts.context_length, param)
    if not ids:
        raise bad_request(f"{param} must hold at least one token", param)
    check_vocabulary(ids, param, facts)


def prompt_name(index: int, count: int) -> str:
    """How errors call one of `count` prompts."""
    return "prompt" if count == 1 else f"prompt[{index}]"


def _template_arguments(fields: Fields) -> dict[str, Any]:
    """`chat_template_kwargs`, without the names that the server itself gives to templates; before them what they say otherwise,
    `reasoning_effort`, in the words of DeepSeek's, Kimi's and Qwen's templates.
    """
    effort = fields.string("reasoning_effort")
    thinks = effort != "none"
    asked = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    value = fields.value("chat_template_kwargs")
    if value is None:
        return asked
    if not isinstance(value, dict):
        raise bad_request("chat_template_kwargs must be an object", "chat_template_kwargs")
    for name in ("messages", "tools", "add_generation_prompt", "self"):
        if name in value:
            raise bad_request(f"chat_template_kwargs must not set {name}", "chat_template_kwargs")
    return {**asked, **value}


def _one_prompt(raw: msgspec.Raw, param: str, facts: ModelFacts) -> str | list[int]:
    first = bytes(memoryview(raw)[:1])
    if first == b"[":
        ids = token_ids(raw, param, facts, facts.context_length)
        _check_prompt_ids(ids, param, facts)
        return ids
    text = decode_value(raw, param)
    if not isinstance(text, str):
        raise bad_request(f"{param} must be a string, strings, token ids or lists of token ids", param)
    return text


def _model(fields: Fields, facts: ModelFacts) -> str:
    name = fields.string("model")
    if name is None:
        return facts.name
    if name not in facts.names:
        raise unknown_model(name, facts)
    return name


def unknown_model(name: str, facts: ModelFacts) -> ApiError:
    message = f"The model {name[:200]!r} does not exist here; served: {', '.join(facts.names)}"
    return ApiError(404, message, param="model", code="model_not_found")


def _tool_choice(fields: Fields, names: list[str]) -> ToolChoice:
    """`names`: of the request's tools."""
    choice = fields.value("tool_choice")
    one_call = not fields.boolean("parallel_tool_calls", True)
    if choice is None:
        return ToolChoice("auto", None, one_call)
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        if name not in names:
            raise bad_request(f"tool_choice names {_name(name)}, which is not among the tools", "tool_choice")
        return ToolChoice("named", name, one_call=True)
    if choice not in ("none", "auto", "required"):
        message = 'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        raise bad_request(message, "tool_choice")
    if choice == "required" and not names:
        raise bad_request('tool_choice "required" needs tools', "tool_choice")
    return ToolChoice(choice, None, one_call)


def _name(value: Any) -> str:
    return repr(value[:60]) if isinstance(value, str) else "no string"


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def parse_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation as `{"role", "content", ...}` dicts: developer is system, lists of text parts are one string.

    `content` is None only for an assistant that called tools. Raises ApiError naming the message and field.
    """
    messages = fields.objects("messages")
    if not messages:
        raise bad_request("messages is required" if messages is None else "messages must not be empty", "messages")
    return [_message(message) for message in messages]


def parse_tools(fields: Fields) -> list[dict[str, Any]] | None:
    """The functions that the model may call, as the client wrote them; None when there are none."""
    tools = fields.objects("tools") or ()
    for tool in tools:
        if tool.string("type") != "function":
            raise bad_request(f'{tool.param("type")} must be "function"', tool.param("type"))
        function, _ = _function(tool)
        function.string("description")
        function.object("parameters")
    return [tool.values() for tool in tools] or None


def _function(fields: Fields) -> tuple[Fields, str]:
    """The member `function` of a tool or a call, and its name."""
    function = fields.object("function")
    if function is None:
        raise bad_request(f"{fields.param('function')} is required", fields.param("function"))
    name = function.string("name")
    if not name:
        raise bad_request(f"{function.param('name')} must be a string that is not empty", function.param("name"))
    return function, name


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.string("role")
    if role not in _ROLES:
        shown = "missing" if role is None else f"{role[:40]!r}"
        raise bad_request(f"{fields.param('role')} is {shown}; roles are {', '.join(_ROLES)}", fields.param("role"))
    message: dict[str, Any] = {"role": _ROLES[role]}
    calls = [_tool_call(call) for call in fields.objects("tool_calls") or ()] if role == "assistant" else []
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
        return "".join(map(_part, fields.objects("content") or ()))
    content = fields.value("content")
    if not isinstance(content, str):
        raise bad_request(f"{param} must be a string or a list of text parts", param)
    return content


def _part(part: Fields) -> str:
    kind = part.string("type")
    if kind != "text":
        shown = "missing" if kind is None else f"{kind[:40]!r}"
        raise bad_request(f"{part.param('type')} is {shown}; this model reads only parts of type 'text'", part.param("type"))
    text = part.string("text")
    if text is None:
        raise bad_request(f"{part.param('text')} must be a string", part.param("text"))
    return text


def _tool_call(call: Fields) -> dict[str, Any]:
    """`{"id", "type", "function": {"name", "arguments"}}`; arguments stay a string or an object, as they came."""
    function, name = _function(call)
    arguments = function.value("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        param = function.param("arguments")
        raise bad_request(f"{param} must be a string of JSON or an object", param)
    spoken = {"name": name, "arguments": "{}" if arguments is None else arguments}
    return {"id": call.string("id"), "type": "function", "function": spoken}
