"""Which workers this router is linked to: one link per address, and the way of each action to the right one."""

import asyncio
from collections.abc import Callable, Sequence

from baton.telemetry.logs import get_logger
from router.dispatch.actions import RefuseWorker, SendAction
from router.events import Heard
from router.links import LinkTiming, WorkerLink

_log = get_logger(__name__)


class Membership:
    """All links, from a fixed list of addresses; what lives behind an address tells its greeting.

    Args:
        addresses: gRPC addresses of workers, with or without a worker at the moment.
        sink: Takes the links' events, on the event loop.
        timing: How links wait.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        sink: Callable[[Heard], None],
        *,
        timing: LinkTiming | None = None,
    ) -> None:
        self.links = tuple(WorkerLink(address, sink, timing=timing) for address in addresses)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to connect, in the background."""
        self._tasks = [asyncio.create_task(link.run(), name=link.address) for link in self.links]
        for task in self._tasks:
            task.add_done_callback(_report)

    async def close(self) -> None:
        """Hangs up everywhere; workers drop what this router has there."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send(self, action: SendAction) -> None:
        """Queues a command for its worker."""
        for link in self.links:
            if link.hello is not None and link.hello.identity == action.worker:
                link.send(action)
                return

    def refuse(self, action: RefuseWorker) -> None:
        """Hangs up on a worker."""
        for link in self.links:
            if link.address == action.address:
                link.refuse(action.error)

    def healthy(self) -> bool:
        """Whether every link is still looked after."""
        return all(not task.done() for task in self._tasks)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("a link died", cause=task.exception(), address=task.get_name())
