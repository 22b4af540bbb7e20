"""How families of models write tool calls, by name: read from their text, and laid out for a grammar that forces them.

Knows nothing of tokens, streaming, grammar languages or HTTP.

What is not well-formed enough to tell the function's name is content, markup included. Once a call has begun it stays one:
arguments that are not JSON are passed on as they are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from minserve.server.qwen_calls import CALL_BEGIN, CALL_END, ParameterTypes, read_qwen
from minserve.server.tool_calls import (
    LONGEST_HEADER,
    CallArguments,
    CallStart,
    Reading,
    Source,
    ToolCallParser,
    read_content,
    read_object,
    read_until,
    skip_ends,
    skip_space,
    take_mark,
)

_FENCE = "```"
"""May stand behind the object of a call."""


@dataclasses.dataclass(frozen=True, slots=True)
class MarkedFormat:
    """Calls between marks, each a header with the function's name and then a JSON object."""

    section_begins: tuple[str, ...]
    section_ends: tuple[str, ...]
    call_begin: str
    separator: str
    """Within the header."""
    call_end: str
    header: re.Pattern[str]
    """All text between `call_begin` and the object; groups `name`, and `index` where ids are `functions.NAME:INDEX`."""


# V3 and R1 write `function<sep>NAME`, a line break and the object in a fenced block; V3.1 writes `NAME<sep>` and the object.
_DEEPSEEK = MarkedFormat(
    ("<｜tool▁calls▁begin｜>",),
    ("<｜tool▁calls▁end｜>",),
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    re.compile(
        r"\s*function<｜tool▁sep｜>\s*(?P<name>[^\s<>{}`]+)\s*(?:```(?:json)?)?\s*"
        r"|\s*(?P<plain_name>[^\s<>{}`]+)\s*<｜tool▁sep｜>\s*"
    ),
)
_KIMI_K2 = MarkedFormat(
    ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    re.compile(r"\s*(?:functions\.)?(?P<name>[^\s<>{}]+?)(?::(?P<index>\d{1,9}))?\s*<\|tool_call_argument_begin\|>\s*"),
)


def read_marked(source: Source, form: MarkedFormat) -> Reading[None]:
    begins = (*form.section_begins, form.call_begin)
    ends: tuple[str, ...] = ()  # what still has to close a call that was read
    count = 0
    while True:
        space, mark = yield from read_content(source, begins + ends, after_call=count > 0)
        if mark is None:
            return
        if mark in ends:
            ends = form.section_ends if mark == form.call_end else ()
            continue
        before = space + mark
        if mark != form.call_begin:
            before += yield from skip_space(source)
            if not (yield from take_mark(source, form.call_begin)):
                yield before
                continue
            before += form.call_begin
        header, opening = yield from read_until(source, ("{", form.call_end), LONGEST_HEADER)
        match = form.header.fullmatch(header)
        if match is None or opening is None:
            yield before + header + (opening or "")
            continue
        groups = match.groupdict()
        name = groups["name"] or groups["plain_name"]
        yield CallStart(name, f"functions.{name}:{groups['index'] or count}" if "index" in groups else None)
        count += 1
        if opening == form.call_end:
            yield CallArguments("{}")
            ends = form.section_ends
        else:
            source.put_back(opening)
            yield from read_object(source, (form.call_end,))
            ended = yield from skip_ends(source, _FENCE, form.call_end)
            ends = form.section_ends if ended else (form.call_end, *form.section_ends)


NAME, ARGUMENTS, NUMBER = "{name}", "{arguments}", "{number}"
"""Stand within a layout for the function's name, for the arguments and for the call's number."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallLayout:
    """An answer that is nothing but calls. What it has in angle brackets may be a special token."""

    call: str
    begin: str = ""
    between: str = ""
    end: str = ""
    tagged: bool = False
    """The arguments are parameters in tags, not a JSON object."""


_LAYOUTS = {
    "deepseek_v3": CallLayout(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": CallLayout(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": CallLayout(
        "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    "hermes": CallLayout('<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>', between="\n"),
    "qwen3_coder": CallLayout("<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>", between="\n", tagged=True),
}


def call_layout(tool_format: str, template: str) -> CallLayout:
    """Of a family's several ways to write a call, the one that the model's chat template shows it."""
    if tool_format == "deepseek":
        return _LAYOUTS["deepseek_v3" if "```json" in template else "deepseek_v31"]
    if tool_format == "qwen":
        return _LAYOUTS["qwen3_coder" if "<function=" in template else "hermes"]
    return _LAYOUTS[tool_format]


@dataclasses.dataclass(frozen=True, slots=True)
class ToolFormat:
    """A family's way to write calls."""

    marks: tuple[str, ...]
    """Tags that some tokenizers have as special tokens: their text must reach the parser."""
    ends_reasoning: tuple[str, ...]
    """Marks that begin a call even where the reasoning was not closed; plain words like Qwen's tags may be reasoned about."""
    read: Callable[[Source, Mapping[str, ParameterTypes]], Reading[None]]

    def parser(self, types: Mapping[str, ParameterTypes]) -> ToolCallParser:
        """For one answer. `types`: of the parameters, by function name."""
        return ToolCallParser(lambda source: self.read(source, types))


def _marked(form: MarkedFormat) -> ToolFormat:
    begins = (*form.section_begins, form.call_begin)
    return ToolFormat(
        (*begins, *form.section_ends, form.separator, form.call_end), begins, lambda source, _: read_marked(source, form)
    )


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "deepseek": _marked(_DEEPSEEK),
    "kimi_k2": _marked(_KIMI_K2),
    "qwen": ToolFormat((CALL_BEGIN, CALL_END), (), read_qwen),
}
