"""Without the timer no wait ends: that it died is seen."""

import asyncio

import pytest

from baton.clock import MonotonicClock
from router.timer import PeriodicTimer
from tests.waits import soon


async def test_a_fault_that_ends_the_timer_is_logged_and_fails_its_health(
    caplog: pytest.LogCaptureFixture,
):
    ticked = asyncio.Event()

    def tick() -> None:
        ticked.set()
        raise KeyError("what went wrong")

    timer = PeriodicTimer(tick, MonotonicClock())
    timer.start()
    assert timer.healthy()
    await soon(ticked.wait())
    await soon(timer.close())
    assert not timer.healthy()
    assert "the timer of waits and deadlines died" in caplog.text
    assert "what went wrong" in caplog.text
