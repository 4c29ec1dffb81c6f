"""The tasks that ask at addresses, one each, which come and go with what discovery names."""

import asyncio
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

from baton.background import report_death
from baton.clock import Clock
from baton.telemetry.logs import get_logger
from router.discovery.ports import Sighting
from router.discovery.roster import Roster

_log = get_logger(__name__)


class Asking(Protocol):
    """Asks at one address."""

    @property
    def address(self) -> str:
        """Where."""

    @property
    def connected(self) -> bool:
        """Whether somebody is there."""

    async def run(self) -> None:
        """Asks, and asks again, until cancelled."""


_Asking = TypeVar("_Asking", bound=Asking)


class AskedAddresses(Generic[_Asking]):
    """One task per address. For one event loop.

    Args:
        what: At the addresses, for logs.
        fixed: Addresses that are always asked.
        ask: Makes what asks at an address.
        clock: Monotonic.
    """

    def __init__(
        self,
        what: str,
        fixed: Collection[str],
        ask: Callable[[str], _Asking],
        clock: Clock,
    ) -> None:
        self._what = what
        self._ask = ask
        self._clock = clock
        self._roster = Roster(fixed)
        self._asking = {address: ask(address) for address in fixed}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._parting: set[asyncio.Task[None]] = set()
        self._sightings: dict[str, Sighting] = {}
        self._left_out = 0
        self._running = False

    def all(self) -> tuple[_Asking, ...]:
        """What asks now, in the order in which the addresses were named."""
        return tuple(self._asking.values())

    def sighting(self, address: str) -> Sighting | None:
        """What the last look said of `address`; None where it did not name it."""
        return self._sightings.get(address)

    def is_sighted(self, address: str) -> bool:
        """Whether the last look named `address`, or it is one that is always asked."""
        return self._roster.is_sighted(address)

    def start(self) -> None:
        """Begins to ask, in the background."""
        self._running = True
        for address in self._asking:
            self._begin(address)

    def follow(self, sightings: Collection[Sighting]) -> None:
        """These were sighted: asks at those that are new, and no more where nobody is sighted nor answers."""
        self._sightings = {one.address: one for one in sightings}
        answering = {one.address for one in self._asking.values() if one.connected}
        change = self._roster.look(self._sightings, answering, self._clock.now_s())
        for address in change.opened:
            _log.info(f"{self._what} sighted", address=address, by=self._sightings[address].source)
            self._open(address)
        for address in change.closed:
            _log.info(f"{self._what} not sighted any more", address=address)
            self.drop(address)
        if change.left_out != self._left_out:
            _log.warning(f"{self._what}s beyond the most that are asked", left_out=change.left_out)
            self._left_out = change.left_out

    def relist(self, fixed: Collection[str]) -> None:
        """These are always asked from now on, and no more those that were and are not among them."""
        change = self._roster.relist(fixed)
        for address in change.opened:
            self._open(address)
        for address in change.closed:
            _log.info(f"{self._what} not listed any more", address=address)
            self.drop(address)

    def drop(self, address: str) -> None:
        """Asks there no more until it is sighted anew."""
        self._roster.give_up(address)
        self._asking.pop(address, None)
        task = self._tasks.pop(address, None)
        if task is not None:
            self._parting.add(task)
            task.add_done_callback(self._parting.discard)
            task.cancel()

    def healthy(self) -> bool:
        """Whether all tasks run."""
        return all(not task.done() for task in self._tasks.values())

    async def close(self) -> None:
        """Asks nowhere any more."""
        self._running = False
        tasks = [*self._tasks.values(), *self._parting]
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, address: str) -> None:
        self._asking[address] = self._ask(address)
        if self._running:
            self._begin(address)

    def _begin(self, address: str) -> None:
        task = asyncio.create_task(self._asking[address].run(), name=f"{self._what} at {address}")
        report_death(task, "a link died")
        self._tasks[address] = task
