import asyncio
import threading
from collections.abc import Iterator

import psutil
import pytest

from baton.errors import InvalidRequestError
from router.templates.child import AskedProcess
from router.text.long_texts import LongTextEncoder
from tests.router.served import tiny_tokenizer
from tests.router.text.tiny_tokenizers import byte_level
from tests.waits import WAIT_S, soon

TEXT = "Schöne Grüße <|end|> 東京 🗼\n" * 1000

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def encoder() -> Iterator[LongTextEncoder]:
    made = LongTextEncoder(byte_level())
    yield made
    made.close()
    assert _children() == []


def _children() -> list[psutil.Process]:
    return [c for c in psutil.Process().children() if "encoding_child" in " ".join(c.cmdline())]


async def _encode(encoder: LongTextEncoder, text: str) -> tuple[int, ...]:
    return tuple(await encoder.encode(text, tenant_id="t", add_special_tokens=True, param="prompt"))


def _expected(text: str) -> tuple[int, ...]:
    return tuple(byte_level().encode(text, add_special_tokens=True).ids)


async def test_a_text_has_the_ids_that_it_has_elsewhere_and_the_child_is_kept(
    encoder: LongTextEncoder,
):
    assert await _encode(encoder, TEXT) == _expected(TEXT)
    (child,) = _children()
    assert await _encode(encoder, "") == ()
    assert _children() == [child]


async def test_after_a_very_long_text_the_child_and_its_memory_are_gone(
    encoder: LongTextEncoder, monkeypatch
):
    monkeypatch.setattr("router.text.long_texts._KEPT_TEXT", 1000)
    assert await _encode(encoder, TEXT) == _expected(TEXT)
    assert _children() == []
    assert await _encode(encoder, TEXT) == _expected(TEXT)


async def test_a_child_has_one_thread_however_many_processors_there_are(encoder: LongTextEncoder):
    await _encode(encoder, TEXT)
    (child,) = _children()
    assert child.num_threads() == 1


async def test_a_child_that_was_killed_is_replaced(encoder: LongTextEncoder):
    await _encode(encoder, TEXT)
    (child,) = _children()
    child.kill()
    child.wait(10)
    assert await _encode(encoder, TEXT) == _expected(TEXT)


async def test_a_text_that_takes_too_much_memory_is_refused_and_the_next_one_encoded():
    encoder = LongTextEncoder(byte_level(), memory_bytes=64 * 1024**2)
    with pytest.raises(InvalidRequestError, match="bytes of memory") as refused:
        await _encode(encoder, "x y " * 500_000)
    assert refused.value.param == "prompt"
    assert await _encode(encoder, TEXT) == _expected(TEXT)
    encoder.close()


async def test_tenants_take_turns_and_a_text_that_nobody_waits_for_any_more_is_not_encoded(
    encoder: LongTextEncoder, monkeypatch
):
    asked: list[str] = []
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Held(AskedProcess):
        def ask(self, body: bytes, limit_s: float) -> bytearray:
            asked.append(body[1:].decode())
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(WAIT_S)
            return super().ask(body, limit_s)

    def encoding(tenant_id: str, text: str) -> asyncio.Future[object]:
        return asyncio.ensure_future(
            encoder.encode(text, tenant_id=tenant_id, add_special_tokens=True, param="prompt")
        )

    monkeypatch.setattr("router.text.long_texts.AskedProcess", Held)
    first = encoding("many", "a1")
    await soon(begun.wait())
    left = [encoding("many", "a2"), encoding("gone", "b1")]
    waiting = [encoding("many", "a3"), encoding("few", "c1")]
    await asyncio.sleep(0)
    for one in left:
        one.cancel()
    await soon(asyncio.wait(left))
    go_on.set()
    await soon(asyncio.gather(first, *waiting))
    assert asked == ["a1", "c1", "a3"]


async def test_the_loop_runs_and_short_texts_are_encoded_while_a_long_one_is(monkeypatch):
    monkeypatch.setattr("router.text.tokenizer.LONG_TEXT", 100)
    tokenizer = tiny_tokenizer()
    long = asyncio.ensure_future(
        tokenizer.encode("x y " * 200_000, tenant_id="t", add_special_tokens=False)
    )
    others = 0
    while not long.done():
        await tokenizer.encode("hi", tenant_id="t", add_special_tokens=False)
        others += 1
    assert others > 10
    assert len(await long) > 200_000
    assert await tokenizer.encode(TEXT, tenant_id="t", add_special_tokens=True) == _expected(TEXT)
    tokenizer.close()
