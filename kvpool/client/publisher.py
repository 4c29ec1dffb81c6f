"""Puts a worker's full pages into the pool, in the background: batch by batch from the queue that the engine fills.

    reserve slots ─▶ copy pages there, in a thread ─▶ commit what was not handed out again meanwhile

No request waits for it. What goes wrong costs the pool a few blocks, and nothing else.

The engine goes on meanwhile and holds nothing back: a page may be handed out again while it is copied. Its generation,
read after the copy, tells; what was copied then is not what its key says and is never committed.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from baton.clock import Clock
from baton.errors import PoolUnavailableError, TransferError
from baton.ids import BlockId
from baton.pages import PublishedPage
from baton.rpc.mailbox import Mailbox
from baton.telemetry.logs import get_logger
from kv_transfer.memory.pages import Pages
from kv_transfer.plan import check_pages
from kvpool.client.arena_pages import check_layers, turns
from kvpool.client.metrics import PoolMetrics, Unpublished
from kvpool.hashed_copy import Hashes
from kvpool.messages import Owner, PutGrant, PutRefused
from kvpool.ports import ArenaPages, PoolClient

Generation = Callable[[BlockId], int]

_BATCH_BLOCKS = 16
"""Few enough that a page is copied soon after it was taken, and that a batch never holds on to a core for long."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One page with the slot that was reserved for it.

    Attributes:
        page: What is copied.
        slot: Where to.
    """

    page: PublishedPage
    slot: int


class PublishQueue:
    """A `baton_engine.ports.BlockSink` that forgets the oldest pages when there are too many: they are the ones most
    likely to have been handed out again. Pages themselves are not held; see `PublishedPage.generation`.

    Offered to by one thread, taken from by another.

    Args:
        capacity: Pages that may wait.
        wake: Called after each offer, on the engine's thread; must not block.
    """

    def __init__(self, capacity: int, wake: Callable[[], None]) -> None:
        self._pages: deque[PublishedPage] = deque(maxlen=capacity)
        self._wake = wake
        self._lock = threading.Lock()
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def dropped(self) -> int:
        """Pages that were forgotten so far."""
        return self._dropped

    def put(self, pages: Sequence[PublishedPage]) -> None:
        """See BlockSink."""
        with self._lock:
            room = (self._pages.maxlen or 0) - len(self._pages)
            self._dropped += max(0, len(pages) - room)
            self._pages.extend(pages)
        self._wake()

    def clear(self) -> int:
        """Forgets every page that waits. Returns how many these were."""
        with self._lock:
            num_pages = len(self._pages)
            self._dropped += num_pages
            self._pages.clear()
        return num_pages

    def take(self, most: int) -> list[PublishedPage]:
        """The oldest pages of one owner, in order; empty when none wait."""
        taken: list[PublishedPage] = []
        with self._lock:
            while self._pages and len(taken) < most:
                if taken and _owner(self._pages[0]) != _owner(taken[0]):
                    break
                taken.append(self._pages.popleft())
        return taken


class PoolWriter:
    """Copies full pages to reserved slots. Blocks; for a thread that no request waits for. Not thread-safe:
    one writer at a time.

    Args:
        arena: Where pages lie.
        generation: How often a page has been handed out; see `BlockManager.generation`.
    """

    def __init__(self, arena: ArenaPages, generation: Generation) -> None:
        self._arena = arena
        self._generation = generation

    def write(self, places: Sequence[Placed], slab: Sequence[Pages]) -> list[bytes]:
        """Copies each page to its slot.

        Args:
            places: Pages and slots.
            slab: One array `[num_slots, page_layer_bytes]` per layer.

        Returns:
            Per slot the block's checksums as `HeldBlock` has them, or nothing where the page was handed out again: such
            a slot holds no block and must not be committed.

        Raises:
            TransferError: A slot lies outside the slab, or its blocks have another number of layers;
                nothing was written.
        """
        check_layers(slab, self._arena)
        check_pages(tuple(BlockId(placed.slot) for placed in places), len(slab[0]))
        fresh = [place for place, placed in enumerate(places) if self._is_unchanged(placed)]
        sums = self._copy([places[place] for place in fresh], slab)
        raw, size = sums.astype("<u8").tobytes(), 8 * len(slab)
        written = [b""] * len(places)
        for row, place in enumerate(fresh):
            if self._is_unchanged(places[place]):
                written[place] = raw[row * size : (row + 1) * size]
        return written

    def _copy(self, places: Sequence[Placed], slab: Sequence[Pages]) -> Hashes:
        """Checksums `[num_places, num_layers]`."""
        pages = np.array([placed.page.block for placed in places], dtype=np.int64)
        slots = np.array([placed.slot for placed in places], dtype=np.int64)
        sums = np.zeros((len(places), len(slab)), dtype=np.uint64)
        for layer_index, rows in enumerate(slab):
            for turn in turns(len(places), rows.shape[1]):
                hashes = self._arena.copy_out(layer_index, pages[turn], rows, slots[turn])
                sums[turn, layer_index] = hashes
        return sums

    def _is_unchanged(self, placed: Placed) -> bool:
        return self._generation(placed.page.block) == placed.page.generation


class Publisher:
    """At most one batch is under way. Belongs to one event loop, except for the queue.

    Args:
        client: The way to the node.
        writer: Copies.
        capacity: Pages that may wait; the oldest are dropped.
        model: Fingerprint of the model; blocks are flushed by it.
        put_timeout_s: When the node gives a put up.
        clock: Monotonic.
        metrics: Counts.

    Attributes:
        queue: Where the engine leaves its pages (`baton_engine.ports.BlockSink`).
    """

    def __init__(
        self,
        client: PoolClient,
        writer: PoolWriter,
        *,
        capacity: int,
        model: str,
        put_timeout_s: float,
        clock: Clock,
        metrics: PoolMetrics,
    ) -> None:
        self._client = client
        self._writer = writer
        self._model = model
        self._give_up_s = put_timeout_s / 2
        self._clock = clock
        self._metrics = metrics
        self._slab: Sequence[Pages] | None = None
        self._mailbox: Mailbox[None] | None = None
        self._woken, self._idle = asyncio.Event(), asyncio.Event()
        self._is_busy = False
        self._turn = asyncio.Lock()
        self._dropped_told = 0
        self._running: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[list[bytes]] | None = None
        self.queue = PublishQueue(capacity, self._wake)

    def start(self) -> None:
        """Publishes from now on, on the running loop."""
        self._mailbox = Mailbox(asyncio.get_running_loop(), lambda _: self._woken.set())
        self._running = asyncio.create_task(self._run(), name="pool-publisher")

    def connect(self, slab: Sequence[Pages] | None) -> None:
        """The node's slab; with None there is no node, and what waits is dropped."""
        self._slab = slab
        if slab is None:
            cleared = self.queue.clear()
            self._dropped_told += cleared
            self._metrics.unpublished(Unpublished.AWAY, cleared)

    async def idle(self) -> None:
        """Waits until no page waits or is on its way."""
        while self.queue or self._is_busy:
            self._idle.clear()
            await self._idle.wait()

    async def put_now(self, pages: Sequence[PublishedPage]) -> None:
        """Puts a text's leading pages ahead of all that waits. What goes wrong is counted as for any page."""
        for first in range(0, len(pages), _BATCH_BLOCKS):
            await self._publish_or_drop(pages[first : first + _BATCH_BLOCKS])

    async def close(self) -> None:
        """Drops what waits; waits until nothing is copied any more."""
        if self._mailbox is not None:
            self._mailbox.close()
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        if self._writing is not None:
            await asyncio.wait([self._writing])

    def _wake(self) -> None:
        if self._mailbox is not None:
            self._mailbox.post(None)

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            self._is_busy = True
            while pages := self.queue.take(_BATCH_BLOCKS):
                for run in _runs(pages):
                    await self._publish_or_drop(run)
                await asyncio.sleep(0)
            self._is_busy = False
            self._idle.set()
            self._tell_overflow()

    async def _publish_or_drop(self, pages: Sequence[PublishedPage]) -> None:
        try:
            async with (
                self._turn
            ):  # first come, first served: an urgent text waits for one batch at most
                await self._publish(pages)
        except Exception as error:  # noqa: BLE001  # one bad batch must not end publishing for good
            _log.error("a batch of blocks was dropped", cause=error)
            self._metrics.unpublished(Unpublished.FAILED, len(pages))

    def _tell_overflow(self) -> None:
        dropped = self.queue.dropped
        self._metrics.unpublished(Unpublished.OVERFLOW, dropped - self._dropped_told)
        self._dropped_told = dropped

    async def _publish(self, pages: Sequence[PublishedPage]) -> None:
        begun_s, slab = self._clock.now_s(), self._slab
        if slab is None:
            self._metrics.unpublished(Unpublished.AWAY, len(pages))
            return
        try:
            num_blocks = await self._put(pages, slab)
        except (PoolUnavailableError, TransferError, TimeoutError) as error:
            _log.debug("blocks were not published", cause=str(error))
            self._metrics.node_failed()
            self._metrics.unpublished(Unpublished.FAILED, len(pages))
            return
        self._metrics.published(num_blocks, self._clock.now_s() - begun_s)

    async def _put(self, pages: Sequence[PublishedPage], slab: Sequence[Pages]) -> int:
        """Returns how many blocks the pool has now that it had not.

        Raises:
            PoolUnavailableError: The node is away.
            TransferError: The places do not fit the slab.
            TimeoutError: The node took too long.
        """
        first = pages[0]
        owner = Owner(tenant=first.tenant or first.scope, scope=first.scope, model=self._model)
        # The node gives the places to others after `put_timeout_s`: by then nothing may be written there any more.
        async with asyncio.timeout(self._give_up_s):
            grant = await self._client.reserve([page.key for page in pages], owner, first.index)
        if isinstance(grant, PutRefused):
            self._metrics.unpublished(Unpublished.REFUSED, len(pages))
            return 0
        if not grant.items:
            return 0
        checksums = await self._write(grant, pages, slab)
        async with asyncio.timeout(self._give_up_s):
            return await self._client.commit(grant.put_id, checksums)

    async def _write(
        self, grant: PutGrant, pages: Sequence[PublishedPage], slab: Sequence[Pages]
    ) -> list[bytes]:
        """Checksums as `PoolClient.commit` takes them; a place without is given back by that."""
        if self._slab is not slab:
            raise PoolUnavailableError("the node went while places were reserved")
        by_key = {page.key: page for page in pages}
        places = [Placed(page=by_key[item.key], slot=item.slot) for item in grant.items]
        latest_s = self._clock.now_s() + self._give_up_s
        self._writing = asyncio.create_task(
            asyncio.to_thread(self._write_by, latest_s, places, slab), name="pool-write"
        )
        try:
            checksums = await asyncio.shield(self._writing)
        except TransferError as error:
            _log.warning("blocks could not be copied into the pool", cause=str(error))
            self._metrics.unpublished(Unpublished.FAILED, len(places))
            return [b""] * len(places)
        self._metrics.unpublished(Unpublished.OVERWRITTEN, checksums.count(b""))
        return checksums

    def _write_by(
        self, latest_s: float, places: Sequence[Placed], slab: Sequence[Pages]
    ) -> list[bytes]:
        if self._clock.now_s() > latest_s:  # no thread was free for so long
            return [b""] * len(places)
        return self._writer.write(places, slab)


def _runs(pages: Sequence[PublishedPage]) -> Iterator[list[PublishedPage]]:
    """Splits pages where a block does not follow the one before it."""
    run: list[PublishedPage] = []
    for page in pages:
        if run and page.index != run[-1].index + 1:
            yield run
            run = []
        run.append(page)
    if run:
        yield run


def _owner(page: PublishedPage) -> tuple[str, str]:
    return page.tenant, page.scope
