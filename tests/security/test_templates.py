"""Chat templates come with a model, from whoever made it; what stands in messages comes from clients."""

import asyncio
from pathlib import Path

import pytest

from baton.errors import InvalidRequestError
from router.templates.renderer import Conversation, TemplateRenderer
from router.text.tokenizer import Tokenizer
from tests.router.served import serve
from tests.router.text.tiny_tokenizers import byte_level, save

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
        await tokenizer.encode_chat(
            Conversation(messages=[{"role": "user", "content": "hi"}]), tenant_id="t"
        )
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
            await tokenizer.encode_chat(
                Conversation(messages=[{"role": "user", "content": "loop"}]), tenant_id="t"
            )
        ids = await tokenizer.encode_chat(
            Conversation(messages=[{"role": "user", "content": "hi"}]), tenant_id="t"
        )
        assert await tokenizer.decode(ids) == "hi"
    tokenizer.close()


async def test_a_template_that_makes_too_much_of_little_is_refused(tmp_path: Path):
    saved = save(byte_level(), tmp_path, chat_template="{{ messages[0]['content'] * 100 }}")
    tokenizer = Tokenizer.load(saved, max_chars=1000)
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        await tokenizer.encode_chat(
            Conversation(messages=[{"role": "user", "content": "x" * 11}]), tenant_id="t"
        )
    assert (
        len(
            await tokenizer.encode_chat(
                Conversation(messages=[{"role": "user", "content": "x"}]), tenant_id="t"
            )
        )
        > 0
    )
    tokenizer.close()


LARGE = {"big": 10**10, "wide": 2 * 10**9, "much": 10**5}

BOMBS = [
    "{{ 'x' * big }}",
    "{{ (big * 'x') | length }}",
    "{{ ([0] * big) | length }}",
    "{{ 10 ** (big) > 1 }}",
    "{{ range(wide) | list }}",
    "{{ ('%' ~ big ~ 'd') % 1 }}",
    "{{ ('%.' ~ wide ~ 'f') % 1 }}",
    "{{ '%*d' % (wide, 1) }}",
    "{{ ('%' ~ wide ~ 'd') | format(1) }}",
    "{{ ('{:' ~ big ~ '}').format(1) }}",
    "{{ '{:{}}'.format(1, big) }}",
    "{{ ('{a:' ~ big ~ '}').format_map({'a': 1}) }}",
    "{{ 'x'.center(big) }}",
    "{{ 'x'.ljust(big) }}",
    "{{ 'x'.rjust(big) }}",
    "{{ 'x'.zfill(big) }}",
    "{{ '\t'.expandtabs(wide) }}",
    "{{ ('x' * much).translate({120: 'y' * much}) }}",
    "{{ ('x' * much).replace('x', 'y' * much) }}",
    "{{ ('x' * much).replace('', 'y' * much) }}",
    "{{ ('x' * much).join(['y'] * much) }}",
    "{{ (1).to_bytes(big, 'big') | length }}",
    "{{ ('x' | safe).center(big) }}",
    "{% autoescape true %}{% set s %}x{% endset %}{{ s.center(big) }}{% endautoescape %}",
    "{{ 'x' | center(big) }}",
    "{{ 'x' | indent(big, first=true) }}",
    "{{ ('x\n' * much) | indent('y' * much) }}",
    "{{ ('x' * much) | replace('x', 'y' * much) }}",
    "{{ (['x' * much] * much) | join }}",
    "{{ (['x'] * much) | join('y' * much) }}",
    "{{ ['x'] | map('center', big) | list }}",
    "{{ [1] | batch(big, 0) | list }}",
    "{{ [[0] * much] * much | sum(start=[]) }}",
    "{{ [1] | tojson(indent=big) }}",
    "{{ (['x' * much] * much) | tojson }}",
    "{{ (['x' * much] * much) | string }}",
    "{{ ['x' * much] * much }}",
    "{{ (['x' * much] * much) | escape }}",
    "{% set n = namespace(s='x') %}{% for i in range(99 if big else 0) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(99 if big else 0) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s=[0]) %}{% for i in range(99 if big else 0) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='{}{}') %}{% for i in range(99 if big else 0) %}{% set n.s = n.s.format(n.s, n.s) %}{% endfor %}",
    "{% set s %}{% for i in range(much) %}{{ 'x' * much }}{% endfor %}{% endset %}",
    "{% macro m() %}{% for i in range(much) %}{{ 'x' * much }}{% endfor %}{% endmacro %}{% set s = m() %}",
    "{% for i in range(much) %}{% for j in range(much) %}{% set s = 'x' * much %}{% endfor %}{% endfor %}",
    # Two lists, doubly nested: one comparison, which looks at 2**60 pairs and makes nothing.
    "{% set n = namespace(a=[], b=[]) %}{% for i in range(60 if big else 0) %}{% set n.a = [n.a, n.a] %}"
    "{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bomb", BOMBS)
def test_no_template_makes_much_of_little(bomb: str):
    source = (
        f"{{% if messages[0].content == 'bomb' %}}{bomb}{{% endif %}}{{{{ messages[0].content }}}}"
    )
    renderer = TemplateRenderer(source, {}, limit_s=1.0, max_chars=1000, memory_bytes=2**28)
    with pytest.raises(InvalidRequestError) as refused:
        renderer.render(
            Conversation(messages=[{"role": "user", "content": "bomb"}], arguments=LARGE)
        )
    assert refused.value.param == "messages"
    assert renderer.render(Conversation(messages=[{"role": "user", "content": "hi"}])) == "hi"
    renderer.close()


@pytest.mark.timeout(60)
async def test_the_event_loop_goes_on_while_a_single_step_of_a_template_does_not_end(
    tmp_path: Path,
):
    saved = save(byte_level(), tmp_path, chat_template=BOMBS[-1])
    tokenizer = Tokenizer.load(saved, template_s=1.0)
    said = Conversation(messages=[{"role": "user", "content": "hi"}], arguments=LARGE)
    encoding = asyncio.ensure_future(tokenizer.encode_chat(said, tenant_id="t"))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.02)
        turns += 1
    with pytest.raises(InvalidRequestError, match="takes too long"):
        await encoding
    assert turns > 5
    tokenizer.close()


@pytest.mark.parametrize(
    "template",
    ["{{ 1 / 0 }}", "{{ [][5].x }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% if %}"],
)
async def test_a_template_that_fails_in_any_way_is_refused(template: str, tmp_path: Path):
    tokenizer = Tokenizer.load(save(byte_level(), tmp_path, chat_template=template))
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        await tokenizer.encode_chat(
            Conversation(messages=[{"role": "user", "content": "hi"}]), tenant_id="t"
        )
    tokenizer.close()


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "raise_exception"])
async def test_a_template_cannot_come_among_its_arguments(name: str):
    async with serve() as served:
        reply = await served.chat(chat_template_kwargs={name: "{{ 1 }}"})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "chat_template_kwargs"


async def test_template_code_in_a_message_is_only_text(tmp_path: Path):
    tokenizer = Tokenizer.load(save(byte_level(), tmp_path))
    ids = await tokenizer.encode_chat(
        Conversation(messages=[{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}]), tenant_id="t"
    )
    assert "{{ 7 * 7 }}{% raw %}" in await tokenizer.decode(ids)
    tokenizer.close()


async def test_a_client_cannot_send_a_template():
    async with serve() as served:
        reply = await served.chat(chat_template="{{ 1 }}")
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "chat_template"
