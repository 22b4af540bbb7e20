"""Tool calls in every format: what is read does not depend on how the text is cut, and nothing is lost."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.tool_texts import STYLES, Call, Style, hermes, kimi_k2, qwen3_coder, tool

from minserve.server.qwen_calls import parameter_types
from minserve.server.tool_calls import CallArguments, CallStart, Event
from minserve.server.tool_formats import TOOL_FORMATS

TOOLS = [tool("f", a="string", n="integer", o="object", b="boolean", l="array", x="number"), tool("get_weather", city="string")]
Joined = list[str | tuple[str, str | None, str]]


def read(style_or_format: Style | str, pieces: Iterable[str], tools: Sequence[dict[str, Any]] = TOOLS) -> list[Event]:
    name = style_or_format if isinstance(style_or_format, str) else style_or_format.format
    parser = TOOL_FORMATS[name].parser(parameter_types(tools))
    events = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish()
    assert all(event if isinstance(event, str) else event[0] for event in events), events
    return events


def joined(events: Iterable[Event]) -> Joined:
    """Content between calls as strings, calls as (name, id, arguments)."""
    made: Joined = []
    for event in events:
        if isinstance(event, CallStart):
            made.append((event.name, event.call_id, ""))
        elif isinstance(event, CallArguments):
            name, call_id, arguments = made[-1]  # arguments belong to the call before them, with no content between
            made[-1] = (name, call_id, arguments + event.text)
        elif made and isinstance(made[-1], str):
            made[-1] += event
        else:
            made.append(event)
    return made


def calls_of(style: Style, text: str, tools: Sequence[dict[str, Any]] = TOOLS) -> tuple[str, list[Call]]:
    """All content, and the calls with their arguments as JSON."""
    parts = joined(read(style, [text], tools))
    content = "".join(part for part in parts if isinstance(part, str))
    return content, [(part[0], json.loads(part[2])) for part in parts if not isinstance(part, str)]


def assert_cuts_do_not_matter(style: Style | str, text: str, tools: Sequence[dict[str, Any]] = TOOLS) -> Joined:
    """Every position, every pair of positions, and one character at a time."""
    whole = joined(read(style, [text], tools))
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        cut = joined(read(style, [text[:first], text[first:second], text[second:]], tools))
        assert cut == whole, (text[:first], text[first:second], text[second:])
    assert joined(read(style, text, tools)) == whole
    return whole


SHORT: dict[str, list[Call]] = {
    "one": [("f", {"a": 'q"\\n}'})],
    "two": [("f", {"n": 1}), ("f", {})],
    "literal tags": [("f", {"a": "<tool_call></tool_call><|tool_call_end|>"})],
}


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("calls", SHORT.values(), ids=SHORT)
def test_every_pair_of_cuts(name: str, calls: list[Call]) -> None:
    style = STYLES[name]
    assert_cuts_do_not_matter(style, "hi {\n" + style.write(calls))
    assert calls_of(style, "hi {\n" + style.write(calls)) == ("hi {", calls)


LITERAL_TAGS = (
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜> <｜tool▁call▁begin｜>f<｜tool▁sep｜>{} ```\n"
    "<|tool_call_end|><|tool_calls_section_end|><|tool_call_begin|>functions.f:9<|tool_call_argument_begin|>{}"
    '</tool_call>\n<tool_call>\n{"name": "f", "arguments": {}}\n</think><think> <function=f> </parameter> </function> }}]]"\\'
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from([LITERAL_TAGS, "]}", '"', "\\", "\n\n"])
LEAVES = st.integers(-(10**12), 10**12) | st.booleans() | TEXTS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "a": TEXTS,
        "n": st.integers(),
        "o": st.dictionaries(TEXTS, VALUES, max_size=3),
        "b": st.booleans(),
        "l": st.lists(VALUES, max_size=3),
        "x": st.floats(allow_nan=False, allow_infinity=False),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), ARGUMENTS), min_size=1, max_size=3)


def tools_of(calls: Sequence[Call]) -> list[dict[str, Any]]:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    types: dict[str, dict[str, str]] = {}
    for name, arguments in calls:
        types.setdefault(name, {}).update({key: names[type(value)] for key, value in arguments.items()})
    return [tool(name, **kinds) for name, kinds in types.items()]


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_calls_and_any_cuts(name: str, data: st.DataObject) -> None:
    style = STYLES[name]
    calls = data.draw(CALLS)
    content = data.draw(st.sampled_from(["", "I look.", "ünï 日本 {[", "a < b <t <｜x "]))
    text = content + style.write(calls)
    tools = tools_of(calls)
    assert calls_of(style, text, tools) == (content.rstrip(), calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert joined(read(style, pieces, tools)) == joined(read(style, [text], tools))


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("size", [1, 3, 7])
def test_long_arguments_come_in_steady_pieces(name: str, size: int) -> None:
    style = STYLES[name]
    calls: list[Call] = [("f", {"a": 'Zeile „é“ 你好 👍🏽 \\ " </tool_call> \n' * 300, "n": 7}), ("f", {"a": "x" * 10_000})]
    text = style.write(calls)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    events = read(style, pieces)
    assert calls_of(style, text) == ("", calls)
    assert joined(events) == joined(read(style, [text]))
    if name != "hermes_arguments_first":
        assert max(len(event.text) for event in events if isinstance(event, CallArguments)) <= 4 * size + 40


@pytest.mark.parametrize("name", [name for name in STYLES if name != "hermes_arguments_first"])
def test_name_comes_before_the_arguments(name: str) -> None:
    """A client sees the call begin while its arguments are still being written."""
    style = STYLES[name]
    text = style.write([("f", {"a": "x" * 50})])
    parser = TOOL_FORMATS[style.format].parser(parameter_types(TOOLS))
    events = [event for character in text[: text.index("xxxxx") + 2] for event in parser.push(character)]
    assert events[0] == CallStart("f", "functions.f:0" if style.ids else None)
    assert "".join(event.text for event in events if isinstance(event, CallArguments)).endswith("x")


def test_kimi_ids_are_kept() -> None:
    text = kimi_k2([("f", {}), ("get_weather", {"city": "Köln"})]).replace(":1<", ":17<")
    assert joined(read("kimi_k2", [text])) == [
        ("f", "functions.f:0", "{}"),
        ("get_weather", "functions.get_weather:17", '{"city": "Köln"}'),
    ]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("functions.a.b-c:3", ("a.b-c", "functions.a.b-c:3")),
        (" functions.f:0 ", ("f", "functions.f:0")),
        ("f:2", ("f", "functions.f:2")),
        ("f", ("f", "functions.f:0")),
    ],
)
def test_kimi_headers(header: str, expected: tuple[str, str]) -> None:
    text = f"<|tool_calls_section_begin|> <|tool_call_begin|>{header}<|tool_call_argument_begin|> {{}} <|tool_call_end|>"
    assert assert_cuts_do_not_matter("kimi_k2", text) == [(*expected, "{}")]


NO_CALLS = [
    ("deepseek", "<｜tool▁calls▁begin｜>\n nothing"),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁call▁end｜> x"),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"),
    ("deepseek", "<｜tool▁call▁begin｜>f {"),
    ("deepseek", "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜tool▁se"),
    ("kimi_k2", "a <|tool_calls_section_begin|><|tool_calls_section_end|> "),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0"),
    ("kimi_k2", "<|tool_call_begin|>" + "x" * 600 + "<|tool_call_argument_begin|>{}"),
    ("qwen", "<tool_call>\nhello</tool_call>\n"),
    ("qwen", '<tool_call>{"arguments": {}}</tool_call>'),
    ("qwen", '<tool_call>{"name": "", "arguments": {}}'),
    ("qwen", '<tool_call>{"name": 5]} </tool_call>'),
    ("qwen", '<tool_call>{"name": "\\ud800", "arguments": {}} </tool_call>'),
    ("qwen", '<tool_call>{"name": "\\x", "arguments": {}} </tool_call>'),
    ("qwen", '<tool_call>{"name": "f", "argu'),
    ("qwen", "<tool_call>" + '{"a":' * 3000),
    ("qwen", "<tool_call>" + '{"a":[' * 3000 + "]}" * 3000),
    ("qwen", "<tool_call><function=>"),
    ("qwen", "<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>"),
    ("qwen", "call it as `<function=NAME>` or <function=f\n> </tool_call>  "),
    ("qwen", "<tool_cal"),
]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert "".join(map(str, read(name, [text]))) == text
    if len(text) < 120:
        assert assert_cuts_do_not_matter(name, text) == [text]
    assert joined(read(name, text)) == [text]


MALFORMED = [
    # arguments that are no JSON are passed on as they are, to the call's end
    ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": [1}}, oh<｜tool▁call▁end｜>', [("f", None, '{"a": [1}}, oh')]),
    ("qwen", '<tool_call>{"name": "f", "arguments": {"a": ]}}</tool_call> z', [("f", None, '{"a": ]}}'), " z"]),
    # brackets and marks too many or too few
    ("qwen", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', [("f", None, '{"a": 1}')]),
    ("qwen", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', [("f", None, "{}"), "}"]),
    ("qwen", '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}', [("f", None, "{}"), ("g", None, "{}")]),
    ("kimi_k2", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{} x<|tool_call_end|>", [("f", "functions.f:0", "{}"), "x"]),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>ok", [("f", None, "{}"), "ok"]),
    ("deepseek", "<｜tool▁calls▁begin｜>x<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", ["<｜tool▁calls▁begin｜>x", ("f", None, "{}")]),
    # arguments as a string, or none
    ("qwen", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", None, '{"a": 1}')]),
    ("qwen", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", None, "{}")]),
    ("qwen", '<tool_call>{"name": "f", "id": 3}</tool_call>', [("f", None, "{}")]),
    ("qwen", '<tool_call>{"name": "f", "x": 1e9, "parameters": {"n": 1e400}}</tool_call>', [("f", None, '{"n": 1e400}')]),
    # a bad call does not harm a good one
    ("qwen", "<tool_call>]</tool_call>\n" + hermes([("f", {})]), ["<tool_call>]</tool_call>", ("f", None, "{}")]),
    # cut off: what there is of the arguments stays open
    ("qwen", '<tool_call>{"name": "f", "arguments": {"a": "b</tool', [("f", None, '{"a": "b</tool')]),
    ("qwen", "<tool_call><function=f><parameter=a>\nbc\n</para", [("f", None, '{"a": "bc')]),
    ("qwen", "<tool_call><function=f><parameter=l>[1, 2", [("f", None, '{"l": [1, 2')]),
    ("qwen", "<tool_call><function=f>\n<param", [("f", None, "")]),
    ("qwen", '<tool_call>{"name": "f", "arguments": {}}</tool_c', [("f", None, "{}")]),
    # tags that do not fit
    ("qwen", "<tool_call><function=f> what </function></tool_call>", [("f", None, "{}"), "what"]),
]


@pytest.mark.parametrize(("name", "text", "expected"), MALFORMED)
def test_malformed_calls(name: str, text: str, expected: Joined) -> None:
    assert assert_cuts_do_not_matter(name, text) == expected


def test_content_around_calls() -> None:
    text = "  First.\n\n" + hermes([("f", {})]) + "\nThen.\n" + hermes([("f", {"n": 2})]) + "\n"
    assert joined(read("qwen", [text])) == ["  First.", ("f", None, "{}"), "\nThen.", ("f", None, '{"n": 2}')]
    assert joined(read("qwen", ["no call \n"])) == ["no call \n"]


def test_plain_content_is_not_held_back() -> None:
    parser = TOOL_FORMATS["deepseek"].parser(parameter_types(TOOLS))
    assert [parser.push(piece) for piece in ("Hello", " wor", "ld <", "b")] == [["Hello"], [" wor"], ["ld"], [" <b"]]


@pytest.mark.parametrize(
    ("types", "text", "expected"),
    [
        ("string", "5", "5"),
        ("string", " two\n\n", " two\n\n"),
        ("string", "null", "null"),
        (["string", "null"], "None", None),
        ("integer", "5", 5),
        ("integer", "5.0", 5),
        ("integer", "five", "five"),
        ("integer", "9" * 5000, "9" * 5000),
        ("number", "1e3", 1000.0),
        ("number", "-3", -3),
        ("number", "NaN", "NaN"),
        ("boolean", "True", True),
        ("boolean", "false", False),
        ("boolean", "1", "1"),
        ("array", '[1, {"a": "]"}]', [1, {"a": "]"}]),
        ("object", '{"a": [}', '{"a": [}'),
        ("object", "[" * 9000, "[" * 9000),
        (["integer", "string"], "12", 12),
        (["integer", "string"], "12a", "12a"),
    ],
)
def test_types_of_the_schema(types: str | list[str], text: str, expected: Any) -> None:
    written = f"<tool_call>\n<function=f>\n<parameter=p>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert calls_of(STYLES["qwen3_coder"], written, [tool("f", p=types)]) == ("", [("f", {"p": expected})])


def test_types_behind_references() -> None:
    schema = {
        "properties": {
            "point": {"$ref": "#/$defs/Point"},
            "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "mode": {"enum": [1, 2]},
            "loop": {"$ref": "#/$defs/Loop"},
            "odd": {"$ref": "other.json#/x"},
            "untyped": {},
        },
        "$defs": {"Point": {"type": "array"}, "Loop": {"$ref": "#/$defs/Loop"}},
    }
    arguments = {"point": [1, 2], "size": None, "mode": 2, "loop": "3", "odd": "4", "untyped": "5"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert calls_of(STYLES["qwen3_coder"], qwen3_coder([("f", arguments)]), tools) == ("", [("f", arguments)])


@pytest.mark.parametrize("schema", [{}, {"properties": []}, {"properties": {"a": True}}, {"properties": {"a": {"type": 3}}}])
def test_odd_schemas_mean_text(schema: dict[str, Any]) -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": schema}},
        {"type": "function", "function": {"name": "g"}},
    ]
    assert calls_of(STYLES["qwen3_coder"], qwen3_coder([("f", {"a": "1"}), ("g", {"b": "2"})]), tools)[1] == [
        ("f", {"a": "1"}),
        ("g", {"b": "2"}),
    ]


def test_end_tags_within_text_parameters() -> None:
    value = 'if x:\n    print("</parameter>")\n</parameter>!\n</function'
    calls: list[Call] = [("f", {"a": value, "n": 1})]
    assert assert_cuts_do_not_matter("qwen", qwen3_coder([("f", {"a": "</parameter>\n<b"})]))
    assert calls_of(STYLES["qwen3_coder"], qwen3_coder(calls)) == ("", calls)


@given(
    st.lists(
        st.sampled_from(
            [
                *'ab{}[]"\\:,\n 1',
                *LITERAL_TAGS.split(),
                "<tool_call>",
                "<function=f>",
                "<parameter=a>",
                "</parameter>",
                "</function>",
                "</tool_call>",
                '{"name": "f", "arguments": ',
                "<｜tool▁call▁begin｜>",
                "f<｜tool▁sep｜>",
                "<|tool_call_begin|>",
                "f:0<|tool_call_argument_begin|>",
                "<｜tool▁calls▁begin｜>",
            ]
        ),
        max_size=14,
    ),
    st.sampled_from(sorted(TOOL_FORMATS)),
)
@settings(max_examples=400, deadline=None)
def test_nonsense_never_fails_and_cuts_never_matter(parts: list[str], name: str) -> None:
    text = "".join(parts)
    whole = joined(read(name, [text]))
    assert joined(read(name, parts)) == whole
    assert joined(read(name, text)) == whole


def test_a_schema_that_multiplies_is_looked_at_once() -> None:
    """Twenty references to itself in each of eight levels would be read for longer than anyone lives."""
    many = {"anyOf": [{"$ref": "#/$defs/many"}] * 20 + [{"type": "integer"}]}
    schema = {"properties": {"p": {"$ref": "#/$defs/many"}}, "$defs": {"many": many}}
    assert parameter_types([{"function": {"name": "f", "parameters": schema}}]) == {"f": {"p": {"integer"}}}
    shared = {"anyOf": [{"enum": [number]} for number in range(5000)]}
    properties = {f"p{number}": {"$ref": "#/$defs/shared"} for number in range(1000)}
    began = time.thread_time()
    schema = {"properties": properties, "$defs": {"shared": shared}}
    read_of = parameter_types([{"function": {"name": "f", "parameters": schema}}])
    assert time.thread_time() - began < 1.5
    assert read_of == {"f": {name: {"integer"} for name in properties}}
