"""How the text of one answer is to be read: reasoning first, then tool calls, the rest is content. Knows no HTTP and no JSON.

Stop strings come after: they are looked for in the content alone, so that neither a train of thought nor a call's arguments end
an answer.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from minserve.server.qwen_calls import ParameterTypes, parameter_types
from minserve.server.reasoning import AnswerStart, ReasoningParser, ThinkTags, answer_start
from minserve.server.tool_calls import CallArguments, CallStart, Event, ToolCallParser
from minserve.server.tool_formats import TOOL_FORMATS, ToolFormat, call_layout


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

    def __init__(self, reasoning: ReasoningParser, calls: ToolCallParser | None, *, one_call: bool) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._one_call = one_call
        self._num_calls = 0
        self.over = False
        """Set when a call began beyond the one that is allowed; nothing after it is handed out."""
        self.reasoned = False
        """Whether the text of the last push belonged to the reasoning, its tags included; as far as is known."""

    @property
    def all_content(self) -> bool:
        """Further text is content as it comes; it need not be pushed."""
        return self._calls is None and self._reasoning.over

    def push(self, text: str) -> Iterator[Part]:
        """What is certain now. No part is empty."""
        was_thinking = self._reasoning.thinking
        reasoning, content = self._reasoning.push(text)
        self.reasoned = was_thinking or self._reasoning.thinking or bool(reasoning)
        return self._parts(reasoning, content)

    def finish(self) -> Iterator[Part]:
        """The rest, once the text is complete."""
        yield from self._parts(*self._reasoning.finish())
        if self._calls is not None:
            yield from self._numbered(self._calls.finish())

    def _parts(self, reasoning: str, content: str) -> Iterator[Part]:
        if reasoning:
            yield Reasoning(reasoning)
        if content:
            yield from [content] if self._calls is None else self._numbered(self._calls.push(content))

    def _numbered(self, events: Iterable[Event]) -> Iterator[Part]:
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

    tags: ThinkTags = dataclasses.field(default_factory=ThinkTags)
    start: AnswerStart = AnswerStart.CONTENT
    tool_format: ToolFormat | None = None
    """None: calls are not looked for."""
    parameter_types: Mapping[str, ParameterTypes] = dataclasses.field(default_factory=dict)
    """By function name; what is read of the schemas, once for all choices."""
    one_call: bool = False
    calls_are_a_stop: bool = False
    """The finish reason stays `stop` where calls were made: the client named the function itself."""
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens whose text the readers need."""

    def reader(self) -> AnswerReader:
        calls = self.tool_format.parser(self.parameter_types) if self.tool_format is not None else None
        return AnswerReader(ReasoningParser(self.tags, self.start), calls, one_call=self.one_call)


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


class ModelFormats:
    """What the served model writes."""

    def __init__(
        self, tool_parser: str, reasoning_parser: str, model_type: str, special_tokens: Mapping[str, int], template: str
    ) -> None:
        """The parsers by their names as settings have them; "auto" goes by the model's type.

        `special_tokens`: text to id. `template`: the chat template, which shows the model how to write calls.
        """
        family = next((name for word, name in _FAMILIES.items() if model_type.startswith(word)), None)
        named = family if tool_parser == "auto" else _TOOL_PARSERS.get(tool_parser)
        self.special_tokens = special_tokens
        self.tool_format = TOOL_FORMATS[named] if named is not None else None
        self.call_layout = call_layout(named, template) if named is not None else None
        """How a call that is forced shall be spelled."""
        self._tags = ThinkTags()
        self._reasons = reasoning_parser != "none" and (reasoning_parser != "auto" or family is not None)
        self.opens_reasoning = reasoning_parser != "auto" or self._tags.opening in template or self._tags.closing in template
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
    ) -> AnswerFormat:
        """`tools`: those that may be called. `continued`: see answer_start."""
        tool_format = self.tool_format if tools else None
        marks = [self._tags.opening, self._tags.closing] if self._reasons else []
        tags = self._tags
        if tool_format is not None:
            marks += tool_format.marks
            tags = dataclasses.replace(tags, implied_ends=tool_format.ends_reasoning)
        return AnswerFormat(
            tags=tags,
            start=answer_start(prompt, tags, continued) if self._reasons else AnswerStart.CONTENT,
            tool_format=tool_format,
            parameter_types=parameter_types(tools or ()),
            one_call=one_call,
            calls_are_a_stop=calls_are_a_stop,
            shown_token_ids=frozenset(self.special_tokens[mark] for mark in marks if mark in self.special_tokens),
        )
