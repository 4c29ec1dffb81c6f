"""Work that goes on beside everything else on an event loop, until whoever began it is done."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial

from baton.telemetry.logs import get_logger

_log = get_logger(__name__)


@asynccontextmanager
async def in_background(
    work: Coroutine[None, None, None], name: str, death: str
) -> AsyncIterator[None]:
    """Does `work` while inside.

    Args:
        work: Goes on until it is cancelled.
        name: Of its task.
        death: What is logged where a fault ends it before.
    """
    task = asyncio.create_task(work, name=name)
    report_death(task, death)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def report_death(task: asyncio.Task[None], death: str) -> None:
    """Has `death` logged, with the cause, where a fault ends the task."""
    task.add_done_callback(partial(_report, death))


def _report(death: str, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error(death, cause=task.exception(), work=task.get_name())
