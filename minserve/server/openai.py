"""OpenAI's request bodies, checked field by field, become records. Knows nothing of tokenizers, engines or answers.

Nothing that fails here reaches the engine. Unknown fields are ignored, because clients send each other's extensions; fields
that would change the answer and are not supported are refused.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

import msgspec

from minserve.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from minserve.server.api_errors import ApiError, bad_request
from minserve.server.chat_messages import parse_messages, parse_tools
from minserve.server.fields import Fields, decode_object, decode_value, is_number
from minserve.server.grammars import OutputForm, parse_form
from minserve.server.options import ModelFacts, Options, SamplingOptions, check_length

MAX_CHOICES = 128
MAX_SEQUENCES = 2048
"""Prompts times choices of one body."""
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
"""Characters of one stop string."""
_GREEDY_BELOW = 1e-5
_INT64 = 1 << 63

_NOT_SUPPORTED = ("guided_grammar", "suffix")
_ids_decoder = msgspec.json.Decoder(list[int])
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
    options = _options(fields, facts, model, echo=echo, logprobs=logprobs)
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
    options = _options(fields, facts, model, echo=False, logprobs=(top or 0) if wanted else None)
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
    _check_vocabulary(ids, param, facts)


def prompt_name(index: int, count: int) -> str:
    """How errors call one of `count` prompts."""
    return "prompt" if count == 1 else f"prompt[{index}]"


def token_ids(raw: msgspec.Raw, param: str, facts: ModelFacts, limit: int | None = None) -> list[int]:
    """A JSON array of token ids within the vocabulary, fewer than `limit` of them.

    The length is read off the commas before anything is decoded: decoding millions of numbers would stall every thread.
    """
    if limit is not None:
        check_length(bytes(raw).count(b",") + 1, limit, param)
    try:
        ids = _ids_decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise bad_request(f"{param} must be a string or an array of integers: {error}", param) from None
    _check_vocabulary(ids, param, facts)
    return ids


def _check_vocabulary(ids: list[int], param: str, facts: ModelFacts) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < facts.vocab_size):
        index, wrong = next((index, id_) for index, id_ in enumerate(ids) if not 0 <= id_ < facts.vocab_size)
        shown = wrong if abs(wrong) < _INT64 else "a very large number"
        raise bad_request(f"{param}[{index}] is {shown}; token ids are 0 to {facts.vocab_size - 1}", param)


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


def _options(fields: Fields, facts: ModelFacts, model: str, *, echo: bool, logprobs: int | None) -> Options:
    _refuse_unsupported(fields)
    stream = fields.boolean("stream", False)
    include_usage, continuous_usage = _stream_options(fields) if stream else (False, False)
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    best_of = fields.integer("best_of", 1, MAX_CHOICES) or n
    if best_of < n:
        raise bad_request(f"best_of ({best_of}) must not be below n ({n})", "best_of")
    if best_of > n and stream:
        raise bad_request("best_of above n cannot be streamed: the best is known only at the end", "best_of")
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_TOP_LOGPROBS)
    if prompt_logprobs is not None and stream:
        raise bad_request("prompt_logprobs cannot be streamed", "prompt_logprobs")
    return Options(
        model=model,
        sampling=_sampling(fields, facts, echo),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        n=n,
        best_of=best_of,
        stop=_stop_strings(fields),
        include_stop=fields.boolean("include_stop_str_in_output", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        echo=echo,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        return_token_ids=fields.boolean("return_token_ids", False),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids", False),
    )


def _sampling(fields: Fields, facts: ModelFacts, echo: bool) -> SamplingOptions:
    older = fields.integer("max_tokens", 0 if echo else 1)
    newer = fields.integer("max_completion_tokens", 0 if echo else 1)
    max_tokens = older if newer is None else newer
    min_tokens = fields.integer("min_tokens", 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_request(f"min_tokens ({min_tokens}) must not be above max_tokens ({max_tokens})", "min_tokens")
    ignore_eos = fields.boolean("ignore_eos", False)
    stop_token_ids = _stop_token_ids(fields, facts)
    num_stop_ids = len({*stop_token_ids, *(() if ignore_eos else facts.stop_token_ids)})
    if min_tokens > 0 and num_stop_ids > MAX_STOP_TOKEN_IDS:
        message = f"min_tokens goes with at most {MAX_STOP_TOKEN_IDS} stop ids, the model's own included; here are {num_stop_ids}"
        raise bad_request(message, "stop_token_ids")
    temperature = fields.number("temperature", 0, 2)
    top_k = fields.integer("top_k", -1) or 0
    return SamplingOptions(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=1.0 if temperature is None else 0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=0 if top_k == -1 or top_k >= facts.vocab_size else top_k,
        top_p=_or(fields.number("top_p", 0, 1, above_least=True), 1.0),
        min_p=_or(fields.number("min_p", 0, 1), 0.0),
        repetition_penalty=_or(fields.number("repetition_penalty", 0, 10, above_least=True), 1.0),
        presence_penalty=_or(fields.number("presence_penalty", -2, 2), 0.0),
        frequency_penalty=_or(fields.number("frequency_penalty", -2, 2), 0.0),
        seed=fields.integer("seed", -_INT64, _INT64 - 1),
        logit_bias=_logit_bias(fields, facts),
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stream_options(fields: Fields) -> tuple[bool, bool]:
    options = fields.object("stream_options")
    if options is None:
        return False, False
    return options.boolean("include_usage", False), options.boolean("continuous_usage_stats", False)


def _stop_strings(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise bad_request("stop must be null, a string or an array of strings", "stop")
    if not all(strings):
        raise bad_request("stop must not hold an empty string", "stop")
    if len(strings) > MAX_STOP_STRINGS or any(len(string) > MAX_STOP_LENGTH for string in strings):
        raise bad_request(f"stop holds at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_LENGTH} characters", "stop")
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(fields: Fields, facts: ModelFacts) -> tuple[int, ...]:
    raw = fields.raw("stop_token_ids")
    return () if raw is None else tuple(dict.fromkeys(token_ids(raw, "stop_token_ids", facts)))


def _logit_bias(fields: Fields, facts: ModelFacts) -> dict[int, float]:
    value = fields.value("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_request("logit_bias must be an object of token ids and numbers", "logit_bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise bad_request(f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIAS} are possible", "logit_bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < facts.vocab_size):
            message = f"logit_bias has the key {key[:40]!r}; keys are token ids as strings, 0 to {facts.vocab_size - 1}"
            raise bad_request(message, "logit_bias")
        if not is_number(bias):
            raise bad_request(f"logit_bias[{key!r}] must be a number", "logit_bias")
        biases[int(key)] = float(max(-100, min(100, bias)))
    return biases


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


def _refuse_unsupported(fields: Fields) -> None:
    for name in _NOT_SUPPORTED:
        if fields.has(name) and fields.value(name) != "":
            raise bad_request(f"{name} is not supported by this version", name)
