"""Chat templates come with a model, from whoever made it; what stands in messages comes from clients."""

from pathlib import Path

import pytest

from baton.errors import InvalidRequestError
from router.tokenizer import Tokenizer
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


async def test_a_template_that_makes_too_much_of_little_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("router.tokenizer.MAX_RENDERED_CHARS", 1000)
    saved = save(byte_level(), tmp_path, chat_template="{{ messages[0]['content'] * 100 }}")
    tokenizer = Tokenizer.load(saved)
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        await tokenizer.encode_chat([{"role": "user", "content": "x" * 11}])
    assert len(await tokenizer.encode_chat([{"role": "user", "content": "x"}])) > 0
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
