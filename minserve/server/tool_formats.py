"""The formats in which families of models write tool calls, by name. Knows nothing of tokens, streaming or HTTP.

What is not well-formed enough to tell the function's name is content, markup included. Once a call has begun it stays one:
arguments that are not JSON are passed on as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from minserve.server.marked_calls import DEEPSEEK, KIMI_K2, MarkedFormat, read_marked
from minserve.server.parameter_types import parameter_types
from minserve.server.qwen_calls import CALL_BEGIN, CALL_END, read_qwen
from minserve.server.tool_calls import ToolCallParser


@dataclasses.dataclass(frozen=True, slots=True)
class ToolFormat:
    """A family's way to write calls."""

    name: str
    marked: MarkedFormat | None
    """None is Qwen's."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Tags that some tokenizers have as special tokens: their text must reach the parser."""
        form = self.marked
        if form is None:
            return CALL_BEGIN, CALL_END
        return *form.section_begins, *form.section_ends, form.call_begin, form.separator, form.call_end

    @property
    def ends_reasoning(self) -> tuple[str, ...]:
        """Marks that begin a call even where the reasoning was not closed; plain words like Qwen's tags may be reasoned about."""
        return (*self.marked.section_begins, self.marked.call_begin) if self.marked is not None else ()

    def parser(self, tools: Sequence[Mapping[str, Any]]) -> ToolCallParser:
        """For one answer. `tools` as OpenAI's API has them, checked."""
        marked = self.marked
        if marked is not None:
            return ToolCallParser(lambda source: read_marked(source, marked))
        types = parameter_types(tools)
        return ToolCallParser(lambda source: read_qwen(source, types))


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "deepseek": ToolFormat("deepseek", DEEPSEEK),
    "kimi_k2": ToolFormat("kimi_k2", KIMI_K2),
    "qwen": ToolFormat("qwen", None),
}
