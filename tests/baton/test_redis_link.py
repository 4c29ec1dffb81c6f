"""Questions to Redis, and what becomes of whoever asks them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.errors import UnavailableError
from baton.redis_link import RefusedValues, asked, open_redis
from tests.redis_servers import REDIS_SERVER, fake_redis, real_redis
from tests.waits import soon

Sent = asyncio.Future[None]


async def answered(sent: Sent) -> str:
    """A question as redis-py asks it."""
    await asyncio.wait_for(sent, timeout=5.0)
    return "reply"


async def unanswered(sent: Sent) -> str:
    await asyncio.wait_for(sent, timeout=5.0)
    raise ConnectionResetError


@pytest.mark.parametrize("question", [answered, unanswered])
async def test_a_task_that_is_cancelled_just_when_its_question_was_sent_is_cancelled(
    question: Callable[[Sent], Awaitable[str]],
) -> None:
    sent: Sent = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(asked(question(sent)))
    await asyncio.sleep(0)
    sent.set_result(None)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_a_task_that_tidies_up_after_it_was_cancelled_still_gets_its_replies() -> None:
    with fake_redis() as url:
        async with open_redis(url, 5.0) as redis:
            begun, said = asyncio.Event(), list[object]()

            async def tidy() -> None:
                try:
                    begun.set()
                    await asyncio.Event().wait()
                finally:
                    said.append(await asked(redis.set("left", "yes")))

            task = asyncio.create_task(tidy())
            await soon(begun.wait())
            task.cancel()
            await asyncio.wait({task})
            assert said == [True]
            assert task.cancelled()


async def test_a_redis_that_is_away_is_a_fault_of_its_own_kind() -> None:
    with fake_redis() as url:
        pass
    async with open_redis(url, 5.0) as redis:
        with pytest.raises(UnavailableError, match="ConnectionError"):
            await asked(redis.ping())


async def test_more_questions_at_once_than_there_are_connections_wait_for_one() -> None:
    with fake_redis() as url:
        async with open_redis(url, 20.0) as redis:
            counts = await asyncio.gather(*(asked(redis.incr("n")) for _ in range(300)))
            assert sorted(counts) == list(range(1, 301))


async def test_who_waits_for_a_connection_in_vain_has_no_answer_and_connections_are_free_again() -> (
    None
):
    async with saying(b"") as (url, words), open_redis(url, 0.1) as redis:
        questions = (asked(redis.set("k", "v")) for _ in range(100))
        got = await soon(asyncio.gather(*questions, return_exceptions=True))
        assert {type(each) for each in got} == {UnavailableError}
        words[0] = b"+OK\r\n"
        assert await asked(redis.set("k", "v"))


@pytest.mark.parametrize("garbled", [b":abc\r\n", b"*x\r\n", b"?\r\n"])
async def test_what_is_no_reply_is_no_answer_and_the_next_question_has_one(garbled: bytes) -> None:
    async with saying(garbled) as (url, words), open_redis(url, 5.0) as redis:
        with pytest.raises(UnavailableError):
            await asked(redis.set("k", "v"))
        words[0] = b"+OK\r\n"
        assert await asked(redis.set("k", "v"))


@pytest.mark.redis
@pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")
async def test_after_a_failover_that_broke_no_connection_the_new_master_is_asked(
    tmp_path: Path,
) -> None:
    places, name = (tmp_path / "a", tmp_path / "b"), tmp_path / "redis.sock"
    for place in places:
        place.mkdir()
    async with real_redis(places[0]) as before, real_redis(places[1]) as after:
        name.symlink_to(before.socket)
        async with (
            open_redis(f"unix://{name}", 5.0) as redis,
            open_redis(before.url, 5.0) as old,
            open_redis(after.url, 5.0) as new,
        ):
            count = redis.register_script("return redis.call('incr', KEYS[1])")
            await asked(count(keys=["before"]))
            await before.follow(after)
            with pytest.raises(UnavailableError, match="ReadOnlyError"):
                await asked(old.incr("before"))
            with pytest.raises(UnavailableError, match="ReadOnlyError"):
                await asked(count(keys=["while the name leads to the old one"]))
            name.unlink()
            name.symlink_to(after.socket)
            assert await asked(count(keys=["after"])) == 1
            assert await asked(new.get("after")) == b"1"


@asynccontextmanager
async def saying(word: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """The URL of a server that says the one word in the list to every command."""
    words = [word]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while commands := await reader.read(65536):
            writer.write(words[0] * commands.count(b"*"))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield f"redis://127.0.0.1:{port}?protocol=2", words
    finally:
        server.close()


def test_what_is_refused_is_counted_always_and_logged_once_per_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    clock, registry = ManualClock(), CollectorRegistry()
    refused = RefusedValues(registry, clock)
    refused.note("one", [])
    for _ in range(3):
        refused.note("one", ["malformed", "too long"])
        clock.advance(59)
        refused.note("one", [])
    refused.note("two", ["malformed"])
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    clock.advance(2)
    refused.note("one", [])
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]
    counted = partial(registry.get_sample_value, "baton_redis_refused_values_total")
    assert [counted({"reader": reader}) for reader in ("one", "two")] == [6, 1]
