"""How the text of one answer is to be read: reasoning first, then tool calls, the rest is content. Knows no HTTP and no JSON.

Stop strings come after: they are looked for in the content alone, so that neither a train of thought nor a call's arguments end
an answer.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from minserve.server.qwen_calls import ParameterTypes, parameter_types
from minserve.server.reasoning import AnswerStart, ReasoningParser, ThinkTags, answer_start
from minserve.server.tool_calls import CallArguments, CallStart, Event, ToolCallParser
from minserve.server.tool_formats import TOOL_FORMATS, CallLayout, ToolFormat, call_layout


class Reasoning(NamedTuple):
    """A piece of the reasoning."""

    text: str


class CallDelta(NamedTuple):
    """A piece of a tool call. The first of a call has its id and name, and no arguments; the others have arguments alone."""

    number: int
    """Counts the answer's calls from 0."""
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


Part = str | Reasoning | CallDelta
"""A `str` is content."""


class AnswerReader:
    """One answer's text, cut anywhere, as parts."""

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None, *, one_call: bool) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._one_call = one_call
        self._num_calls = 0
        self.over = False
        """Set when a call began beyond the one that is allowed; nothing after it is handed out."""
        self.reasoned = False
        """Whether the text of the last push belonged to the reasoning, its tags included; as far as is known."""
        self.all_content = calls is None and (reasoning is None or reasoning.over)
        """Further text is content as it comes; it need not be pushed."""

    def push(self, text: str) -> list[Part]:
        """What is certain now. No part is empty."""
        parser = self._reasoning
        if parser is None:
            return list(self._content(text))
        was_thinking = parser.thinking
        reasoning, content = parser.push(text)
        self.reasoned = was_thinking or parser.thinking or bool(reasoning)
        self.all_content = self._calls is None and parser.over
        parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
        if content:
            parts += self._content(content)
        return parts

    def finish(self) -> list[Part]:
        """The rest, once the text is complete."""
        parts: list[Part] = []
        if self._reasoning is not None:
            reasoning, content = self._reasoning.finish()
            parts += [Reasoning(reasoning)] if reasoning else []
            parts += self._content(content) if content else []
        if self._calls is not None:
            parts += self._numbered(self._calls.finish())
        return parts

    def _content(self, text: str) -> Iterable[Part]:
        return (text,) if self._calls is None else self._numbered(self._calls.push(text))

    def _numbered(self, events: Iterable[Event]) -> Iterable[Part]:
        for event in events:
            if self._one_call and self._num_calls == 1 and isinstance(event, CallStart):
                self.over = True
            if self.over:
                return
            if isinstance(event, CallStart):
                self._num_calls += 1
                call_id = event.call_id or f"call_{uuid.uuid4().hex[:24]}"
                yield CallDelta(self._num_calls - 1, call_id=call_id, name=event.name)
            elif isinstance(event, CallArguments):
                yield CallDelta(self._num_calls - 1, event.text)
            else:
                yield event


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """Of one request. Every choice gets a reader of its own."""

    tags: ThinkTags | None = None
    start: AnswerStart = AnswerStart.CONTENT
    tool_format: ToolFormat | None = None
    """None: calls are not looked for."""
    parameter_types: Mapping[str, ParameterTypes]
    """By function name; what is read of the schemas, once for all choices."""
    one_call: bool = False
    calls_are_a_stop: bool = False
    """The finish reason stays `stop` where calls were made: the client named the function itself."""
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens whose text the readers need."""

    def reader(self) -> AnswerReader:
        reasoning = ReasoningParser(self.tags, self.start) if self.tags is not None else None
        calls = self.tool_format.parser(self.parameter_types) if self.tool_format is not None else None
        return AnswerReader(reasoning, calls, one_call=self.one_call)


_TOOL_PARSERS = {
    "deepseek_v3": "deepseek",
    "deepseek_r1": "deepseek",
    "deepseek_v31": "deepseek",
    "kimi_k2": "kimi_k2",
    "hermes": "qwen",
    "qwen3_coder": "qwen",
}
_FAMILIES = {"deepseek": "deepseek", "kimi": "kimi_k2", "qwen": "qwen"}
"""First word of a model type to the tool format; all three put reasoning into the same tags."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFormats:
    """What the served model writes."""

    tags: ThinkTags | None
    tool_format: ToolFormat | None
    special_tokens: Mapping[str, int]
    """The marks of both that are special tokens."""
    call_layout: CallLayout | None
    """How a call that is forced shall be spelled; there as the tool format is."""
    opens_reasoning: bool = True
    """Whether the model may be expected to begin a reasoning by itself. One whose template has no word of it only has the
    tags in its vocabulary, and where an answer is held to a form it shall come to the point."""

    def of_answer(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        continued: str | None = None,
        one_call: bool = False,
        calls_are_a_stop: bool = False,
    ) -> AnswerFormat | None:
        """`tools`: those that may be called. `continued`: see answer_start. None when all text is content."""
        tool_format = self.tool_format if tools else None
        tags = self.tags
        if tags is None and tool_format is None:
            return None
        marks: list[str] = []
        start = AnswerStart.CONTENT
        if tags is not None:
            start = answer_start(prompt, tags, continued)
            marks += (tags.opening, tags.closing)
            if tool_format is not None:
                tags = dataclasses.replace(tags, implied_ends=tool_format.ends_reasoning)
        if tool_format is not None:
            marks += tool_format.marks
        return AnswerFormat(
            tags=tags,
            start=start,
            tool_format=tool_format,
            parameter_types=parameter_types(tools or ()),
            one_call=one_call,
            calls_are_a_stop=calls_are_a_stop,
            shown_token_ids=frozenset(self.special_tokens[mark] for mark in marks if mark in self.special_tokens),
        )


def model_formats(
    tool_parser: str, reasoning_parser: str, model_type: str, special_tokens: Mapping[str, int], template: str
) -> ModelFormats:
    """The parsers by their names as settings have them; "auto" goes by the model's type.

    `special_tokens`: text to id. `template`: the chat template, which shows the model how to write calls.
    """
    family = next((name for word, name in _FAMILIES.items() if model_type.startswith(word)), None)
    named = family if tool_parser == "auto" else _TOOL_PARSERS.get(tool_parser)
    thinks = reasoning_parser != "none" and (reasoning_parser != "auto" or family is not None)
    tags = ThinkTags() if thinks else None
    opens = reasoning_parser != "auto" or (tags is not None and (tags.opening in template or tags.closing in template))
    tool_format, layout = (None, None) if named is None else (TOOL_FORMATS[named], call_layout(named, template))
    return ModelFormats(tags, tool_format, special_tokens, layout, opens)
