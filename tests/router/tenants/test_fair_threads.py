import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from router.tenants.fair_threads import FairThreads
from tests.waits import WAIT_S, soon


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    made = FairThreads(1, "test")
    yield made
    made.close()


class Held:
    """Work that goes on until it is let go."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._go_on = threading.Event()

    def __call__(self) -> None:
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self._go_on.wait(WAIT_S)

    def let_go(self) -> None:
        self._go_on.set()


async def turns_of_the_loop() -> None:
    """As many as a cancellation takes on its way from a task to a thread's queue."""
    for _ in range(10):
        await asyncio.sleep(0)


async def begin(threads: FairThreads, tenant_id: str, work: Held) -> asyncio.Future[None]:
    running = asyncio.ensure_future(threads.run(tenant_id, work))
    await soon(work.begun.wait())
    return running


async def test_nobody_waits_for_more_than_one_piece_of_work_of_another_tenant(
    threads: FairThreads,
):
    done: list[str] = []
    held = Held()
    first = await begin(threads, "many", held)
    many = [
        asyncio.ensure_future(threads.run("many", partial(done.append, name)))
        for name in ("m1", "m2", "m3")
    ]
    few = asyncio.ensure_future(threads.run("few", lambda: done.append("f")))
    await turns_of_the_loop()
    held.let_go()
    await soon(asyncio.gather(first, few, *many))
    assert done == ["f", "m1", "m2", "m3"]


async def test_a_tenant_may_have_several_threads_and_others_come_first_when_one_is_free():
    threads = FairThreads(2, "test", each=2)
    done: list[str] = []
    helds = Held(), Held()
    try:
        first, second = [await begin(threads, "many", held) for held in helds]
        more = asyncio.ensure_future(threads.run("many", lambda: done.append("m")))
        few = asyncio.ensure_future(threads.run("few", lambda: done.append("f")))
        await turns_of_the_loop()
        helds[0].let_go()
        await soon(asyncio.gather(few, more, first))
        assert done == ["f", "m"]
    finally:
        for held in helds:
            held.let_go()
        threads.close()
    await soon(second)


async def test_a_tenant_has_no_more_threads_than_it_may():
    threads = FairThreads(2, "test")
    helds = Held(), Held(), Held()
    try:
        first = await begin(threads, "one", helds[0])
        more = asyncio.ensure_future(threads.run("one", helds[1]))
        other = await begin(threads, "other", helds[2])
        assert not helds[1].begun.is_set()
        helds[0].let_go()
        await soon(helds[1].begun.wait())
    finally:
        for held in helds:
            held.let_go()
        threads.close()
    await soon(asyncio.gather(first, more, other))


@pytest.mark.parametrize("tenant_id", ["same", "other"])
async def test_work_that_nobody_waits_for_is_not_begun(threads: FairThreads, tenant_id: str):
    done: list[str] = []
    held = Held()
    first = await begin(threads, "same", held)
    waiting = asyncio.ensure_future(threads.run(tenant_id, lambda: done.append("cancelled")))
    await turns_of_the_loop()
    waiting.cancel()
    await turns_of_the_loop()
    held.let_go()
    await soon(threads.run(tenant_id, lambda: done.append("next")))
    await soon(first)
    assert done == ["next"]


async def test_work_that_is_cancelled_in_a_thread_keeps_its_tenants_turn_until_it_ends(
    threads: FairThreads,
):
    done: list[str] = []
    held = Held()
    first = await begin(threads, "one", held)
    first.cancel()
    await turns_of_the_loop()
    assert first.cancelled()
    again = asyncio.ensure_future(threads.run("one", lambda: done.append("again")))
    await turns_of_the_loop()
    other = asyncio.ensure_future(threads.run("other", lambda: done.append("other")))
    await turns_of_the_loop()
    held.let_go()
    await soon(asyncio.gather(again, other))
    assert done == ["other", "again"]


def _fail() -> None:
    raise ValueError("it fails")


@pytest.mark.parametrize("work", [_fail, lambda: None])
async def test_work_that_ends_gives_its_turn_on(threads: FairThreads, work: Callable[[], None]):
    first = asyncio.ensure_future(threads.run("one", work))
    assert await soon(threads.run("one", lambda: 7)) == 7
    await soon(asyncio.wait([first]))
    assert isinstance(first.exception(), ValueError | None)


class Body:
    """What work is about."""


@pytest.mark.parametrize("fails", [False, True])
async def test_of_work_that_has_ended_nothing_is_kept_until_a_collection(
    threads: FairThreads, fails: bool
):
    def begin(body: Body) -> asyncio.Future[None]:
        def work() -> None:
            if fails:
                raise ValueError(type(body).__name__)

        return asyncio.ensure_future(threads.run("one", work))

    body = Body()
    seen = weakref.ref(body)
    gc.disable()
    try:
        working = begin(body)
        await soon(asyncio.wait([working]))
        assert isinstance(working.exception(), ValueError) is fails
        del working, body
        await soon(threads.run("one", lambda: None))  # the thread has let go of the last work
        assert seen() is None
    finally:
        gc.enable()


async def test_whoever_waits_for_a_turn_when_the_threads_end_is_told():
    threads = FairThreads(1, "test")
    held = Held()
    first = await begin(threads, "one", held)
    waiting = [asyncio.ensure_future(threads.run("one", lambda: None)) for _ in range(3)]
    await turns_of_the_loop()
    held.let_go()
    threads.close()
    await soon(first)
    told = await soon(asyncio.gather(*waiting, return_exceptions=True))
    assert all(isinstance(error, RuntimeError) for error in told)
