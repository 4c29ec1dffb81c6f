"""Questions to Redis, and what becomes of whoever asks them."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from baton.errors import UnavailableError
from baton.redis_link import asked, open_redis
from tests.redis_servers import fake_redis

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
            await begun.wait()
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
