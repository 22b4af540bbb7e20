"""Forms of answers: the fields that ask for them, and the grammars made of them, read by the library that applies them."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import llguidance
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import Script
from server.tool_texts import STYLES, Call, tool
from tokenizers import AddedToken, Tokenizer

from minserve.config import Config
from minserve.messages import Ready
from minserve.request import FinishReason, Request, TokenOutput
from minserve.server.api_errors import ApiError
from minserve.server.fields import decode_object
from minserve.server.grammars import MAX_PATTERNS, ForcedCalls, OutputForm, build_grammar, checked_schema, parse_form
from minserve.server.qwen_calls import parameter_types
from minserve.server.tool_formats import TOOL_FORMATS, call_layout
from tests.server.conftest import BOS, EOS, Edge, Vocabulary

Start = Callable[..., AbstractContextManager[Edge]]
MARKS = sorted({mark for form in TOOL_FORMATS.values() for mark in form.marks})
MARK_IDS = {mark: 256 + index for index, mark in enumerate(MARKS)}


class Tokens(llguidance.TokenizerWrapper):
    """A token for each byte, and one for each mark."""

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [mark.encode() for mark in MARKS] + [b"<end>"]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:  # noqa: ARG002
        return []


TOKENS = Tokens()
TOKENIZER = llguidance.LLTokenizer(TOKENS)


def tokens_of(text: str, special: bool) -> list[int]:
    made: list[int] = []
    while text:
        mark = next((mark for mark in MARKS if special and text.startswith(mark)), None)
        made += [MARK_IDS[mark]] if mark else text[0].encode()
        text = text[len(mark) if mark else 1 :]
    return made


def matcher(grammar: str) -> llguidance.LLMatcher:
    made = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def accepts(grammar: str, text: str, *, special: bool = False) -> bool:
    made = matcher(grammar)
    return all(made.consume_token(token) for token in tokens_of(text, special)) and made.is_accepting()


def form(**fields: Any) -> OutputForm:
    made = parse_form(decode_object(json.dumps(fields).encode()))
    assert made is not None
    return made


def grammar_of(**fields: Any) -> str:
    grammar = build_grammar(form(**fields))
    assert grammar is not None
    assert (grammar.starts_after, grammar.opened_by) == ("", None)
    return grammar.text


def json_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}}


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "mail": {"type": "string", "format": "post"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "fields",
    [
        json_schema(PERSON),
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
        {"structured_outputs": {"json": PERSON}},
    ],
)
def test_a_schema_by_any_name(fields: dict[str, Any]) -> None:
    grammar = grammar_of(**fields)
    assert accepts(grammar, '{"name": "Zoë \\"Z\\" 👍", "age": 7}')
    assert accepts(grammar, '{\n    "name": "",\n    "age": 0,\n    "mail": "anything, the format is not known"\n}')
    for wrong in (
        '{"name": "a"}',
        '{"name": "a", "age": -1}',
        '{"name": "a", "age": 1, "x": 1}',
        '{"name": "a", "age": 1} ',
        "{}",
        "",
    ):
        assert not accepts(grammar, wrong), wrong


def test_any_object() -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        grammar = grammar_of(**fields)
        assert accepts(grammar, '{"a": [1, -2.5e3, {"b": null}], "c": {}, "d": [true, ""]}')
        assert not accepts(grammar, "[1]")
        assert not accepts(grammar, '"a"')


def test_white_space_has_a_bound() -> None:
    grammar = grammar_of(response_format={"type": "json_object"})
    assert accepts(grammar, "{\r\n" + " " * 60 + '"a":\t1}')
    assert not accepts(grammar, "{" + " " * 80 + "}")
    assert not accepts(grammar, "{\n\n\n}")


SCHEMAS = [
    (True, ["1", "[]", '"a"'], []),
    ({}, ["1", "[]", '{"a": 1}'], ["", "a"]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["1", "1.5"], ['"a"']),
    ({"anyOf": [{"const": 1}, {"enum": ["a", None]}]}, ["1", '"a"', "null"], ["2", '"b"']),
    (
        {
            "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "additionalProperties": False}},
            "$ref": "#/$defs/n",
        },
        ['{"n": {"n": {}}}'],
        ['{"m": 1}'],
    ),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"today"']),
    ({"type": "string", "format": "int32", "minLength": 2}, ['"ab"'], ['"a"']),
    (
        {"type": "object", "properties": {"format": {"const": "x"}, "enum": {"type": "integer"}}, "required": ["format"]},
        ['{"format": "x", "enum": 2}'],
        ['{"format": "y"}'],
    ),
    (
        {"const": {"format": "kept", "multipleOf": 10**9}},
        ['{"format":"kept","multipleOf":1000000000}'],
        ['{"multipleOf":1000000000}'],
    ),
    ({"type": "number", "multipleOf": 0.25}, ["1.25", "2"], ["0.3"]),
    ({"type": "integer", "multipleOf": 7, "x-guidance": {"lenient": True}}, ["21"], ["22", "a"]),
    ({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, ["[true, false]"], ["[true, false, true]", "[1]"]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), SCHEMAS)
def test_schemas(schema: Any, right: list[str], wrong: list[str]) -> None:
    grammar = grammar_of(**json_schema(schema))
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


CHOICES = [
    "yes",
    "yes please",
    'a "quoted" one',
    "two\nlines\t",
    "a/b # c // d",
    "é 你好 👍",
    "\\d+ {}[]|<x>",
    "%json",
    "\u0001\u2028",
    "' \\",
]


@pytest.mark.parametrize("field", ["guided_choice", "structured_outputs"])
def test_choices_are_taken_to_the_letter(field: str) -> None:
    grammar = grammar_of(**({field: CHOICES} if field == "guided_choice" else {field: {"choice": CHOICES}}))
    assert all(accepts(grammar, text) for text in CHOICES)
    assert not any(accepts(grammar, text) for text in ("no", "yes p", "yes yes", "1 {}[]|<x>", ""))


REGEXES = [
    (r"\d{4}-\d{2}", ["2024-01"], ["2024-1", "x2024-01"]),
    (r"^ab|cd$", ["ab", "cd"], ["abc"]),
    (r"a/b\/c", ["a/b/c"], ["a/b"]),
    ("a\nb\\\nc", ["a\nb\nc"], ["a b c"]),
    (r"x\$", ["x$"], ["x"]),
    (r"x\\$", ["x\\"], ["x$"]),
    (r"(foo|bar)+[^/\n]?", ["foobar!", "bar"], ["foo/"]),
    (r"[à-ü]é.", ["üé你"], ["aé1"]),
    (r'"#"', ['"#"'], ["#"]),
]


@pytest.mark.parametrize(("regex", "right", "wrong"), REGEXES)
def test_regexes_match_the_whole_answer(regex: str, right: list[str], wrong: list[str]) -> None:
    for fields in ({"guided_regex": regex}, {"structured_outputs": {"regex": regex}}):
        grammar = grammar_of(**fields)
        assert [text for text in right if not accepts(grammar, text)] == []
        assert [text for text in wrong if accepts(grammar, text)] == []


REFUSED = [
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (json_schema(5), "response_format.json_schema.schema"),
    (json_schema(False), "response_format.json_schema.schema"),
    (json_schema({"type": "strin"}), "response_format.json_schema.schema"),
    (json_schema({"type": "string", "pattern": "("}), "response_format.json_schema.schema"),
    (json_schema({"not": {"type": "string"}}), "response_format.json_schema.schema"),
    (json_schema({"$ref": "http://example.com/x"}), "response_format.json_schema.schema"),
    (json_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "response_format.json_schema.schema"),
    (json_schema({"type": "integer", "multipleOf": 999983}), "response_format.json_schema.schema"),
    (json_schema({"allOf": [{"multipleOf": n} for n in (97, 89, 83)]}), "response_format.json_schema.schema"),
    (json_schema({"multipleOf": 1e300}), "response_format.json_schema.schema"),
    (json_schema({"multipleOf": 0.123456789}), "response_format.json_schema.schema"),
    (json_schema({"enum": ["x" * 200_000]}), "response_format.json_schema.schema"),
    (
        json_schema({"properties": {str(n): {"pattern": f"^(a|{n})*b(c|d{n})+$"} for n in range(5000)}}),
        "response_format.json_schema.schema",
    ),
    ({"guided_json": "not json"}, "guided_json"),
    ({"guided_json": [1]}, "guided_json"),
    ({"guided_regex": "a("}, "guided_regex"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_regex": "x" * 20_000}, "guided_regex"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_choice": "yes"}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice"),
    ({"guided_choice": [str(n) for n in range(3000)]}, "guided_choice"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({**json_schema({}), "guided_json": {}}, "guided_json"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_cannot_be_followed_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        build_grammar(form(**fields))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.message) < 600


@pytest.mark.parametrize("depth", [30, 150])
@pytest.mark.parametrize("wrap", ['{"type":"array","items":%s}', '{"anyOf":[%s]}', '{"allOf":[%s]}', '{"properties":{"a":%s}}'])
def test_nesting_is_followed_or_refused(wrap: str, depth: int) -> None:
    text = '{"type":"integer"}'
    for _ in range(depth):
        text = wrap % text
    body = b'{"guided_json":%s}' % text.encode()
    if depth == 30:
        assert build_grammar(parse_form(decode_object(body))) is not None
        return
    with pytest.raises(ApiError) as caught:
        build_grammar(parse_form(decode_object(body)))
    assert (caught.value.status, caught.value.param) == (400, "guided_json")


def test_patterns_nested_or_repeated_without_end_do_no_harm() -> None:
    for regex in ("(" * 8000 + ")" * 8000, "((a{1,1000}){1,1000}){1,1000}", "(a|aa)+" * 1000, "[a-z]{0,100000}"):
        with contextlib.suppress(ApiError):
            build_grammar(form(guided_regex=regex))


# tool calls

TOOLS = [
    tool("f", a="string", n="integer"),
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"enum": ["C", "F"]},
                    "days": {"type": ["integer", "null"]},
                    "at": {"$ref": "#/$defs/Point"},
                },
                "required": ["city"],
                "$defs": {"Point": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
LAYOUTS = {
    "deepseek_v3": ("deepseek", "```json"),
    "deepseek_v31": ("deepseek", ""),
    "kimi_k2": ("kimi_k2", ""),
    "hermes": ("qwen", ""),
    "qwen3_coder": ("qwen", "<function="),
}
FORCED: list[list[Call]] = [
    [("f", {"a": 'x "\\ ü 你好\nnew </parameter> line', "n": -5})],
    [("get_weather", {"city": "Köln", "unit": "C", "days": 3, "at": [1.5, 2]})],
    [("get_weather", {"city": ""}), ("now", {}), ("f", {"n": 0})],
]
NOT_CALLS: list[list[Call]] = [
    [("g", {})],
    [("get_weather", {"unit": "C"})],
    [("get_weather", {"city": "a", "unit": "K"})],
    [("f", {"x": 1})],
    [("f", {"n": "five"})],
    [("now", {"a": 1})],
]


def calls_grammar(name: str, special: bool, *, one_call: bool = False, form: OutputForm | None = None, tools: Any = TOOLS) -> str:
    layout = call_layout(*LAYOUTS[name])
    calls = ForcedCalls(
        layout=layout, marks=MARK_IDS if special else {}, tools=tools, one_call=one_call, instead=form is not None
    )
    grammar = build_grammar(form, calls)
    assert grammar is not None
    return grammar.text


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_forced_calls_are_spelled_as_the_model_spells_them(name: str, special: bool) -> None:
    grammar = calls_grammar(name, special)
    for calls in FORCED:
        assert accepts(grammar, STYLES[name].write(calls), special=special), calls
    for calls in NOT_CALLS:
        assert not accepts(grammar, STYLES[name].write(calls), special=special), calls
    assert not accepts(grammar, "")
    assert not accepts(grammar, "I will call. " + STYLES[name].write(FORCED[0]), special=special)
    one = calls_grammar(name, special, one_call=True)
    assert accepts(one, STYLES[name].write(FORCED[0]), special=special)
    assert not accepts(one, STYLES[name].write(FORCED[2]), special=special)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_walk_through_a_forced_call_is_read_back_as_calls(name: str, special: bool) -> None:
    dice = random.Random(name)
    num_read = 0
    for _ in range(8):
        made = matcher(calls_grammar(name, special, one_call=True))
        text = b""
        while not made.is_stopped():
            mask = made.compute_bitmask()
            ways = [token for token in range(len(TOKENS.tokens) - 1) if mask[token >> 3] >> (token & 7) & 1]
            likely = [token for token in ways if token > 127 or token in b'"\\}],:\n<>/=' or len(ways) < 30]
            token = dice.choice(likely if likely and dice.random() < 0.9 else ways or [0])
            if not ways:
                break
            text += TOKENS.tokens[token]
            made.consume_token(token)
            if len(text) > 3000:
                break
        if len(text) > 3000 or not made.is_accepting():
            continue
        parser = TOOL_FORMATS[LAYOUTS[name][0]].parser(parameter_types(TOOLS))
        events = [*parser.push(text.decode("utf-8", "replace")), *parser.finish()]
        assert not any(isinstance(event, str) for event in events), (text, events)
        assert events[0][0] in ("f", "get_weather", "now")
        arguments = json.loads("".join(event.text for event in events[1:]))  # type: ignore[union-attr]
        assert isinstance(arguments, dict)
        num_read += 1
    assert num_read > 2


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_form_or_calls(name: str) -> None:
    grammar = calls_grammar(name, True, form=form(**json_schema(PERSON)))
    assert accepts(grammar, '{"name": "a", "age": 1}', special=True)
    assert accepts(grammar, STYLES[name].write(FORCED[1]), special=True)
    assert not accepts(grammar, "hello", special=True)


def test_parameters_without_a_schema_of_their_own() -> None:
    free = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    grammar = calls_grammar("hermes", False, tools=free)
    assert accepts(grammar, STYLES["hermes"].write([("f", {"any": [1]})]))
    either = [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            },
        }
    ]
    assert accepts(calls_grammar("hermes", False, tools=either), STYLES["hermes"].write([("f", {"a": 1})]))


@pytest.mark.parametrize(
    "function",
    [
        {"name": "a b"},
        {"name": 'a"b'},
        {"name": "a>b"},
        {"name": "f", "parameters": {"type": "none"}},
        {"name": "f", "parameters": {"properties": {"n": {"type": "integer", "multipleOf": 999983}}}},
    ],
)
def test_calls_that_cannot_be_forced(function: dict[str, Any]) -> None:
    for name in LAYOUTS:
        if name == "qwen3_coder" and function.get("parameters") == {"type": "none"}:
            continue  # its parameters are in tags: the object's type does not matter
        with pytest.raises(ApiError) as caught:
            calls_grammar(name, False, tools=[{"type": "function", "function": function}])
        assert (caught.value.status, caught.value.param) == (400, "tools")


def test_after_a_reasoning_line_breaks_may_come_first() -> None:
    grammar = build_grammar(form(guided_choice=["yes"]), None, "</think>", 7)
    assert grammar is not None
    assert (grammar.starts_after, grammar.opened_by) == ("</think>", 7)
    assert all(accepts(grammar.text, lead + "yes") for lead in ("", "\n", "\n\n"))
    assert not accepts(grammar.text, "\n\n\nyes")
    assert build_grammar(None, None, "</think>") is None


# over HTTP

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if think is defined %}{{ '<think>\n' if think else '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
ASK = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def qwen_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen")
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<tool_call>", special=True), AddedToken("</tool_call>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def words(qwen_dir: Path) -> Vocabulary:
    return Vocabulary(qwen_dir)


@pytest.fixture(scope="module")
def qwen(qwen_dir: Path, words: Vocabulary) -> Iterator[Edge]:
    ready = Ready(
        model_type="qwen3_moe",
        vocab_size=words.size,
        max_model_len=4096,
        max_num_seqs=64,
        eos_token_ids=(),
        num_pages=1 << 20,
        page_size=64,
        startup_seconds={},
        info={},
    )
    script: Script = lambda _: [words.eos]  # noqa: E731
    edge = Edge(Config(model=str(qwen_dir), served_model_name=("tiny",)), script, ready, be_ready=True)
    try:
        yield edge
    finally:
        edge.stop()


def asked(edge: Edge, path: str = "/v1/chat/completions", **fields: Any) -> Request:
    before = len(edge.engine.added)
    body = {**ASK, **fields} if path == "/v1/chat/completions" else {"prompt": "x", **fields}
    answer = edge.post(path, body)
    assert answer.status == 200, answer.body
    assert len(edge.engine.added) > before
    return edge.engine.added[-1]


def test_the_engine_gets_the_vocabulary_before_any_request(qwen: Edge, words: Vocabulary) -> None:
    asked(qwen)
    (vocabulary,) = qwen.engine.vocabularies
    assert len(vocabulary.pieces) == words.size
    assert vocabulary.pieces[words.ids("the")[0]] == b"the"
    assert {words.eos, words.bos, words.ids("<tool_call>")[0]} <= set(vocabulary.special_token_ids)
    assert words.ids("<think>")[0] not in vocabulary.special_token_ids


def test_requests_without_a_form_have_no_grammar(qwen: Edge) -> None:
    assert asked(qwen).sampling.grammar is None
    assert asked(qwen, response_format={"type": "text"}, guided_regex=None).sampling.grammar is None
    assert asked(qwen, tools=TOOLS).sampling.grammar is None
    assert asked(qwen, tools=TOOLS, tool_choice="none").sampling.grammar is None
    assert asked(qwen, "/v1/completions").sampling.grammar is None


@pytest.mark.parametrize("n", [1, 3])
def test_forms_reach_the_engine(qwen: Edge, n: int) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        grammar = asked(qwen, path, guided_choice=["yes", "no"], n=n).sampling.grammar
        assert grammar is not None
        assert accepts(grammar.text, "yes")
        assert all(request.sampling.grammar == grammar for request in qwen.engine.added[-n:])


def test_the_grammar_starts_after_the_reasoning(qwen: Edge, words: Vocabulary) -> None:
    form = {"guided_choice": ["yes"]}
    opening = words.ids("<think>")[0]
    expected = [(None, "</think>", opening), (True, "</think>", None), (False, "", None)]
    for think, starts_after, opened_by in expected:
        fields = {} if think is None else {"chat_template_kwargs": {"think": think}}
        grammar = asked(qwen, **form, **fields).sampling.grammar
        assert grammar is not None
        assert (grammar.starts_after, grammar.opened_by) == (starts_after, opened_by)
        assert accepts(grammar.text, "\nyes") is bool(starts_after)
    plain = asked(qwen, "/v1/completions", **form).sampling.grammar
    assert plain is not None
    assert plain.starts_after == ""


def test_tool_choices_reach_the_engine(qwen: Edge, words: Vocabulary) -> None:
    def matches(calls: list[Call] | str, **fields: Any) -> bool:
        grammar = asked(qwen, tools=TOOLS, **fields).sampling.grammar
        assert grammar is not None
        text = calls if isinstance(calls, str) else STYLES["hermes"].write(calls)
        ids = {"<tool_call>": words.ids("<tool_call>")[0], "</tool_call>": words.ids("</tool_call>")[0]}
        ours = grammar.text
        for mark, token in ids.items():
            assert f"<[{token}]>" in ours
            ours = ours.replace(f"<[{token}]>", f"<[{MARK_IDS[mark]}]>")
        return accepts(ours, text, special=True)

    several = FORCED[2]
    assert matches(several, tool_choice="required")
    assert not matches(several, tool_choice="required", parallel_tool_calls=False)
    named = {"type": "function", "function": {"name": "now"}}
    assert matches([("now", {})], tool_choice=named)
    assert not matches([("f", {})], tool_choice=named)
    assert not matches([("now", {}), ("now", {})], tool_choice=named)
    assert matches(several, guided_choice=["yes"])
    assert matches("yes", guided_choice=["yes"])
    assert not matches("yes", guided_choice=["yes"], tool_choice="required")


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_forms_are_answered_with_400(qwen: Edge, stream: bool) -> None:
    before = len(qwen.engine.added)
    for fields, param in REFUSED[:12]:
        answer = qwen.post("/v1/chat/completions", {**ASK, **fields, "stream": stream})
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
    bad = [{"type": "function", "function": {"name": "a b"}}]
    answer = qwen.post("/v1/chat/completions", {**ASK, "tools": bad, "tool_choice": "required", "stream": stream})
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert len(qwen.engine.added) == before


@pytest.mark.parametrize("field", ["guided_choice", "guided_regex", "guided_json", "tools"])
def test_half_surrogates_do_no_harm(qwen: Edge, field: str) -> None:
    value = {
        "guided_choice": ["a\ud800"],
        "guided_regex": "a\udc00+",
        "guided_json": {"enum": ["\ud83d"]},
        "tools": [{"type": "function", "function": {"name": "\ud800"}}],
    }[field]
    answer = qwen.post("/v1/chat/completions", {**ASK, field: value, "tool_choice": "required" if field == "tools" else "auto"})
    assert answer.status in (200, 400), answer.body


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_the_engine_gives_up_is_the_clients_fault(qwen: Edge, stream: bool) -> None:
    def refuse(request: Request) -> TokenOutput:
        return TokenOutput(
            request_id=request.id,
            finish_reason=FinishReason.ERROR,
            error="the grammar cannot be followed: no",
            is_bad_request=True,
        )

    qwen.engine.refuse = refuse
    try:
        answer = qwen.post("/v1/chat/completions", {**ASK, "guided_regex": "a+", "stream": stream})
    finally:
        qwen.engine.refuse = None
    assert answer.status == 400
    assert answer.error["message"] == "the grammar cannot be followed: no"
    assert answer.error["type"] == "invalid_request_error"


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
WORDS = st.sampled_from(
    [
        "type",
        "object",
        "array",
        "string",
        "integer",
        "properties",
        "items",
        "enum",
        "const",
        "anyOf",
        "allOf",
        "oneOf",
        "$ref",
        "#",
        "#/$defs/a",
        "$defs",
        "a",
        "pattern",
        "(a|b)*",
        "[",
        "minLength",
        "maxLength",
        "minimum",
        "multipleOf",
        "required",
        "format",
        "date",
        "prefixItems",
        "additionalProperties",
        "json",
        "regex",
        "choice",
        "schema",
        "json_schema",
        "json_object",
        "x-guidance",
        "function",
        "name",
        "parameters",
        "lenient",
        "whitespace_pattern",
    ]
)
ANY = st.recursive(
    LEAVES | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
SCHEMA_LIKE = st.dictionaries(WORDS, ANY, max_size=5)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "response_format": ANY | st.builds(lambda schema: json_schema(schema)["response_format"], SCHEMA_LIKE),
        "guided_json": SCHEMA_LIKE | ANY,
        "guided_regex": ANY | st.text(st.sampled_from("ab[](){}^$\\.*+?|,01/-\n"), max_size=12),
        "guided_choice": ANY | st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4),
        "structured_outputs": SCHEMA_LIKE,
        "tools": st.lists(
            st.builds(lambda p: {"type": "function", "function": {"name": "f", "parameters": p}}, SCHEMA_LIKE), max_size=2
        ),
        "tool_choice": st.sampled_from(["required", "auto", {"type": "function", "function": {"name": "f"}}]) | ANY,
        "parallel_tool_calls": st.booleans(),
    },
)


@given(FIELDS)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_form_and_no_tools_make_the_server_fail(qwen: Edge, fields: dict[str, Any]) -> None:
    """Every grammar that passes the edge is one that the library takes with a tokenizer too, or fails on alone."""
    before = len(qwen.engine.added)
    answer = qwen.post("/v1/chat/completions", {**ASK, **fields})
    assert answer.status in (200, 400), (fields, answer.body)
    for request in qwen.engine.added[before:]:
        if request.sampling.grammar is not None:
            made = llguidance.LLMatcher(TOKENIZER, request.sampling.grammar.text, log_level=0)
            if not made.is_error():
                made.compute_bitmask()


def _pattern(number: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f".*a.{{{number}}}b"}


def _through_references(count: int) -> dict[str, Any]:
    links = {f"d{number}": {**_pattern(number), "$ref": f"#/$defs/d{number + 1}"} for number in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "string"}}}


def _of_one_property(count: int) -> dict[str, Any]:
    return {"allOf": [{"type": "object", "properties": {"p": _pattern(number)}} for number in range(count)]}


def _inside_each_other(count: int) -> dict[str, Any]:
    return {**_pattern(count), **({"anyOf": [_inside_each_other(count - 1)]} if count > 1 else {})}


@pytest.mark.parametrize(
    "many",
    [lambda count: {"allOf": list(map(_pattern, range(count)))}, _through_references, _of_one_property, _inside_each_other],
)
def test_many_patterns_at_once_are_refused_before_they_explode(many: Callable[[int], dict[str, Any]]) -> None:
    with pytest.raises(ApiError, match="patterns at once"):
        checked_schema(many(MAX_PATTERNS + 1), "schema")
    assert checked_schema(many(MAX_PATTERNS), "schema") == many(MAX_PATTERNS)


def test_patterns_of_different_values_are_no_matter() -> None:
    named = {"type": "object", "properties": {f"p{number}": _pattern(number) for number in range(50)}}
    either = {"anyOf": [named, *map(_pattern, range(50))], "properties": {"pattern": {"$ref": "#"}}}
    assert checked_schema(either, "schema") == either
    with pytest.raises(ApiError, match="levels of references"):
        checked_schema(_through_references(200), "schema")
