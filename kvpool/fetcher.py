"""Fetches what this node lacks of a text from the nodes that have it, into its own slab, part by part.

    lease ── bring ──▶ directory: who has the rest?      one round trip
                       one part after the other          `kvpool.part_fetcher`

Whoever waits for a lease waits as long as it said and takes what has come by then; the rest comes all the same, for whoever asks
next. Nothing here raises: a pool of several hosts is only ever quicker.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.errors import PoolUnavailableError
from baton.ids import BlockKey
from baton.telemetry.logs import get_logger
from kvpool.neighbours import Neighbours
from kvpool.part_fetcher import PartFetcher
from kvpool.placement import Source

_MAX_FETCHES = 8

_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Fetch:
    """One text that is being fetched.

    Attributes:
        keys: Of the text.
        at: So many of them are here, or need not be fetched.
        not_soon: Set once it is known that nothing will come in the time that whoever began it waits, and when it is over.
    """

    keys: tuple[BlockKey, ...]
    at: int
    not_soon: asyncio.Event = field(default_factory=asyncio.Event)


class Fetcher:
    """For one event loop.

    Args:
        parts: Brings blocks.
        neighbours: The other nodes.
        num_slots: Of the slab.
        slot_bytes: Of each.
        fetch_bytes: That are under way at a time.
    """

    def __init__(
        self,
        parts: PartFetcher,
        neighbours: Neighbours,
        *,
        num_slots: int,
        slot_bytes: int,
        fetch_bytes: int,
    ) -> None:
        self._parts = parts
        self._neighbours = neighbours
        self._slot_bytes = slot_bytes
        self._most_blocks = max(1, num_slots // 2)
        at_once = fetch_bytes // (_MAX_FETCHES * slot_bytes)
        self._part_blocks = max(1, min(at_once, num_slots // (2 * _MAX_FETCHES)))
        self._fetches: dict[BlockKey, Fetch] = {}  # by the first block that is not here yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Texts that are being fetched."""
        return len(self._tasks)

    async def bring(self, keys: Sequence[BlockKey], held: int, wait_s: float) -> None:
        """Has the blocks of a text after the first `held` ones brought here, as far as somebody has them.

        Returns when they are here, after `wait_s`, or as soon as it is known that they cannot come in that time.
        """
        fetch = self.start(keys, held, soon_s=wait_s)
        if fetch is None:
            return
        try:
            async with asyncio.timeout(wait_s):
                await fetch.not_soon.wait()
        except TimeoutError:
            return  # what has come by now is worth having

    def start(self, keys: Sequence[BlockKey], held: int, *, soon_s: float) -> Fetch | None:
        """Begins to bring them, or finds that somebody is at it; None where too much is under way, or the node stops.

        Args:
            keys: Of the text, from its first block on.
            held: So many are here.
            soon_s: A part that is expected to take longer is not worth waiting for.
        """
        known = self._fetches.get(keys[held])
        if known is not None or self._closed or len(self._tasks) >= _MAX_FETCHES:
            return known
        fetch = self._fetches[keys[held]] = Fetch(tuple(keys), held)
        task = asyncio.create_task(self._run(fetch, soon_s), name="pool-fetch")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return fetch

    async def close(self) -> None:
        """Gives up what is under way, and begins nothing more."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, fetch: Fetch, soon_s: float) -> None:
        try:
            source = await self._neighbours.source(fetch.keys[fetch.at :])
            if source is not None:
                await self._bring_all(fetch, source, soon_s)
        except PoolUnavailableError as error:
            _log.debug("nothing is fetched: the directory is away", reason=error.message)
        finally:
            self._move(fetch, len(fetch.keys))
            fetch.not_soon.set()

    async def _bring_all(self, fetch: Fetch, source: Source, soon_s: float) -> None:
        if self._part_s(source) > soon_s:
            fetch.not_soon.set()
        end = fetch.at + min(source.num_blocks, self._most_blocks)
        while fetch.at < end:
            part = fetch.keys[fetch.at : min(fetch.at + self._part_blocks, end)]
            if not await self._parts.bring(part, fetch.at, source):
                return
            self._move(fetch, fetch.at + len(part))

    def _part_s(self, source: Source) -> float:
        """What its first part is expected to take."""
        blocks = min(self._part_blocks, source.num_blocks)
        return blocks * self._slot_bytes / self._neighbours.links.rate(source.state.node)

    def _move(self, fetch: Fetch, to: int) -> None:
        """Whoever asks for this text from now on lacks the block at `to`."""
        if fetch.at < len(fetch.keys) and self._fetches.get(fetch.keys[fetch.at]) is fetch:
            del self._fetches[fetch.keys[fetch.at]]
        fetch.at = to
        if to < len(fetch.keys):
            self._fetches.setdefault(fetch.keys[to], fetch)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("a fetch from another pool node failed", cause=error)
