"""Templates of the kinds that checkpoints ship, the sandbox around them, and which template is chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import BOS, EOS, write_tokenizer
from transformers import PreTrainedTokenizerFast

from minserve.errors import CheckpointError, UsageError
from minserve.server.chat_template import ChatTemplate, ChatTemplateError
from minserve.server.tokenizer import Tokenizer

CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ "\\n" }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
        {{- '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
CONCATENATING = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|User|>' + message['content'] }}
{%- elif message['role'] == 'assistant' and message['content'] is none %}
{{- '<|Assistant|>' }}
{%- for call in message['tool_calls'] %}
{{- '<|call|>' + call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```' }}
{%- endfor %}
{%- elif message['role'] == 'assistant' %}
{{- '<|Assistant|>' + message['content'] + eos_token }}
{%- elif message['role'] == 'tool' %}
{{- '<|output|>' + message['content'] }}
{%- endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}
"""
TOKENS = {"bos_token": BOS, "eos_token": EOS}
USER = {"role": "user", "content": "What is <b>2 & 3</b>?"}


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate({"default": source}, TOKENS).render(messages, **options)


def call(arguments: Any, **message: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}],
        **message,
    }


@pytest.mark.parametrize("source", [CHATML, CONCATENATING])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_as_transformers_renders_it(tmp_path: Path, source: str, add_generation_prompt: bool) -> None:
    write_tokenizer(tmp_path, "byte_level")
    other = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=source, **TOKENS)
    messages = [{"role": "system", "content": "Be é."}, USER, {"role": "assistant", "content": " 5 "}, USER]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"é": "<&>'\""}}}]
    assert render(source, messages, tools=tools, add_generation_prompt=add_generation_prompt) == other.apply_chat_template(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
    )


@pytest.mark.parametrize("arguments", ['{"a": 1, "b": "é"}', {"a": 1, "b": "é"}])
@pytest.mark.parametrize("message", [{"content": None}, {}])
def test_tool_calls_of_the_history_in_both_template_styles(arguments: Any, message: dict[str, Any]) -> None:
    """Arguments as text or object, content null or missing: templates that append and templates that inspect both work."""
    messages = [USER, call(arguments, **message), {"role": "tool", "tool_call_id": "c1", "content": "3"}]
    assert '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "é"}}</tool_call>' in render(CHATML, messages)
    assert '<|call|>add\n```json\n{"a": 1, "b": "é"}\n```' in render(CONCATENATING, messages)
    assert "None" not in render(CHATML, messages)


def test_arguments_keep_the_text_that_the_client_sent() -> None:
    messages = [call('{"a":1 ,"b":2}')]
    assert render("{% for c in messages[0].tool_calls %}{{ c.function.arguments }}{% endfor %}", messages) == '{"a":1 ,"b":2}'
    walked = "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
    assert render(walked, messages) == "a=1;b=2;"
    assert render(walked.replace(".items()", "|items"), messages) == "a=1;b=2;"


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "not json", "[" * 9_000, '{"a": 1' + "0" * 5_000 + "}"])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    assert f"```json\n{arguments}\n```" in render(CONCATENATING, [call(arguments)])


def test_missing_content_is_none_and_empty_text_alike() -> None:
    source = "{{ messages[0].content is none }} {{ messages[0].content is string }} [{{ messages[0]['content'] + '' }}]"
    assert render(source, [{"role": "assistant"}]) == "True True []"
    assert render(source, [{"role": "assistant", "content": "x"}]) == "False True [x]"
    assert render("{{ nothing is none }} {{ none is none }}", [USER]) == "False True"


def test_the_messages_given_are_left_as_they_were() -> None:
    messages = [USER, call('{"a": 1}', content=None)]
    before = json.dumps(messages)
    render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before


# Helpers of the template language


def test_helpers() -> None:
    assert (
        render("{{ messages | tojson }}", [{"role": "user", "content": "<é & '>"}]) == '[{"role": "user", "content": "<é & \'>"}]'
    )
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}", [USER]) == '{\n "a": [\n  2\n ],\n "b": 1\n}'
    assert render("{{ {'a': 1, 'b': 2} | tojson(separators=(',', ':')) }}", [USER]) == '{"a":1,"b":2}'
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", [USER]) == "012"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}", [USER])) == 10
    assert render("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c", [USER]) == "abuserc"
    assert render("{% if true %}\n  x\n  {% endif %}\ny", [USER]) == "  x\ny"


def test_variables() -> None:
    assert render("{{ bos_token }}{{ eos_token }}{{ pad_token }}|{{ tools }}|{{ documents }}", [USER]) == f"{BOS}{EOS}|None|None"
    assert render("{{ tools is none }}", [USER], tools=[]) == "True"
    assert render("{{ x }}{{ bos_token }}", [USER], template_kwargs={"x": 7, "bos_token": "B"}) == "7B"
    assert render(CHATML, [USER], template_kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_kwargs_cannot_replace_the_request(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=name):
        render(CHATML, [USER], template_kwargs={name: []})


# Failures stay with the request


def test_a_refusal_reaches_the_client_in_the_templates_words() -> None:
    with pytest.raises(ChatTemplateError, match=r"^Roles must alternate$"):
        render("{{ raise_exception('Roles must alternate') }}", [USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ undefined_thing.attribute }}",
        "{{ raise_exception | tojson }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_or_misbehaves(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="chat template failed"):
        render(source, [USER])


def test_a_template_that_is_not_valid(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate({"default": "a\n{% if %}"}, TOKENS)
    Tokenizer.load(write_tokenizer(tmp_path, "byte_level", chat_template=CHATML))
    with pytest.raises(CheckpointError, match="default"):
        Tokenizer.load(write_tokenizer(tmp_path, "byte_level", chat_template="{{"))


# Which template


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


@pytest.mark.parametrize(
    ("templates", "tools", "expected"),
    [
        ("one", [{}], "one"),
        (NAMED, None, "plain"),
        (NAMED, [{}], "tools"),
        (NAMED[:1], [{}], "plain"),
        (NAMED[1:], None, "tools"),
        ([{"name": "rag", "template": "only"}], None, "only"),
    ],
)
def test_named_templates(tmp_path: Path, templates: Any, tools: Any, expected: str) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, "byte_level", chat_template=templates))
    assert tokenizer.template.render([USER], tools=tools) == expected


def test_no_template_and_no_default(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer.load(write_tokenizer(tmp_path, "byte_level")).template.render([USER])
    others = [{"name": name, "template": "x"} for name in ("a", "b")]
    with pytest.raises(ChatTemplateError, match="no default"):
        Tokenizer.load(write_tokenizer(tmp_path, "byte_level", chat_template=others)).template.render([USER])


def test_files_win_over_the_config_and_the_flag_over_both(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "byte_level", chat_template="config")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("additional")
    assert Tokenizer.load(tmp_path).template.render([USER]) == "config"
    (tmp_path / "chat_template.jinja").write_text("file é")
    assert Tokenizer.load(tmp_path).template.render([USER]) == "file é"
    assert Tokenizer.load(tmp_path).template.render([USER], tools=[{}]) == "additional"
    (tmp_path / "mine.jinja").write_text("flag")
    assert Tokenizer.load(tmp_path, None, str(tmp_path / "mine.jinja")).template.render([USER], tools=[{}]) == "flag"
    with pytest.raises(UsageError, match=r"absent\.jinja"):
        Tokenizer.load(tmp_path, None, str(tmp_path / "absent.jinja"))


# Going on inside the last message


def test_continue_final_message_ends_inside_the_last_message() -> None:
    messages = [USER, {"role": "assistant", "content": "The answer is "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, messages, **options).endswith("<|im_start|>assistant\nThe answer is ")
    repeated = [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}]
    assert render(CHATML, repeated, **options).endswith("<|im_start|>assistant\nyes")
    with pytest.raises(ChatTemplateError, match="does not show"):
        render("nothing", messages, **options)
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        render(CHATML, messages, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="last message"):
        render(CHATML, [], **options)
