import asyncio
import logging
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest
import uvloop

from baton.backoff import Backoff
from baton.clock import ManualClock
from baton.errors import IncompatibleError, WorkerLostError
from baton.generation import Prompt, SamplingParams
from baton.ids import LegId, LegKind, RequestId, Role
from router.discovery.ports import Sighting
from router.dispatch.actions import RefuseWorker, SendCancel, SendLeg
from router.dispatch.events import (
    DecodeTokens,
    HandedOff,
    LoadReported,
    Prefilled,
    RoleChanged,
    StepTokens,
    WorkerJoined,
    WorkerLost,
)
from router.workers.links import LinkState, LinkTiming, WorkerLink, WorkerLinks
from tests.interpreter_steps import steps_of
from tests.kv_transfer.permits import permit
from tests.router.grpc_workers import FakeWorker, running
from tests.router.known_workers import drawn, hello
from tests.waits import WAIT_S, soon

pytestmark = pytest.mark.timeout(30)

FAST = LinkTiming(backoff=Backoff(first_s=0.01, max_s=0.05))


@asynccontextmanager
async def linked(worker, timing=FAST):
    """A link to `worker` and the queue of its events."""
    events: asyncio.Queue[Any] = asyncio.Queue()
    link = WorkerLink(worker.address, events.put_nowait, timing=timing)
    task = asyncio.create_task(link.run())
    try:
        yield link, events
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def prompt(max_tokens: int) -> Prompt:
    return Prompt(prompt_tokens=(1, 2, 3), sampling=SamplingParams(max_tokens=max_tokens))


def generate(link, max_tokens=2) -> SendLeg:
    return SendLeg(
        kind=LegKind.GENERATE,
        worker=link.hello.identity,
        leg_id=LegId(7),
        request_id=RequestId("cmpl-1"),
        prompt=prompt(max_tokens),
    )


@pytest.mark.parametrize("role", Role)
async def test_the_greeting_tells_what_a_worker_is(tmp_path, role):
    async with running(tmp_path, w=role) as workers, linked(workers["w"]) as (link, events):
        joined = await soon(events.get())
        assert joined == WorkerJoined(hello=workers["w"].hello, address=workers["w"].address)
        assert link.state is LinkState.READY


async def test_a_local_leg_streams_its_tokens_with_the_end_on_the_last(tmp_path):
    async with running(tmp_path, w=Role.HYBRID) as workers, linked(workers["w"]) as (link, events):
        await soon(events.get())
        link.send(generate(link))
        assert isinstance(await soon(events.get()), Prefilled)
        first, last = await soon(events.get()), await soon(events.get())
        assert isinstance(first, StepTokens)
        assert (first.leg_ids, first.samples, first.tokens) == (
            [7],
            [0],
            [drawn(0, 0, 2).token],
        )
        assert isinstance(last, DecodeTokens)
        assert last.tokens == (drawn(0, 1, 2),)


async def test_a_prefill_leg_brings_first_tokens_then_the_hand_off_then_the_load(tmp_path):
    async with (
        running(tmp_path, p=Role.PREFILL, d=Role.DECODE) as workers,
        linked(workers["p"]) as (link, events),
    ):
        await soon(events.get())
        link.send(
            SendLeg(
                kind=LegKind.PREFILL,
                worker=link.hello.identity,
                leg_id=LegId(7),
                request_id=RequestId("cmpl-1"),
                prompt=prompt(2),
                permit=permit(source=link.hello.identity, target=workers["d"].hello.identity),
                transfer_address=workers["d"].hello.transfer_address,
            )
        )
        first, done, load = [await soon(events.get()) for _ in range(3)]
        assert isinstance(first, Prefilled)
        assert (first.first_tokens, first.cached_tokens) == ((drawn(0, 0, 2),), 3)
        assert isinstance(done, HandedOff)
        assert isinstance(load, LoadReported)


async def test_a_cancel_reaches_the_worker(tmp_path):
    async with running(tmp_path, w=Role.HYBRID) as workers, linked(workers["w"]) as (link, events):
        await soon(events.get())
        link.send(SendCancel(worker=link.hello.identity, leg_id=LegId(9)))
        assert await soon(workers["w"].cancelled.get()) == 9


async def test_a_killed_worker_is_lost_and_its_next_start_is_another_worker(tmp_path):
    async with running(tmp_path, w=Role.HYBRID) as workers, linked(workers["w"]) as (_, events):
        before = (await soon(events.get())).hello.identity
        await workers["w"].restart()
        lost, joined = await soon(events.get()), await soon(events.get())
        assert isinstance(lost, WorkerLost)
        assert lost.worker == before
        assert joined.hello.identity.incarnation == 2


async def test_commands_for_an_incarnation_that_is_gone_are_dropped(tmp_path):
    async with running(tmp_path, w=Role.HYBRID) as workers, linked(workers["w"]) as (link, events):
        await soon(events.get())
        command = generate(link)
        await workers["w"].restart()
        await soon(events.get())
        await soon(events.get())
        link.send(command)
        link.send(generate(link))
        await soon(events.get())
        assert len(workers["w"].started) == 1


async def test_a_worker_of_another_protocol_is_not_taken_until_it_speaks_ours(tmp_path):
    async with running(tmp_path) as workers:
        changes = {"protocol_version": 99}
        await FakeWorker("w", Role.DECODE, tmp_path, workers, changes=changes).start()
        async with linked(workers["w"]) as (_, events):
            await soon(workers["w"].hung_up.wait())
            assert events.empty()
            workers["w"].changes = {}
            assert isinstance(await soon(events.get()), WorkerJoined)


async def test_a_worker_that_changes_its_role_stays_the_worker_that_it_is(tmp_path):
    async with running(tmp_path, w=Role.HYBRID) as workers, linked(workers["w"]) as (link, events):
        identity = (await soon(events.get())).hello.identity
        workers["w"].greet_again(role=Role.DECODE)
        assert await soon(events.get()) == RoleChanged(worker=identity, role=Role.DECODE)
        assert link.hello.role is Role.DECODE
        link.send(generate(link))
        assert isinstance(await soon(events.get()), Prefilled)


async def test_a_worker_that_becomes_another_one_in_mid_stream_is_hung_up_on(tmp_path):
    async with running(tmp_path, w=Role.HYBRID) as workers, linked(workers["w"]) as (_, events):
        await soon(events.get())
        workers["w"].greet_again(vocab_size=7)
        assert isinstance(await soon(events.get()), WorkerLost)
        assert isinstance(await soon(events.get()), WorkerJoined)


async def test_failed_attempts_leave_no_task_behind(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, logger="router.workers.links")
    absent = FakeWorker("w", Role.DECODE, tmp_path, {})
    async with linked(absent):
        async with asyncio.timeout(WAIT_S):
            while sum(record.message == "no worker" for record in caplog.records) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the log has no event to wait for
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_worker_that_does_not_read_its_commands_is_hung_up_on_each_time(tmp_path, new_loop):
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_hung_up_on(tmp_path, times=10))


async def _hung_up_on(directory, *, times):
    timing = LinkTiming(backoff=Backoff(first_s=0.01, max_s=0.05), write_timeout_s=0.1, grace_s=0.0)
    long = Prompt(prompt_tokens=(7,) * 100_000, sampling=SamplingParams(max_tokens=2))
    async with running(directory, w=Role.HYBRID) as workers:
        workers["w"].reads.clear()
        async with linked(workers["w"], timing) as (link, events):
            for _ in range(times):
                assert isinstance(await _first(events, WorkerJoined), WorkerJoined)
                for _ in range(20):  # more than gRPC takes unread
                    link.send(replace(generate(link), prompt=long))
                lost = await _first(events, WorkerLost)
                assert lost.reason == "worker w@1 does not read its commands"


async def test_a_pause_of_the_router_is_not_taken_for_one_of_the_worker(tmp_path):
    timing = LinkTiming(write_timeout_s=0.1, grace_s=WAIT_S)
    long = Prompt(prompt_tokens=(7,) * 100_000, sampling=SamplingParams(max_tokens=2))
    async with running(tmp_path, w=Role.HYBRID) as workers:
        workers["w"].reads.clear()
        async with linked(workers["w"], timing) as (link, events):
            await _first(events, WorkerJoined)
            for _ in range(20):  # more than gRPC takes unread
                link.send(replace(generate(link), prompt=long))
            await asyncio.sleep(0)
            workers["w"].reads.set()
            time.sleep(0.3)  # noqa: ASYNC251  # nothing runs in this process
            link.send(SendCancel(worker=link.hello.identity, leg_id=LegId(77)))
            assert await soon(workers["w"].cancelled.get()) == 77
            while not events.empty():
                assert not isinstance(events.get_nowait(), WorkerLost)


async def test_a_worker_is_sent_any_number_of_commands_at_once(tmp_path):
    async with running(tmp_path, w=Role.HYBRID) as workers, linked(workers["w"]) as (link, events):
        await soon(events.get())
        for number in range(10_000):  # nothing is written before the loop runs
            link.send(SendCancel(worker=link.hello.identity, leg_id=LegId(number)))
        assert [await soon(workers["w"].cancelled.get()) for _ in range(10_000)] == [*range(10_000)]
        assert events.empty()


async def _first(events, kind):
    while True:
        event = await soon(events.get())
        if isinstance(event, kind):
            return event


@asynccontextmanager
async def following(sink=None):
    """Links to what a test says was sighted, and the queue of their events."""
    events: asyncio.Queue[Any] = asyncio.Queue()
    clock = ManualClock()
    links = WorkerLinks([], sink or events.put_nowait, timing=FAST, clock=clock)
    links.start()
    try:
        yield links, events, clock
    finally:
        await links.close()


def sighted(*workers) -> list[Sighting]:
    return [Sighting(address=worker.address, source="test") for worker in workers]


async def test_a_worker_that_is_sighted_joins_and_its_sighting_is_known(tmp_path):
    async with running(tmp_path, w=Role.HYBRID) as workers, following() as (links, events, _):
        assert links.links == ()
        links.follow(sighted(workers["w"]))
        assert isinstance(await soon(events.get()), WorkerJoined)
        assert links.sighting(workers["w"].address) == sighted(workers["w"])[0]
        assert links.healthy()


async def test_a_worker_that_answers_stays_although_nothing_names_it_any_more(tmp_path):
    async with running(tmp_path, w=Role.HYBRID) as workers, following() as (links, events, clock):
        links.follow(sighted(workers["w"]))
        await soon(events.get())
        clock.advance(1000.0)
        links.follow([])
        assert [link.state for link in links.links] == [LinkState.READY]
        await workers["w"].kill()
        assert isinstance(await soon(events.get()), WorkerLost)
        clock.advance(1000.0)
        links.follow([])
        assert links.links == ()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_worker_that_moved_is_left_where_it_was_and_joins_where_it_is(tmp_path):
    async with running(tmp_path, w=Role.HYBRID) as workers, following() as (links, events, _):
        here = workers["w"]
        there = FakeWorker("w", Role.HYBRID, tmp_path / "there", {})
        there.directory.mkdir()
        await there.start()  # the same start of it, reached by another way
        links.follow(sighted(here))
        before = await soon(events.get())
        links.follow(sighted(there))
        lost, joined = await soon(events.get()), await soon(events.get())
        assert isinstance(lost, WorkerLost)
        assert lost.worker == before.hello.identity
        assert (joined.hello.identity, joined.address) == (lost.worker, there.address)
        assert [link.address for link in links.links] == [there.address]
        await there.kill()
        links.follow(sighted(here))
        assert [await soon(events.get()) for _ in range(2)] == [
            WorkerLost(worker=lost.worker, reason=ANY),
            before,
        ]


async def test_a_worker_whose_name_is_anothers_now_is_left_and_asked_again(tmp_path):
    async with running(tmp_path, w=Role.HYBRID) as workers, following() as (links, events, _):
        links.follow(sighted(workers["w"]))
        joined = await soon(events.get())
        error = WorkerLostError("w was started anew elsewhere")
        links.refuse(RefuseWorker(address=workers["w"].address, error=error))
        assert (
            await soon(events.get()) == joined
        )  # and no word that it was lost: the dispatcher knows
        assert links.refusals.total() == 0


async def test_a_worker_that_is_refused_is_told_of_once_and_counted_each_time(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="router.workers.links")
    async with running(tmp_path, w=Role.HYBRID) as workers:
        error = IncompatibleError("model_fingerprint: w holds model b, v holds a")

        def refuse(event: Any) -> None:
            if isinstance(event, WorkerJoined):
                links.refuse(RefuseWorker(address=event.address, error=error))

        async with following(refuse) as (links, _, _):
            links.follow(sighted(workers["w"]))
            async with asyncio.timeout(WAIT_S):
                while links.refusals["model_fingerprint"] < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # a count has no event to wait for
            (link,) = links.links
            assert link.reason == error.message
        told = [record.message for record in caplog.records]
        assert told.count("worker cannot be used") == 1
        assert "worker joined" not in told


def connected(workers: int) -> WorkerLinks:
    """Links at which as many workers have greeted."""
    links = WorkerLinks([f"10.0.0.1:{7000 + number}" for number in range(workers)], lambda _: None)
    for number, link in enumerate(links.links):
        link.hello = hello(f"w{number}", Role.DECODE)
    return links


def cancel(worker_id: str, incarnation: int = 1) -> SendCancel:
    identity = hello(worker_id, Role.DECODE, incarnation=incarnation).identity
    return SendCancel(worker=identity, leg_id=LegId(5))


async def test_a_command_costs_the_same_however_many_workers_there_are():
    def sending(workers: int) -> int:
        links, command = connected(workers), cancel(f"w{workers - 1}")
        links.send(command)
        return steps_of(lambda: links.send(command))

    assert sending(200) == sending(2)


async def test_commands_find_a_worker_wherever_it_is_connected_now(monkeypatch):
    links, sent = connected(3), []
    monkeypatch.setattr(WorkerLink, "send", lambda link, action: sent.append((link, action)))
    first, second, third = links.links
    commands = [cancel("w0"), cancel("w0"), cancel("w0", incarnation=2), cancel("w2")]
    links.send(commands[0])
    first.hello, second.hello = second.hello, first.hello
    links.send(commands[1])
    second.hello = hello("w0", Role.DECODE, incarnation=2)
    links.send(cancel("w0"))
    links.send(commands[2])
    links.send(commands[3])
    targets = [first, second, second, third]
    assert sent == list(zip(targets, commands, strict=True))
