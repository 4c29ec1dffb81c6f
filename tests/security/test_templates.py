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
