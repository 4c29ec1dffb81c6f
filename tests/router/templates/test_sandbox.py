"""Rendering against `transformers`, which is how models' authors wrote their templates to be read."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from router.templates.sandbox import ChatTemplate
from tests.router.text.tiny_tokenizers import byte_level

TEMPLATES = {
    "llama": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set told = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% else %}{% set told = false %}{% endif %}"
    "{% for m in messages %}{% if loop.index0 == 0 and told != false %}"
    "{% set content = '<<SYS>>\\n' + told + '\\n<</SYS>>\\n\\n' + m['content'] %}{% else %}"
    "{% set content = m['content'] %}{% endif %}{{ '[INST] ' + content.strip() + ' [/INST]' }}{% endfor %}",
    "trimmed": "{%- for m in messages %}\n    {%- if m.role == 'user' -%}\n    <|{{ m.role }}|>"
    "{{ m.content | trim }}<|end|>\n    {% else %}\n{{ m.content }}\n{% endif %}\n{%- endfor %}",
    "namespaces": "{% set ns = namespace(last='', n=0) %}{% for m in messages %}"
    "{% set ns.last = ns.last ~ m.content ~ loop.index %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.last }}{{ ns.n }}",
    "json": "{# content #}{{ messages | tojson }}{{ dict(a=1, b=messages) | tojson(indent=2) }}{{ {'<': 'ü'} | tojson }}",
    "loops": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "macros": "{% macro turn(role, text) %}{{ '<' + role + '>' + text }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m['role'], m['content']) }}{% endfor %}",
    "methods": "{% for m in messages %}{{ m.content.split(' ')[-1].upper() }}{{ m.content.replace('a', 'b') }}"
    "{{ '{}: {:>4}'.format(m.role, loop.index) }}{{ '%s=%3d' % (m.role, loop.index) }}{% endfor %}",
    "filters": "{{ messages | map(attribute='content') | join('|') | indent(2) }}{{ messages | length }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ '-' * 5 }}{{ 7 % 4 }}{{ 2 ** 3 }}",
    "arguments": "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{{ tools is none }}{{ documents }}{{ add_generation_prompt }}{{ messages[-1].content }}",
}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is a \U0001f600?\n"},
    {"role": "assistant", "content": "a face <&> "},
]


@pytest.mark.parametrize("continue_last", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_that_of_transformers(name: str, continue_last: bool):
    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<|system|>")
    oracle.chat_template = TEMPLATES[name]
    told: dict[str, Any] = {"enable_thinking": False}
    template = ChatTemplate(TEMPLATES[name], oracle.special_tokens_map, 100_000)
    how: dict[str, Any] = {
        "continue_last": continue_last,
        "add_generation_prompt": not continue_last,
        "arguments": told,
    }
    try:
        expected = oracle.apply_chat_template(
            TALK,
            tokenize=False,
            add_generation_prompt=not continue_last,
            continue_final_message=continue_last,
            **told,
        )
    except ValueError:
        with pytest.raises(ValueError, match="does not show the last message"):
            template.render(TALK, **how)
        return
    assert template.render(TALK, **how) == expected


PARTS = (
    "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
)
NAMED = PARTS.replace(
    "{% for part in m.content", "{% set content = m['content'] %}{% for part in content"
)
EITHER = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}" + (
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "content_format", "expected"),
    [
        (PARTS, "auto", "[hello]"),
        (NAMED, "auto", "[hello]"),
        (EITHER, "auto", "hello"),
        (EITHER, "openai", "[hello]"),
        (TEXT, "auto", "hello"),
        (TEXT, "openai", "[{'type': 'text', 'text': 'hello'}]"),
        (PARTS, "string", "[][][][][]"),
    ],
)
def test_contents_are_given_as_the_template_asks_or_as_the_operator_says(
    source: str, content_format: str, expected: str
):
    template = ChatTemplate(source, {}, 1000, content_format)
    assert template.render([{"role": "user", "content": "hello"}]) == expected


def test_a_message_in_parts_can_be_gone_on_with():
    template = ChatTemplate(PARTS, {}, 1000)
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    assert template.render(said, continue_last=True) == "[hi][Well"


@pytest.mark.parametrize("content", ["plain", 'with "quotes"\nand lines', "", "  "])
def test_a_role_that_shows_is_known_whether_as_text_or_as_json(content: str):
    source = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    assert ChatTemplate(source, {}, 1000).render([{"role": "ipython", "content": content}])


NINE = """{%- for m in messages %}{%- for c in m.tool_calls or [] %}
{%- if c.id|length != 9 %}{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}{{- "[TOOL_CALLS]" + c.id }}{%- endfor %}
{%- if m.role == "tool" %}
{%- if m.tool_call_id|length != 9 %}{{- raise_exception("and so should these") }}{%- endif %}
{{- "[TOOL_RESULTS]" + m.tool_call_id + m.content }}{%- endif %}{%- endfor %}"""


def called(call_id: str) -> list[dict[str, Any]]:
    """A call, and what it gave."""
    function = {"name": "now", "arguments": {"zone": "CET"}}
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "content": "7:00", "tool_call_id": call_id},
    ]


def test_a_template_that_wants_short_ids_of_calls_is_given_such():
    template = ChatTemplate(NINE, {}, 1000)
    assert (
        template.render(called("a1B2c3D4e")) == "[TOOL_CALLS]a1B2c3D4e[TOOL_RESULTS]a1B2c3D4e7:00"
    )
    told = [template.render(called(i)) for i in ("call_23a6f749d22824ea40cfaffe", "toolu_1", "c")]
    for text in told:
        call_id = text.removeprefix("[TOOL_CALLS]")[:9]
        assert call_id.isalnum()
        assert text == f"[TOOL_CALLS]{call_id}[TOOL_RESULTS]{call_id}7:00"
    assert len(set(told)) == 3
    assert template.render(called("c")) == told[2]
    others = ChatTemplate(
        "{{ messages[0].tool_calls[0].id }}{{ messages[1].tool_call_id }}", {}, 99
    )
    assert others.render(called("c")) == "cc"


DEEPSEEK_R1 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for t in m['tool_calls'] %}{{ '<call>' + t['function']['name'] + '\\n' + t['function']['arguments'] + '</call>' }}"
    "{% endfor %}{% endif %}{% if m['role'] == 'assistant' and m['content'] is not none %}"
    "{{ '<answer>' + m['content'] }}{% endif %}"
    "{% if m['role'] == 'tool' %}{{ '<result>' + m['content'] }}{% endif %}{% endfor %}"
)
DEEPSEEK_V3_1 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['tool_calls'] is defined %}{% for t in m['tool_calls'] %}"
    "{% if m['content'] is none %}{{ '<call>' + t['function']['name'] + '\\n' + t['function']['arguments'] + '</call>' }}"
    "{% else %}{{ m['content'] + '<call>' + t['function']['name'] + '\\n' + t['function']['arguments'] + '</call>' }}"
    "{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'tool' %}{{ '<result>' + m['content'] }}{% endif %}{% endfor %}"
)
WRITTEN = '<call>now\n{"zone": "CET"}</call><result>7:00'


@pytest.mark.parametrize(
    "source",
    [
        DEEPSEEK_R1,
        DEEPSEEK_V3_1,
        DEEPSEEK_V3_1.replace(" + t['function']['arguments'] + ", " ~ t.function.arguments ~ "),
        DEEPSEEK_V3_1.replace("t['function']['arguments']", "t['function']['arguments'] | tojson"),
    ],
    ids=["R1", "V3.1", "joined by ~", "as JSON"],
)
def test_calls_are_given_as_the_template_joins_them_to_text(source: str):
    template = ChatTemplate(source, {}, 1000)
    assert template.render(called("c")) == WRITTEN
    assert template.render([*called("c"), *called("d")]) == WRITTEN * 2


def test_arguments_stay_what_they_are_where_a_template_asks_first():
    source = (
        "{% for c in messages[0].tool_calls %}{% if c.function.arguments is string %}"
        "{{ 'text ' + c.function.arguments }}{% else %}{% for k, v in c.function.arguments | items %}"
        "{{ k + '=' + v }}{% endfor %}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source, {}, 1000).render(called("c")) == "zone=CET"


def test_an_answer_with_text_and_calls_keeps_its_text():
    message, result = called("c")
    said = [message | {"content": "I look. "}, result]
    assert ChatTemplate(DEEPSEEK_V3_1, {}, 1000).render(said) == "I look. " + WRITTEN


def test_a_template_that_asks_for_no_content_of_its_own_variable_is_given_a_text():
    source = "{% set content = messages[0].content %}{{ 'x' in content }}{{ content is none }}"
    assert ChatTemplate(source + "{# tool_calls #}", {}, 1000).render(called("c")) == "FalseFalse"
