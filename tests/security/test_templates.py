"""Chat templates come with a model, from whoever made it; what stands in messages comes from clients."""

from pathlib import Path

import pytest

from baton.errors import InvalidRequestError
from router.templates.chat_template import Rendering
from router.text.tokenizer import Tokenizer
from tests.router.served import serve
from tests.router.tiny_tokenizers import byte_level, save

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(messages) }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ raise_exception.__globals__.os }}",
    "{% include '/etc/passwd' %}",
]


@pytest.mark.parametrize("template", ESCAPES)
async def test_a_template_cannot_leave_its_sandbox(template: str, tmp_path: Path):
    tokenizer = Tokenizer.load(save(byte_level(), tmp_path, chat_template=template))
    with pytest.raises(InvalidRequestError) as refused:
        await tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert refused.value.param == "messages"
    tokenizer.close()


@pytest.mark.timeout(60)
async def test_a_template_without_an_end_is_stopped_and_the_next_one_is_served(tmp_path: Path):
    endless = (
        "{% if messages[0]['content'] == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}{% endif %}{{ messages[0]['content'] }}"
    )
    saved = save(byte_level(), tmp_path, chat_template=endless)
    tokenizer = Tokenizer.load(saved, threads=1, template_s=0.2)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="takes too long"):
            await tokenizer.encode_chat([{"role": "user", "content": "loop"}])
        ids = await tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        assert await tokenizer.decode(ids) == "hi"
    tokenizer.close()


async def test_a_template_that_makes_too_much_of_little_is_refused(tmp_path: Path):
    saved = save(byte_level(), tmp_path, chat_template="{{ messages[0]['content'] * 100 }}")
    tokenizer = Tokenizer.load(saved, max_chars=1000)
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        await tokenizer.encode_chat([{"role": "user", "content": "x" * 11}])
    assert len(await tokenizer.encode_chat([{"role": "user", "content": "x"}])) > 0
    tokenizer.close()


GROWING = [
    "{{ 'x' * 10**6 }}",
    "{{ (10**6 * 'x') | length }}",
    "{{ ([0] * 10**6) | length }}",
    "{{ 10 ** (10**6) > 1 }}",
    "{{ 10 ** 19000 * 10 ** 19000 > 1 }}",
    "{{ range(10**9) | list }}",
    "{{ '%1000000d' % 1 }}",
    "{{ '%.1000000f' % 1 }}",
    "{{ '%*d' % (1000000, 1) }}",
    "{{ '%s%s' % ('x' * 900, 'x' * 900) }}",
    "{{ '%1000000d' | format(1) }}",
    "{{ '{:1000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000) }}",
    "{{ '{0}{0}'.format('x' * 900) }}",
    "{{ '{a:1000000}'.format_map({'a': 1}) }}",
    "{{ 'x'.center(10**6) }}",
    "{{ 'x'.ljust(10**6) }}",
    "{{ 'x'.rjust(width=10**6) }}",
    "{{ 'x'.zfill(10**6) }}",
    "{{ '\t'.expandtabs(10**6) }}",
    "{{ 'x'.translate({120: 'y' * 900}) }}",
    "{{ ('x' * 900).replace('x', 'y' * 900) }}",
    "{{ ('x' * 900).replace('', 'y' * 900) }}",
    "{{ ('x' * 900).join(['y'] * 900) }}",
    "{{ (1).to_bytes(10**6, 'big') | length }}",
    "{{ ('x' | safe).center(10**6) }}",
    "{% autoescape true %}{% set s %}x{% endset %}{{ s.center(10**6) }}{% endautoescape %}",
    "{{ 'x' | center(10**6) }}",
    "{{ 'x' | indent(10**6, first=true) }}",
    "{{ ('x\n' * 400) | indent('y' * 900) }}",
    "{{ ('x' * 900) | replace('x', 'y' * 900) }}",
    "{{ (['x' * 900] * 900) | join }}",
    "{{ (['x'] * 900) | join('y' * 900) }}",
    "{{ ['x'] | map('center', 10**6) | list }}",
    "{{ [1] | batch(10**6, 0) | list }}",
    "{{ 2.5 | round(10**6, 'ceil') }}",
    "{{ [[0] * 900] * 900 | sum(start=[]) }}",
    "{{ [1] | tojson(indent=10**6) }}",
    "{{ (['x' * 900] * 900) | tojson }}",
    "{{ (['x' * 900] * 900) | string }}",
    "{{ ['x' * 900] * 900 }}",
    "{{ (['x' * 900] * 900) | escape }}",
    "{{ strftime_now('%1000000Y') }}",
    "{% set s = 'x' * 900 %}{% set s = s ~ s %}",
    "{% set s = 'x' * 900 %}{% set s = s + s %}",
    "{% set s = [0] * 900 %}{% set s = s + s %}",
    "{% set s %}{% for i in range(900) %}{{ 'x' * 900 }}{% endfor %}{% endset %}",
    "{% macro m() %}{% for i in range(900) %}{{ 'x' * 900 }}{% endfor %}{% endmacro %}{% set s = m() %}",
    "{% for i in range(900) %}{% set s = 'x' * 900 %}{% endfor %}",
]


@pytest.mark.parametrize("template", GROWING)
async def test_no_single_step_of_a_template_makes_much_of_little(template: str, tmp_path: Path):
    saved = save(byte_level(), tmp_path, chat_template=template)
    tokenizer = Tokenizer.load(saved, max_chars=1000)
    with pytest.raises(InvalidRequestError) as refused:
        await tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert refused.value.param == "messages"
    tokenizer.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "template", ["{{ 'x' * 10**10 }}", "{{ ' '.center(width) }}", "{{ 10 ** (10**10) }}"]
)
async def test_what_no_cap_could_stop_is_never_begun(template: str, tmp_path: Path):
    tokenizer = Tokenizer.load(save(byte_level(), tmp_path, chat_template=template))
    how = Rendering(arguments={"width": 10**10})
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        await tokenizer.encode_chat([{"role": "user", "content": "hi"}], rendering=how)
    tokenizer.close()


@pytest.mark.parametrize(
    "template",
    ["{{ 1 / 0 }}", "{{ [][5].x }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% if %}"],
)
async def test_a_template_that_fails_in_any_way_is_refused(template: str, tmp_path: Path):
    tokenizer = Tokenizer.load(save(byte_level(), tmp_path, chat_template=template))
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        await tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    tokenizer.close()


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "raise_exception"])
async def test_a_template_cannot_come_among_its_arguments(name: str):
    async with serve() as served:
        reply = await served.chat(chat_template_kwargs={name: "{{ 1 }}"})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "chat_template_kwargs"


async def test_template_code_in_a_message_is_only_text(tmp_path: Path):
    tokenizer = Tokenizer.load(save(byte_level(), tmp_path))
    ids = await tokenizer.encode_chat([{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}])
    assert "{{ 7 * 7 }}{% raw %}" in await tokenizer.decode(ids)
    tokenizer.close()


async def test_a_client_cannot_send_a_template():
    async with serve() as served:
        reply = await served.chat(chat_template="{{ 1 }}")
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "chat_template"
