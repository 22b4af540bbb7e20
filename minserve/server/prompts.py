"""Checked requests become token ids, long texts in a thread. Knows nothing of HTTP or engines."""

from __future__ import annotations

import dataclasses
import re

import msgspec

from minserve.request import Grammar
from minserve.server import openai
from minserve.server.answer_format import AnswerFormat
from minserve.server.api_errors import bad_request
from minserve.server.chat_template import ChatTemplateError
from minserve.server.fields import Reader, decode_object
from minserve.server.generation import LoadedModel, Prompt
from minserve.server.grammars import ForcedCalls, OutputForm, build_grammar, parse_form
from minserve.server.options import Options, check_length, parse_options
from minserve.server.reasoning import AnswerStart

MAX_TOTAL_TOKENS = 1 << 23
"""Prompt tokens of one body, each choice counted: every choice carries its prompt to the engine."""

_completion, _chat = Reader(openai.CompletionFields), Reader(openai.ChatFields)
_FIELDS_OF_GRAMMARS = (b'"response_format"', b'"guided_', b'"structured_outputs"', b'"tool_choice"', b'"format"')
_PROMPT_OF_IDS = re.compile(rb'"prompt"\s*:\s*\[[\s\[]*\d')


def prepare_completion(body: bytes | bytearray, model: LoadedModel) -> tuple[Options, list[Prompt]]:
    """A body of /v1/completions, down to token ids. Raises ApiError."""
    fields = decode_object(body)
    if "prompt" not in fields:
        raise bad_request("prompt is required", "prompt")
    asked = _completion.read(fields)
    options = parse_options(fields, model.facts, echo=asked.echo, logprobs=asked.logprobs)
    given = openai.parse_prompts(asked.prompt, model.facts)
    if len(given) * options.best_of > openai.MAX_SEQUENCES:
        counted = f"{len(given)} prompts with {options.best_of} choices each"
        raise bad_request(f"{counted} are over the limit of {openai.MAX_SEQUENCES} sequences", "prompt")
    prompts = []
    for index, prompt in enumerate(given):
        if isinstance(prompt, str):
            prompts.append(Prompt(encode(prompt, asked.add_special_tokens, model, openai.prompt_name(index, len(given))), prompt))
        else:
            prompts.append(Prompt(prompt, None))
    _check_total(prompts, options, "prompt")
    return _with_grammar(options, build_grammar(parse_form(fields))), prompts


def prepare_chat(body: bytes | bytearray, model: LoadedModel) -> tuple[Options, list[Prompt]]:
    """A body of /v1/chat/completions, down to token ids. Raises ApiError."""
    fields = decode_object(body)
    asked = _chat.read(fields)
    if asked.top_logprobs and not asked.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    options = parse_options(fields, model.facts, echo=False, logprobs=logprobs)
    chat = openai.parse_conversation(fields)
    form = parse_form(fields)
    text = render(chat, model)
    prompts = [Prompt(encode(text, True, model, "messages"), text)]
    _check_total(prompts, options, "n")
    if chat.forces_calls and model.formats.tool_format is None:
        message = "It is not known how this model writes tool calls; start the server with --tool-call-parser"
        raise bad_request(message, "tool_choice")
    answer = model.formats.of_answer(
        text,
        chat.tools,
        continued=chat.messages[-1]["content"] if chat.continue_final_message else None,
        one_call=chat.one_call,
        calls_are_a_stop=chat.function is not None,
    )
    grammar = _chat_grammar(chat, form, answer, model)
    return _with_grammar(dataclasses.replace(options, answer=answer), grammar), prompts


def asks_for_grammar(body: bytes | bytearray) -> bool:
    """Whether a body may ask for a grammar, which takes long to build. May be wrong, at the price of that time or of a thread."""
    return any(name in body for name in _FIELDS_OF_GRAMMARS)


def holds_token_ids(body: bytes | bytearray) -> bool:
    """Whether a body's prompts are likely token ids, which are only read, not made. May be wrong, at the price of that time."""
    return _PROMPT_OF_IDS.search(body) is not None


def _with_grammar(options: Options, grammar: Grammar | None) -> Options:
    return dataclasses.replace(options, sampling=msgspec.structs.replace(options.sampling, grammar=grammar))


def _chat_grammar(chat: openai.Chat, form: OutputForm | None, answer: AnswerFormat, model: LoadedModel) -> Grammar | None:
    layout = model.formats.call_layout
    calls = None
    if chat.tools and layout is not None and (chat.forces_calls or form is not None):
        calls = ForcedCalls(
            layout=layout,
            marks=model.formats.special_tokens,
            tools=[tool for tool in chat.tools if chat.function in (None, tool["function"]["name"])],
            one_call=chat.one_call,
            instead=not chat.forces_calls,
        )
    if answer.start is AnswerStart.CONTENT:
        return build_grammar(form, calls)
    if answer.start is AnswerStart.INSIDE:
        return build_grammar(form, calls, answer.tags.closing)
    opening = model.tokenizer.token_id(answer.tags.opening) if model.formats.opens_reasoning else None
    return build_grammar(form, calls, answer.tags.closing if opening is not None else "", opening)


def _check_total(prompts: list[Prompt], options: Options, param: str) -> None:
    total = options.best_of * sum(len(prompt.token_ids) for prompt in prompts)
    if total > MAX_TOTAL_TOKENS:
        message = f"The prompts of all choices add up to {total} tokens; one request may have {MAX_TOTAL_TOKENS}"
        raise bad_request(message, param)


def render(chat: openai.Chat, model: LoadedModel) -> str:
    """A conversation as the model's template writes it. Raises ApiError when the template refuses."""
    try:
        return model.tokenizer.template.render(
            chat.messages,
            tools=chat.tools,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            template_kwargs=chat.template_arguments,
        )
    except ChatTemplateError as error:
        raise bad_request(str(error), "messages") from error


def encode(text: str, add_special_tokens: bool, model: LoadedModel, param: str) -> list[int]:
    """Token ids, at least one and fewer than the context length. What is far too long is refused before it is tokenised."""
    limit = model.facts.context_length
    num_bytes = len(text) if text.isascii() else len(text.encode())
    check_length(model.tokenizer.fewest_tokens(num_bytes), limit, param, at_least=True)
    token_ids = model.tokenizer.encode(text, add_special_tokens)
    if not token_ids:
        raise bad_request(f"{param} is empty, and this model has no start token to begin from", param)
    check_length(len(token_ids), limit, param)
    if max(token_ids) >= model.facts.vocab_size:
        raise bad_request(f"{param} holds a token that the model does not have (id {max(token_ids)})", param)
    return token_ids
