"""Questions to Redis, and what becomes of whoever asks them."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.errors import UnavailableError
from baton.redis_link import RefusedValues, asked, open_redis
from tests.redis_servers import fake_redis
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
