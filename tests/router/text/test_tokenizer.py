import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from tokenizers import processors

from baton.errors import InvalidRequestError, ModelLoadError
from baton.pretrained import PretrainedTokenizer
from baton.tokens import PackedTokens
from router.templates.renderer import Conversation
from router.text.tokenizer import Tokenizer
from tests.router.served import tiny_tokenizer
from tests.router.text.tiny_tokenizers import byte_fallback, byte_level, save, token_id
from tests.waits import WAIT_S, soon

_USER = Conversation(messages=[{"role": "user", "content": "hello"}])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(byte_level(), tmp_path)


async def test_a_conversation_becomes_the_tokens_of_the_rendered_template(directory: Path):
    tokenizer = Tokenizer.load(directory)
    ids = await tokenizer.encode_chat(_USER, tenant_id="t")
    text = "<|user|>hello<|end|><|assistant|>"
    assert ids == await tokenizer.encode(text, tenant_id="t", add_special_tokens=False)
    assert ids[0] == token_id(tokenizer.backend, "<|user|>")
    tokenizer.close()


@pytest.mark.parametrize("kind", ["text", "conversation", "words"])
async def test_a_tenants_text_does_not_wait_for_all_those_of_another(
    directory: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    all_have_asked, is_done = threading.Event(), threading.Event()
    encode, begun = Tokenizer._encode, list[str]()

    def encode_in_turn(self: Tokenizer, text: str, add_special_tokens: bool) -> PackedTokens:
        if text == "of many":
            begun.append(text)
            assert (all_have_asked if len(begun) == 1 else is_done).wait(WAIT_S)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_encode", encode_in_turn)
    tokenizer = Tokenizer.load(directory, threads=1)
    many = [
        asyncio.ensure_future(
            tokenizer.encode("of many", tenant_id="many", add_special_tokens=False)
        )
        for _ in range(20)
    ]
    few: asyncio.Future[object]
    if kind == "text":
        few = asyncio.ensure_future(
            tokenizer.encode("hello", tenant_id="few", add_special_tokens=False)
        )
    elif kind == "words":
        few = asyncio.ensure_future(tokenizer.encode_words(["hello"], tenant_id="few"))
    else:
        few = asyncio.ensure_future(tokenizer.encode_chat(_USER, tenant_id="few"))
    await asyncio.sleep(0)
    all_have_asked.set()
    await soon(few)
    is_done.set()
    await soon(asyncio.gather(*many))
    tokenizer.close()


async def test_the_generation_prompt_can_be_left_out(directory: Path):
    tokenizer = Tokenizer.load(directory)
    with_prompt = await tokenizer.encode_chat(_USER, tenant_id="t")
    assert (
        await tokenizer.encode_chat(replace(_USER, add_generation_prompt=False), tenant_id="t")
        == with_prompt[:-1]
    )
    tokenizer.close()


async def test_developer_is_system_for_a_template_that_knows_only_that(directory: Path):
    tokenizer = Tokenizer.load(directory)
    system = await tokenizer.encode_chat(
        Conversation(messages=[{"role": "system", "content": "x"}]), tenant_id="t"
    )
    assert (
        await tokenizer.encode_chat(
            Conversation(messages=[{"role": "developer", "content": "x"}]), tenant_id="t"
        )
        == system
    )
    tokenizer.close()


async def test_a_template_that_refuses_is_the_clients_error(directory: Path):
    tokenizer = Tokenizer.load(directory)
    with pytest.raises(InvalidRequestError, match="no tools here") as caught:
        await tokenizer.encode_chat(
            Conversation(messages=[{"role": "tool", "content": "x"}]), tenant_id="t"
        )
    assert caught.value.param == "messages"
    tokenizer.close()


async def test_a_model_without_a_template_says_so(tmp_path: Path):
    tokenizer = Tokenizer.load(save(byte_level(), tmp_path, chat_template=None))
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        await tokenizer.encode_chat(_USER, tenant_id="t")
    assert caught.value.param == "messages"
    tokenizer.close()


async def test_special_tokens_are_added_only_where_asked(tmp_path: Path):
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", token_id(backend, "<|system|>"))]
    )
    tokenizer = Tokenizer.load(save(backend, tmp_path))
    plain = await tokenizer.encode("hi", tenant_id="t", add_special_tokens=False)
    first = token_id(backend, "<|system|>")
    assert await tokenizer.encode("hi", tenant_id="t", add_special_tokens=True) == (first, *plain)
    assert first not in await tokenizer.encode_chat(_USER, tenant_id="t")
    tokenizer.close()


async def test_truncation_stored_with_the_tokenizer_does_not_cut_prompts(tmp_path: Path):
    backend = byte_level()
    backend.enable_truncation(4)
    tokenizer = Tokenizer.load(save(backend, tmp_path))
    assert len(await tokenizer.encode("x y z " * 20, tenant_id="t", add_special_tokens=False)) > 4
    tokenizer.close()


async def test_decoding_gives_back_text_with_its_special_tokens(directory: Path):
    tokenizer = Tokenizer.load(directory)
    text = "<|user|>hello wörld 你"
    assert (
        await tokenizer.decode(
            await tokenizer.encode(text, tenant_id="t", add_special_tokens=False)
        )
        == text
    )
    tokenizer.close()


def test_pieces_are_the_bytes_of_single_tokens(directory: Path):
    tokenizer = Tokenizer.load(directory)
    first = tokenizer.backend.encode("€", add_special_tokens=False).ids[0]
    assert tokenizer.pieces.bytes_of(first) == b"\xe2"
    assert tokenizer.pieces.label_of(first) == "bytes:\\xe2"
    assert tokenizer.pieces.bytes_of(token_id(tokenizer.backend, "<|end|>")) == b"<|end|>"
    assert tokenizer.pieces.bytes_of(100_000) == b""
    tokenizer.close()


def test_pieces_of_byte_fallback_keep_their_space_and_their_byte(tmp_path: Path):
    backend = byte_fallback()
    tokenizer = Tokenizer.load(save(backend, tmp_path))
    assert tokenizer.pieces.bytes_of(token_id(backend, "▁hi")) == b" hi"
    assert tokenizer.pieces.bytes_of(token_id(backend, "<0xE2>")) == b"\xe2"
    tokenizer.close()


@pytest.mark.parametrize("damage", ["missing", "empty", "corrupt"])
def test_a_tokenizer_that_cannot_be_read_is_one_clear_line(damage: str, tmp_path: Path):
    directory = tmp_path / "model"
    if damage != "missing":
        directory.mkdir()
    if damage == "corrupt":
        save(byte_level(), directory)
        (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.load(directory)
    assert str(directory) in caught.value.message
    assert "\n" not in caught.value.message


def test_code_in_a_models_directory_is_not_run(directory: Path):
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    config["tokenizer_class"] = "Evil"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    ran = directory / "ran"
    (directory / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Evil: pass\n")
    with contextlib.suppress(ModelLoadError):
        Tokenizer.load(directory).close()
    assert not ran.exists()


def test_a_router_process_reads_a_tokenizer_without_transformers_and_torch(directory: Path):
    script = (
        "import sys; from pathlib import Path\n"
        "import router.service\n"
        "from router.text.tokenizer import Tokenizer\n"
        "Tokenizer.load(Path(sys.argv[1])).close()\n"
        "print([name for name in ('transformers', 'torch', 'huggingface_hub') if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", script, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
async def test_tokens_decoded_some_at_a_time_are_the_text_of_all_of_them(make, monkeypatch):
    monkeypatch.setattr("router.text.tokenizer._DECODED_AT_ONCE", 3)
    backend = make()
    tokenizer = Tokenizer(
        PretrainedTokenizer(backend=backend, special_tokens={}, chat_template=None), threads=1
    )
    ids = backend.encode("Schöne Grüße, 東京 🗼 and <|end|> x" * 9).ids
    assert await tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=False)
    assert await tokenizer.decode([]) == ""
    tokenizer.close()


async def test_lists_of_many_tokens_take_turns_and_the_loop_runs_after_each_step(monkeypatch):
    monkeypatch.setattr("router.text.tokenizer._DECODED_AT_ONCE", 10)
    tokenizer = tiny_tokenizer()
    steps: list[str] = []

    async def decode(name: str, count: int) -> None:
        async for text in tokenizer.decode_pieces([7] * count):
            if text:
                steps.append(name)  # noqa: PERF401  # seen while they are decoded

    lists = [asyncio.ensure_future(decode("a", 1000)), asyncio.ensure_future(decode("b", 50))]
    while not all(decoding.done() for decoding in lists):
        before = len(steps)
        await asyncio.sleep(0)
        assert len(steps) <= before + 1
    assert "".join(steps) == "ab" * 5 + "a" * 95
    tokenizer.close()


async def test_a_few_tokens_are_decoded_without_waiting_for_many(monkeypatch):
    monkeypatch.setattr("router.text.tokenizer._DECODED_AT_ONCE", 10)
    tokenizer = tiny_tokenizer()
    many = asyncio.ensure_future(tokenizer.decode([7] * 1000))
    await asyncio.sleep(0)
    assert await soon(tokenizer.decode([7] * 10)) == tokenizer.backend.decode([7] * 10)
    assert not many.done()
    await soon(many)
    tokenizer.close()


async def test_a_long_text_is_encoded_by_the_way_that_lets_other_threads_run():
    tokenizer = tiny_tokenizer()
    text = "Schöne Grüße <|end|> " * 1000
    backend = tokenizer.backend
    tokenizer.backend = Mock(spec_set=["encode_batch_fast"])
    tokenizer.backend.encode_batch_fast = backend.encode_batch_fast
    ids = await tokenizer.encode(text, tenant_id="t", add_special_tokens=True)
    assert ids == tuple(backend.encode(text, add_special_tokens=True).ids)
    tokenizer.close()
