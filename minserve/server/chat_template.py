"""Chat messages to prompt text, with the checkpoint's own Jinja template. Knows nothing of tokens or of HTTP.

Templates are written for one library's conventions; this module offers those conventions in a sandbox and keeps what a
template may do to one request: at worst it fails with ChatTemplateError.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from minserve.errors import CheckpointError

_CONTINUATION_MARK = "\ue000continue\ue000"
"""Appended to the message that is to be continued, to find its end in the rendered text. Private-use characters."""
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


class ChatTemplateError(ValueError):
    """These messages cannot be rendered; the text is for the client."""


class ChatTemplate:
    """A checkpoint's templates, compiled. One of several named ones is chosen by whether the request has tools."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`templates`: name to source, the usual names being "default" and "tool_use". `special_tokens`: `bos_token` and kin.

        Raises CheckpointError when a template is not valid Jinja.
        """
        environment = _environment()
        self.source = "\n".join(templates.values())
        """Of all templates, for those who look for a family's marks in it."""
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in templates.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise CheckpointError(f"the chat template {name!r} is not valid, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `continue_final_message` ends it inside the last message, for the model to go on.

        Raises ChatTemplateError: no template, a refusal by the template itself, or messages it cannot handle.
        """
        template = self._choose(bool(tools))
        extra = dict(template_kwargs or {})
        if clash := _RESERVED.intersection(extra):
            raise ChatTemplateError(f"chat_template_kwargs must not set {sorted(clash)[0]!r}")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
        prepared = [_prepare(message) for message in messages]
        if continue_final_message:
            if not prepared or not isinstance(prepared[-1]["content"], str):
                raise ChatTemplateError("continue_final_message needs a last message with text")
            prepared[-1]["content"] += _CONTINUATION_MARK
        variables = {**self._special_tokens, "documents": None, **extra, "messages": prepared, "tools": tools or None}
        try:
            text = template.render({**variables, "add_generation_prompt": add_generation_prompt})
        except ChatTemplateError:
            raise
        except Exception as error:  # a template may fail in any way; the fault is this request's alone
            raise ChatTemplateError(f"the chat template failed on these messages: {error}") from error
        if not continue_final_message:
            return text
        begun, mark, _ = text.rpartition(_CONTINUATION_MARK)
        if not mark:
            raise ChatTemplateError("the chat template does not show the last message's content, so it cannot be continued")
        return begun

    def _choose(self, has_tools: bool) -> jinja2.Template:
        names = ["tool_use", "default"] if has_tools else ["default"]
        for name in names:
            if name in self._templates:
                return self._templates[name]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        if self._templates:
            raise ChatTemplateError(f"the model has no default chat template, only {sorted(self._templates)}")
        raise ChatTemplateError("the model has no chat template: use /v1/completions, or start the server with --chat-template")


class NoContent(str):
    """The content of a message that has none: empty text that a template also finds to be none.

    Some templates ask `content is none`, others append the content to a string; both work with this.
    """

    __slots__ = ()


class ToolArguments(dict[str, Any]):
    """The arguments of a tool call: an object that is also its own JSON text.

    Some templates walk the arguments or pass them to `tojson`, others append them to a string; both work with this.
    """

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # no escapes for HTML either
    environment.tests["none"] = lambda value: value is None or isinstance(value, NoContent)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(str(message))


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with content and tool-call arguments in the forms that all templates accept."""
    prepared = dict(message)
    if prepared.get("content") is None:
        prepared["content"] = NoContent()
    if isinstance(calls := prepared.get("tool_calls"), list):
        prepared["tool_calls"] = [_prepare_call(call) for call in calls]
    return prepared


def _prepare_call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        function["arguments"] = ToolArguments(arguments, json.dumps(arguments, ensure_ascii=False))
    elif isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None  # what a model wrote badly stays the text that it wrote
        if isinstance(parsed, dict):
            function["arguments"] = ToolArguments(parsed, arguments)
    return {**call, "function": function}
