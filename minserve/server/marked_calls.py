"""Reads tool calls as DeepSeek and Kimi models write them: a header and a JSON object between marks. Knows no schemas."""

from __future__ import annotations

import dataclasses
import re

from minserve.server.tool_calls import (
    LONGEST_HEADER,
    CallArguments,
    CallStart,
    Reading,
    Source,
    read_content,
    read_object,
    read_until,
    skip_ends,
    skip_space,
    take_mark,
)


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
    fence: str = "```"
    """May stand behind the object."""


# V3 and R1 write `function<sep>NAME`, a line break and the object in a fenced block; V3.1 writes `NAME<sep>` and the object.
DEEPSEEK = MarkedFormat(
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
KIMI_K2 = MarkedFormat(
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
        yield _marked_start(match, count)
        count += 1
        if opening == form.call_end:
            yield CallArguments("{}")
            ends = form.section_ends
        else:
            source.put_back(opening)
            yield from read_object(source, (form.call_end,))
            ended = yield from skip_ends(source, form.fence, form.call_end)
            ends = form.section_ends if ended else (form.call_end, *form.section_ends)


def _marked_start(match: re.Match[str], count: int) -> CallStart:
    groups = match.groupdict()
    if "index" not in groups:
        return CallStart(groups["name"] or groups["plain_name"])
    return CallStart(groups["name"], f"functions.{groups['name']}:{groups['index'] or count}")
