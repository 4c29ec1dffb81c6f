"""The router's periodic timer: without its ticks no wait would end and no deadline pass."""

import asyncio
from collections.abc import Callable

from baton.background import report_death
from baton.clock import Clock

_TICK_S = 0.05
_MAX_LATE_S = 5.0


class PeriodicTimer:
    """Calls `tick` a few times a second. For one event loop.

    Args:
        tick: Called on the event loop.
        clock: Monotonic.
    """

    def __init__(self, tick: Callable[[], None], clock: Clock) -> None:
        self._tick = tick
        self._clock = clock
        self._ticked_s = clock.now_s()
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins in the background."""
        self._ticking = asyncio.create_task(self._run(), name="router-timer")
        report_death(self._ticking, "the timer of waits and deadlines died")

    async def close(self) -> None:
        """Ends it; a fault of `tick` is not raised again."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)

    def healthy(self) -> bool:
        """Whether it runs and is not late."""
        if self._ticking is None or self._ticking.done():
            return False
        return self._clock.now_s() - self._ticked_s < _MAX_LATE_S

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._ticked_s = self._clock.now_s()
            self._tick()
