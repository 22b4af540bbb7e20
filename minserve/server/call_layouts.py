"""How each family spells a tool call, as data from which a grammar is made that forces calls. Knows no grammar language."""

from __future__ import annotations

import dataclasses

NAME = "{name}"
"""Stands for the function's name within a part."""
ARGUMENTS, NUMBER = "{arguments}", "{number}"
"""Parts that stand for the arguments and for the call's number."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallLayout:
    """The parts of an answer that is nothing but calls, in order. A part that is a mark of the format may be a special token."""

    begin: tuple[str, ...]
    call: tuple[str, ...]
    between: str
    end: tuple[str, ...]
    tagged: bool = False
    """The arguments are parameters in tags, not a JSON object."""


_DEEPSEEK_BEGIN, _DEEPSEEK_END = ("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",)
_LAYOUTS = {
    "deepseek_v3": CallLayout(
        _DEEPSEEK_BEGIN,
        (
            "<｜tool▁call▁begin｜>",
            "function",
            "<｜tool▁sep｜>",
            f"{NAME}\n```json\n",
            ARGUMENTS,
            "\n```",
            "<｜tool▁call▁end｜>",
        ),
        "\n",
        _DEEPSEEK_END,
    ),
    "deepseek_v31": CallLayout(
        _DEEPSEEK_BEGIN,
        ("<｜tool▁call▁begin｜>", NAME, "<｜tool▁sep｜>", ARGUMENTS, "<｜tool▁call▁end｜>"),
        "",
        _DEEPSEEK_END,
    ),
    "kimi_k2": CallLayout(
        ("<|tool_calls_section_begin|>",),
        ("<|tool_call_begin|>", f"functions.{NAME}:", NUMBER, "<|tool_call_argument_begin|>", ARGUMENTS, "<|tool_call_end|>"),
        "",
        ("<|tool_calls_section_end|>",),
    ),
    "hermes": CallLayout((), ("<tool_call>", f'\n{{"name": "{NAME}", "arguments": ', ARGUMENTS, "}\n", "</tool_call>"), "\n", ()),
    "qwen3_coder": CallLayout(
        (), ("<tool_call>", f"\n<function={NAME}>\n", ARGUMENTS, "</function>\n", "</tool_call>"), "\n", (), tagged=True
    ),
}


def call_layout(tool_format: str, template: str) -> CallLayout:
    """Of a family's several ways to write a call, the one that the model's chat template shows it."""
    if tool_format == "deepseek":
        return _LAYOUTS["deepseek_v3" if "```json" in template else "deepseek_v31"]
    if tool_format == "qwen":
        return _LAYOUTS["qwen3_coder" if "<function=" in template else "hermes"]
    return _LAYOUTS[tool_format]
