import asyncio
from pathlib import Path

import pytest

from baton.redis_link import asked, open_redis
from tests.redis_servers import a_redis

TURNS = 40
"""Of the event loop, within which a question is on its way: it is cancelled after each number of them."""


async def _ask_for_ever(redis) -> None:
    while True:
        await asked(redis.get("key"))


async def _ended(task: "asyncio.Task[None]") -> bool:
    done, _ = await asyncio.wait({task}, timeout=5.0)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    return bool(done)


async def test_whoever_is_cancelled_while_redis_is_asked_ends_wherever_the_question_is(
    tmp_path: Path,
) -> None:
    async with a_redis("fakeredis", tmp_path) as url:
        redis = open_redis(url, timeout_s=5.0)
        await redis.ping()
        for turns in range(TURNS):
            task = asyncio.create_task(_ask_for_ever(redis))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            assert await _ended(task), f"went on after it was cancelled in turn {turns}"
        await redis.aclose()


async def test_who_was_cancelled_before_may_ask_while_it_tidies_up(tmp_path: Path) -> None:
    said: list[str] = []

    async def tidy_up(redis) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            said.append(await asked(redis.get("key")))

    async with a_redis("fakeredis", tmp_path) as url:
        redis = open_redis(url, timeout_s=5.0)
        await redis.set("key", "value")
        task = asyncio.create_task(tidy_up(redis))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await redis.aclose()
    assert said == ["value"]
