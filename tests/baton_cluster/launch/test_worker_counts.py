import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from baton.config.schema import BatonConfig
from baton.errors import InvalidRequestError, UnavailableError
from baton.ids import Incarnation
from baton_cluster.launch import worker_counts
from baton_cluster.launch.assignment import Assignment, Part
from baton_cluster.launch.child import Child
from baton_cluster.launch.lifeline import ChildEnd, LauncherEnd, ScaleRequest, WorkersChanged
from baton_cluster.launch.worker_counts import LauncherCounts
from tests.waits import soon

BEFORE = {"prefill": 1, "decode": 1, "hybrid": 0}
AFTER = {"prefill": 1, "decode": 3, "hybrid": 0}


@asynccontextmanager
async def both_ends() -> AsyncIterator[tuple[LauncherEnd, LauncherCounts]]:
    """A launcher's end of a lifeline, and what a router makes of the other one."""
    ours, theirs = socket.socketpair()
    with theirs:
        launcher, end = await LauncherEnd.open(ours), ChildEnd(theirs)
        part = Part(name="router", incarnation=Incarnation(1), lock_fd=-1, pools=BEFORE)
        await launcher.assign(Assignment(config=BatonConfig(), part=part))
        child = Child(await asyncio.to_thread(end.receive), end)
        assert child.assignment.part.pools == BEFORE
        counts, loop = LauncherCounts(child, BEFORE), asyncio.get_running_loop()
        gone = asyncio.Event()

        def told(news: WorkersChanged) -> None:
            assert child.on_workers is not None
            loop.call_soon_threadsafe(child.on_workers, news)

        def launcher_gone() -> None:
            loop.call_soon_threadsafe(gone.set)

        end.watch(launcher_gone, told)
        yield launcher, counts
        await launcher.close()
        await soon(gone.wait())


async def asked(launcher: LauncherEnd) -> ScaleRequest:
    status = await soon(launcher.status())
    assert isinstance(status, ScaleRequest)
    return status


async def test_what_is_asked_reaches_the_launcher_and_its_answer_comes_back():
    async with both_ends() as (launcher, counts):
        scaling = asyncio.create_task(counts.scale({"decode": 3}, by="kim"))
        request = await asked(launcher)
        assert (request.pools, request.by) == ({"decode": 3}, "kim")
        launcher.tell(WorkersChanged(addresses=("a",), pools=BEFORE))  # of something else
        answer = WorkersChanged(addresses=("a", "b"), pools=AFTER, answers=request.number)
        launcher.tell(answer)
        assert await soon(scaling) == AFTER
        assert counts.pools() == AFTER


async def test_a_refusal_is_raised_with_its_reason():
    async with both_ends() as (launcher, counts):
        scaling = asyncio.create_task(counts.scale({"decode": 99}, by="kim"))
        number = (await asked(launcher)).number
        refused = WorkersChanged(addresses=(), pools=BEFORE, answers=number, refusal="too many")
        launcher.tell(refused)
        with pytest.raises(InvalidRequestError, match="too many"):
            await soon(scaling)


async def test_words_that_are_no_status_or_too_long_cost_a_launcher_only_themselves():
    ours, theirs = socket.socketpair()
    launcher = await LauncherEnd.open(ours)
    request = msgspec.json.encode(ScaleRequest(number=1, pools=AFTER, by="kim"))
    said = b"\n".join((b"x" * 300_000, b"x" * 70_000, b"{}", request, b""))
    with theirs:
        sending = asyncio.create_task(asyncio.to_thread(theirs.sendall, said))
        assert (await asked(launcher)).by == "kim"
        await soon(sending)
    assert await soon(launcher.status()) is None
    await launcher.close()


async def test_a_launcher_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(worker_counts, "_ANSWER_WAIT_S", 0.01)
    async with both_ends() as (_, counts):
        with pytest.raises(UnavailableError, match="does not answer"):
            await soon(counts.scale({"decode": 3}, by="kim"))


async def test_addresses_that_were_told_before_anybody_followed_are_not_lost():
    async with both_ends() as (launcher, counts):
        scaling = asyncio.create_task(counts.scale({"decode": 3}, by="kim"))
        number = (await asked(launcher)).number
        launcher.tell(WorkersChanged(addresses=("a", "b"), pools=AFTER, answers=number))
        await soon(scaling)
        heard: list[tuple[str, ...]] = []
        counts.follow(lambda addresses: heard.append(tuple(addresses)))
        assert heard == [("a", "b")]
