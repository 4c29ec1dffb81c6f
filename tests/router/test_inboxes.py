import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.errors import OverloadedError
from baton.generation import FinishReason, TokenSample, plain_token
from baton.ids import RequestId
from router.dispatch.actions import Emit
from router.dispatch.dispatcher import Advance
from router.inboxes import EventGap, Inboxes
from router.ports import Tokens
from tests.waits import soon

A, B = RequestId("a"), RequestId("b")


def _step(*rows: tuple[RequestId, int]) -> Advance:
    return Advance(
        request_ids=[row[0] for row in rows],
        samples=[0] * len(rows),
        tokens=[row[1] for row in rows],
        others=[],
    )


def _tokens(*tokens: int, put_s: tuple[float, ...] | None = None) -> Tokens:
    samples = tuple(plain_token(0, token) for token in tokens)
    return Tokens(samples=samples, put_s=put_s or (0.0,) * len(tokens))


async def _waiting(reading: asyncio.Task[object]) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return not reading.done()


async def test_a_step_reaches_every_reader_that_was_not_woken_a_moment_ago():
    inboxes = Inboxes(max_bytes=1 << 20, clock=ManualClock(), gap=EventGap(60.0))
    readers = [asyncio.create_task(inboxes.open(name).next()) for name in (A, B)]
    await asyncio.sleep(0)
    assert inboxes.put_step(_step((A, 1), (B, 2)), 0.0) == []
    assert await asyncio.gather(*readers) == [_tokens(1), _tokens(2)]


async def test_what_follows_at_once_waits_for_the_gap_and_comes_together():
    clock = ManualClock()
    inboxes = Inboxes(max_bytes=1 << 20, clock=clock, gap=EventGap(0.001))
    inbox = inboxes.open(A)
    inboxes.put_step(_step((A, 1)), clock.now_s())
    assert await soon(inbox.next()) == _tokens(1)
    reading = asyncio.create_task(inbox.next())
    await asyncio.sleep(0)
    inboxes.put_step(_step((A, 2)), clock.now_s())
    inboxes.put_step(_step((A, 3)), clock.now_s())
    assert await _waiting(reading)
    clock.advance(0.001)
    assert await reading == _tokens(2, 3)


async def test_an_end_never_waits_for_the_gap():
    inboxes = Inboxes(max_bytes=1 << 20, clock=ManualClock(), gap=EventGap(60.0))
    inbox = inboxes.open(A)
    inboxes.put_step(_step((A, 1)), 0.0)
    await soon(inbox.next())
    inboxes.put_step(_step((A, 2)), 0.0)
    last = TokenSample(sample=0, token=3, finish=FinishReason.STOP)
    inboxes.put(Emit(request_id=A, tokens=(last,)))
    assert await soon(inbox.next()) == Tokens(samples=(plain_token(0, 2), last), put_s=(0.0, 0.0))
    inboxes.end(A, OverloadedError("enough"))
    with pytest.raises(OverloadedError):
        await soon(inbox.next())


async def test_a_reader_that_comes_late_is_told_when_each_token_was_there():
    clock = ManualClock()
    inboxes = Inboxes(max_bytes=1 << 20, clock=clock)
    inbox = inboxes.open(A)
    clock.advance(1.0)
    inboxes.put_step(_step((A, 1)), clock.now_s())
    clock.advance(1.0)
    inboxes.put(Emit(request_id=A, tokens=(plain_token(0, 2), plain_token(0, 3))))
    clock.advance(10.0)
    assert await soon(inbox.next()) == _tokens(1, 2, 3, put_s=(1.0, 2.0, 2.0))


async def test_readers_that_leave_too_much_unread_are_named():
    inboxes = Inboxes(max_bytes=300, clock=ManualClock())
    inboxes.open(A)
    inboxes.open(B)
    assert inboxes.put_step(_step((A, 1), (A, 2), (B, 3)), 0.0) == []
    assert inboxes.put_step(_step((A, 3)), 0.0) == [A]


async def test_tokens_of_a_job_whose_client_has_left_go_nowhere():
    inboxes = Inboxes(max_bytes=300, clock=ManualClock())
    inboxes.open(A)
    inboxes.close(A)
    assert inboxes.put_step(_step((A, 1)), 0.0) == []
    assert inboxes.put(Emit(request_id=A, tokens=(plain_token(0, 1),)))


def work(gap: EventGap, share: float, seconds: float, from_s: float) -> float:
    """The loop is busy for `share` of every 10 ms; returns when that ended."""
    now_s = from_s
    while now_s < from_s + seconds:
        gap.worked(now_s, now_s + 0.01 * share)
        now_s += 0.01
    return now_s


def test_the_gap_of_a_router_that_keeps_up_stays_as_it_is():
    gap = EventGap(0.004, 0.05)
    work(gap, 0.4, 5.0, 100.0)
    assert gap.gap_s == 0.004


def test_the_gap_widens_while_the_loop_is_busy_and_narrows_once_it_is_calm():
    gap = EventGap(0.004, 0.05)
    now_s = work(gap, 0.95, 0.4, 100.0)
    assert gap.gap_s > 0.004
    now_s = work(gap, 0.95, 5.0, now_s)
    assert gap.gap_s == 0.05
    now_s = work(gap, 0.4, 5.0, now_s)
    assert gap.gap_s == 0.05, "between the two bounds it stays"
    work(gap, 0.1, 5.0, now_s)
    assert gap.gap_s == 0.004


def test_a_long_pause_counts_as_calm():
    gap = EventGap(0.004, 0.05)
    now_s = work(gap, 0.95, 0.25, 100.0)
    wide_s = gap.gap_s
    gap.worked(now_s + 60.0, now_s + 60.2)
    assert gap.gap_s < wide_s


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), max_size=200))
def test_the_gap_stays_within_its_bounds(turns):
    gap, now_s = EventGap(0.004, 0.05), 0.0
    for idle_s, busy_s in turns:
        gap.worked(now_s + idle_s, now_s + idle_s + busy_s)
        now_s += idle_s + busy_s
        assert 0.004 <= gap.gap_s <= 0.05


async def test_of_many_tokens_that_wait_some_are_taken_and_the_loop_runs_before_the_rest():
    inboxes = Inboxes(max_bytes=1 << 30, clock=ManualClock())
    inbox = inboxes.open(A)
    inboxes.put_step(_step(*((A, token) for token in range(2000))), 0.0)
    taken: list[int] = []
    turns: list[int] = []

    async def others() -> None:
        while True:
            turns.append(len(taken))
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    while len(taken) < 2000:
        event = await inbox.next()
        assert isinstance(event, Tokens)
        assert len(event.samples) == len(event.put_s) <= 256
        taken += [sample.token for sample in event.samples]
    running.cancel()
    assert taken == list(range(2000))
    assert len(set(turns)) >= 2000 // 256
