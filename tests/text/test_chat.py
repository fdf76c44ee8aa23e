"""Chat templates render what transformers renders, and what cannot be rendered is refused with a message."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from pyserve.errors import InvalidRequest, ModelFileError
from pyserve.text.chat import CHATML, ChatTemplate
from pyserve.text.messages import prepare

Messages = list[dict[str, Any]]

# In the manner of well-known families: block trimming, filters, namespaces, loop controls, generation marks.
HEADERS = """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
<|header|>system<|/header|>

{%- if tools is not none %}
    {{- "\\nYou have these tools:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{{ ns.system }}<|eot|>
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' }}
    {%- generation %}
    {{- message['content'] | trim + '<|eot|>' }}
    {%- endgeneration %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' ~ call.function.name ~ ' ' ~ (call.function.arguments | tojson) }}
    {%- endfor %}
    {%- if loop.index0 > 20 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|/header|>\\n\\n' }}
{%- endif %}
"""
INSTRUCT = """{% if messages[0]['role'] == 'system' %}
{% set system = messages[0]['content'] + '\\n\\n' %}{% set messages = messages[1:] %}
{% else %}
{% set system = '' %}
{% endif %}
{{ bos_token }}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate, user first') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}
    {% else %}
        {{ ' ' + message['content'] | trim + eos_token }}
    {% endif %}
{% endfor %}
"""
PASTED = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + c.function.arguments + '</call>' }}{% endfor %}"
    "{% endfor %}"
)
TEMPLATES = {"headers": HEADERS, "instruct": INSTRUCT, "chatml": CHATML}

USER = {"role": "user", "content": "Wie groß ist <Łódź> & 'x'?\n"}
ANSWER = {"role": "assistant", "content": "  About 293 km².  "}
SYSTEM = {"role": "system", "content": " Be brief. "}
TOOL = {"type": "function", "function": {"name": "weather", "description": "It's <b>ä</b>", "parameters": {}}}


def template_of(source: str | None) -> ChatTemplate:
    return ChatTemplate(source, bos="<s>", eos="</s>")


def by_transformers(source: str, messages: Messages, **variables: Any) -> str:
    variables |= {"bos_token": "<s>", "eos_token": "</s>"}
    rendered: Any = render_jinja_template([messages], chat_template=source, **variables)
    text = rendered[0][0]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, ANSWER], [SYSTEM, USER, ANSWER, USER]])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_texts_are_those_of_transformers(source: str, messages: Messages, add_generation_prompt: bool) -> None:
    expected = by_transformers(source, messages, add_generation_prompt=add_generation_prompt)
    assert template_of(source).render(messages, add_generation_prompt=add_generation_prompt) == expected


def test_tools_are_json_without_escapes() -> None:
    text = template_of(HEADERS).render([USER], tools=[TOOL])
    assert text == by_transformers(HEADERS, [USER], tools=[TOOL], add_generation_prompt=True)
    assert "It's <b>ä</b>" in text


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("content", ["The answer is", "Ends in a space ", "  padded  ", "a\n\nb\n"])
def test_a_final_message_is_left_open_as_transformers_leaves_it(source: str, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    expected = by_transformers(source, messages, continue_final_message=True)
    assert template_of(source).render(messages, continue_final_message=True) == expected


def test_an_empty_final_message_keeps_its_header() -> None:
    messages: Messages = [USER, {"role": "assistant", "content": None}]
    for source in (CHATML, HEADERS):
        opened = template_of(source).render(messages, continue_final_message=True)
        assert opened == template_of(source).render([USER])


def test_a_message_that_the_template_hides_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        template_of("{{ messages[0].content }}").render([USER, ANSWER], continue_final_message=True)


@settings(deadline=None)
@given(st.lists(st.text(), min_size=1, max_size=4))
def test_no_content_can_be_taken_for_the_template(contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    expected = "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents)
    assert template_of(None).render(messages, add_generation_prompt=False) == expected


def test_content_may_be_null_missing_or_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: Messages = [{"role": "a", "content": None}, {"role": "b"}]
    messages += [{"role": "c", "content": parts}, {"role": "d", "content": []}]
    text = template_of("{% for m in messages %}[{{ m.content }}]{% endfor %}").render(messages)
    assert text == "[][][one\ntwo][]"


def test_the_developer_is_the_system_unless_the_template_knows_better() -> None:
    messages = [{"role": "developer", "content": "x"}]
    show = "{% for m in messages %}{{ m.role }}{% endfor %}"
    assert template_of(show).render(messages) == "system"
    assert template_of(show + "{# developer #}").render(messages) == "developer"


def test_system_messages_anywhere_are_left_alone() -> None:
    text = template_of(None).render([SYSTEM, USER, SYSTEM], add_generation_prompt=False)
    assert text.count("<|im_start|>system") == 2


def call(arguments: Any) -> Messages:
    function = {"name": "weather", "arguments": arguments}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}]


@pytest.mark.parametrize("arguments", ['{"city": "Łódź"}', {"city": "Łódź"}])
def test_arguments_of_tool_calls_fit_the_template(arguments: Any) -> None:
    assert 'weather {"city": "Łódź"}' in template_of(HEADERS).render(call(arguments))
    assert 'weather{"city": "Łódź"}</call>' in template_of(PASTED).render(call(arguments))
    shown = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    assert template_of(shown).render(call(arguments)) == '{"city": "Łódź"}'


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}[{{ 'nothing' if m.content is none else m.content }}]{% endfor %}", "[hi][nothing]"),
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[hi][]"),
        ("{% for m in messages %}[{{ m.content + '!' }}]{% endfor %}", "[hi!][!]"),
    ],
)
def test_no_content_beside_tool_calls_is_null_where_the_template_can_take_it(source: str, text: str) -> None:
    messages = [{"role": "user", "content": "hi"}, call("{}")[1]]
    assert template_of(source).render(messages) == text


def test_broken_arguments_of_a_tool_call_are_shown_as_they_are() -> None:
    assert "not json" in template_of(HEADERS).render(call("{not json"))
    assert "weather {}" in template_of(HEADERS).render(call(None))


def test_the_callers_messages_are_not_changed() -> None:
    messages = call('{"a": 1}')
    before = repr(messages)
    template_of(HEADERS).render(messages, continue_final_message=True)
    assert repr(messages) == before


def test_further_variables_reach_the_template() -> None:
    source = "{{ 'thinks' if enable_thinking else 'does not' }}"
    assert template_of(source).render([USER], enable_thinking=True) == "thinks"
    assert template_of(source).render([USER]) == "does not"
    # `messages` of a request's own variables does not replace the conversation.
    assert template_of("{{ messages | length }}").render([USER], messages=[]) == "1"


def test_the_time_of_day() -> None:
    assert template_of("{{ strftime_now('%Y') }}").render([USER]) in {str(datetime.now().year + n) for n in (-1, 0, 1)}


def test_what_the_template_refuses_is_the_users_to_mend() -> None:
    with pytest.raises(InvalidRequest) as error:
        template_of(INSTRUCT).render([ANSWER])
    assert error.value.message == "roles must alternate, user first"
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ messages[0].nothing.more }}", "{{ 'a' + 1 }}", "{{ undefined() }}"]
)
def test_a_template_that_fails_is_a_refusal_too(source: str) -> None:
    with pytest.raises(InvalidRequest, match="the model's chat template fails on these messages: ") as error:
        template_of(source).render([USER])
    assert error.value.param == "messages" and "\n" not in error.value.message


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "Field 'messages': expected a list with at least one message"),
        ("hello", "Field 'messages': expected a list with at least one message"),
        (["hello"], "Field 'messages[0]': expected an object"),
        ([{"content": "a"}], "Field 'messages[0].role': expected a string that is not empty"),
        (
            [USER, {"role": "user", "content": 7}],
            "Field 'messages[1].content': expected a string, a list of parts or null",
        ),
        ([{"role": "user", "content": ["a"]}], "Field 'messages[0].content[0]': expected an object"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            "Field 'messages[0].content[1].type': 'image_url' is not supported; only text is",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "Field 'messages[0].content[0].text': expected a string"),
        ([{"role": "assistant", "tool_calls": 1}], "Field 'messages[0].tool_calls': expected a list"),
        ([{"role": "assistant", "tool_calls": [1]}], "Field 'messages[0].tool_calls[0]': expected an object"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            "Field 'messages[0].tool_calls[0].function': expected an object with a name",
        ),
    ],
)
def test_a_bad_message_is_named(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        template_of(None).render(messages)
    assert error.value.message == message
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if x %}", "chat template, line 1: "),
        ("line\n{{ x | no_such_filter }}", "chat template, line 2: "),
        ("{{" + "(" * 5000, "chat template: "),
    ],
)
def test_a_source_that_is_no_template_is_a_fault_of_the_model_file(source: str, message: str) -> None:
    with pytest.raises(ModelFileError) as error:
        template_of(source)
    assert error.value.message.startswith(message) and "\n" not in error.value.message


def test_a_model_without_a_template_gets_chatml() -> None:
    template = template_of(None)
    assert template.is_default and not template_of("x").is_default
    assert template.render([USER]) == f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"


def test_preparing_twice_changes_nothing() -> None:
    parts = [{"type": "text", "text": "a"}]
    messages: Messages = [{"role": "developer", "content": parts}, USER, *call('{"a": 1}')]
    once = prepare(messages, is_developer_known=False)
    assert prepare(once, is_developer_known=False) == once
    assert template_of(HEADERS).render(once) == template_of(HEADERS).render(messages)
