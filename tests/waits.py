"""Waits of tests end after seconds and name what did not come, not by the suite's timeout."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

WAIT_S = 30.0
"""Far more than anything takes that is waited for with it, also on a busy machine."""

_Result = TypeVar("_Result")


async def soon(awaitable: Awaitable[_Result], wait_s: float = WAIT_S) -> _Result:
    """What `awaitable` gives.

    Raises:
        TimeoutError: It does not come in `wait_s`.
    """
    async with asyncio.timeout(wait_s):
        return await awaitable


def join(thread: threading.Thread, wait_s: float = WAIT_S) -> None:
    """Waits until `thread` has ended.

    Raises:
        TimeoutError: It has not in `wait_s`.
    """
    thread.join(wait_s)
    if thread.is_alive():
        raise TimeoutError(f"thread {thread.name} goes on after {wait_s:.0f} s")


def eventually(holds: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    """Looks again and again, without a pause, until it holds; for what another process does.

    Raises:
        TimeoutError: It does not hold in `wait_s`.
    """
    until_s = time.monotonic() + wait_s
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError(f"it does not hold after {wait_s:.0f} s")
