"""Fetches what this node lacks of a text from the nodes that have it, into its own slab, part by part.

    lease ── bring ──▶ directory: which nodes have the rest?      one round trip
                       one part after the other          `kvpool.peers.fetcher`

A lease waits as long as its reader said and takes what has come by then; the rest comes all the same, for the next
reader. Nothing here raises: a pool of several hosts is only ever quicker.

A holder that stands still may write for as long as it has access. A fetch does not wait for that: it ends, and the part
is *overdue*, its blocks forgotten and its slots out of use, until the holder has stopped.
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.errors import (
    BatonError,
    CorruptKvError,
    DeadlineError,
    PoolUnavailableError,
    TransferError,
)
from baton.ids import BlockId, BlockKey, XferId
from baton.rpc.v1 import pool_pb2 as pb
from baton.telemetry.logs import get_logger
from kv_transfer.plan import Grant
from kv_transfer.session.handshake import SessionEndpoint
from kv_transfer.ticket import Permit, shown
from kvpool.convert import IncomingBlocks, incoming_from_proto, keys_to_bytes
from kvpool.messages import Owner, PutGrant
from kvpool.node.storage import NodeStorage
from kvpool.peers.peer_table import PeerTable
from kvpool.peers.placement import Source
from kvpool.peers.receiver import Landed, PeerReceiver

_MAX_FETCHES = 8

_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Fetch:
    """One text that is being fetched.

    Attributes:
        keys: Of the text.
        at: So many of them are here, or need not be fetched.
        only_cold: Nothing that was read of late is evicted for them: another node's readers want them.
        not_soon: Set once it is known that nothing will come in the time that its first reader waits,
            and when it is over.
    """

    keys: tuple[BlockKey, ...]
    at: int
    only_cold: bool
    not_soon: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Blocks of one transfer, and where they go."""

    keys: list[BlockKey]
    slots: list[int]


class PartFetcher:
    """For one event loop.

    Args:
        here: This node, with the office that signs.
        address: Where holders open sessions to write here.
        store: Where the blocks go.
        inbound: Receives them.
        neighbours: The other nodes.
        timeout_s: For one part.
        max_overdue_blocks: So many slots may be those of overdue parts; a fetch whose part would be one more waits.
        clock: Monotonic.
    """

    def __init__(
        self,
        here: SessionEndpoint,
        address: str,
        store: NodeStorage,
        inbound: PeerReceiver,
        neighbours: PeerTable,
        *,
        timeout_s: float,
        max_overdue_blocks: int,
        clock: Clock,
    ) -> None:
        self._here = here
        self._address = address
        self._store = store
        self._inbound = inbound
        self._neighbours = neighbours
        self._timeout_s = timeout_s
        self._max_overdue_blocks = max_overdue_blocks
        self._overdue_blocks = 0
        self._clock = clock
        self._numbers = itertools.count(1)

    @property
    def num_flushes(self) -> int:
        """That this node has carried out: what was looked up before one may be what it covers."""
        return self._store.ledger.num_flushes

    async def bring(
        self,
        keys: Sequence[BlockKey],
        before: Sequence[BlockKey],
        source: Source,
        *,
        only_cold: bool = False,
    ) -> bool:
        """Brings what is missing of `keys`, which follow those `before` in their text; see `NodeLedger.reserve` for
        `only_cold`. Returns whether to go on: not where their tenant has no room for all of them.
        """
        ledger, now_s = self._store.ledger, self._clock.now_s()
        put = ledger.reserve(
            keys,
            _UNKNOWN,
            now_s,
            first=len(before),
            fetched=True,
            only_cold=only_cold,
            before=before,
        )
        self._store.carry_out()
        if not isinstance(put, PutGrant):
            return False
        if not put.items:
            return True  # they have come by another way
        fetched = _Part(
            keys=[item.key for item in put.items], slots=[item.slot for item in put.items]
        )
        begin_s = self._clock.now_s()
        coming = await self._fill_and_end(put.put_id, fetched, before, source)
        if coming is None:
            ledger.counts.failed_fetches += 1
            return False
        seconds = self._clock.now_s() - begin_s
        self._neighbours.links.landed(
            source.state.node, coming.block_bytes * len(put.items), seconds
        )
        return ledger.held(fetched.keys) == len(fetched.keys)

    async def _fill_and_end(
        self, put_id: str, part: _Part, before: Sequence[BlockKey], source: Source
    ) -> IncomingBlocks | None:
        """The put is over afterwards, and nothing writes to its slots; or the part is overdue. None: nothing has come."""
        ledger, coming, sums = self._store.ledger, None, list[bytes]()
        permit = self._permit(source, len(part.keys))
        grant = Grant(held_blocks=0, blocks=tuple(map(BlockId, part.slots)))
        landed = self._inbound.expect(permit, grant, self._timeout_s)
        try:
            coming = await self._transfer(part, permit, landed, source)
            if coming is not None:
                sums = await self._verified(part, coming)
                if not all(sums):
                    self._failed(source)
        except BatonError as error:
            _log.info(
                "blocks were not fetched", source=str(source.state.node), reason=error.message
            )
        if not landed.done():
            await self._leave_overdue(put_id, part, source, landed)
            return None
        if coming is None or not any(sums):
            ledger.abandon(put_id)
            return None
        now_s = self._clock.now_s()
        ledger.commit(put_id, sums, now_s, coming.owners, coming.block_bytes, before)
        ledger.read_frequency.read(part.keys, now_s)
        self._store.carry_out()
        return coming if all(sums) else None

    async def _transfer(
        self, part: _Part, permit: Permit, landed: Landed, source: Source
    ) -> IncomingBlocks | None:
        """Has the holder write the blocks. None: it has less of them.

        Raises:
            BatonError: They have not come. Unless `landed` is done, the holder may still write.
        """
        try:
            coming = await self._ask(part, permit, source)
        except BatonError as error:
            self._failed(source)
            self._inbound.withdraw(permit.xfer_id, error)
            raise
        if coming is None:
            self._inbound.withdraw(permit.xfer_id, TransferError("the holder has less"))
        in_time, _ = await asyncio.wait({landed}, timeout=self._timeout_s)
        if not in_time:
            self._failed(source)
            late = DeadlineError("the blocks did not come in time")
            self._inbound.withdraw(permit.xfer_id, late)
            raise late
        fault = landed.result()
        if coming is not None and fault is not None:
            self._failed(source)
            raise fault
        return coming

    async def _leave_overdue(
        self, put_id: str, part: _Part, source: Source, landed: Landed
    ) -> None:
        """Forgets the blocks; their slots are free once the holder has stopped, which may take any time. Waits for that
        only where too many slots are overdue already.
        """
        ledger, links, node = self._store.ledger, self._neighbours.links, source.state.node
        num_blocks = len(part.slots)
        has_room = self._overdue_blocks + num_blocks <= self._max_overdue_blocks
        overdue_blocks = num_blocks if has_room else 0

        def stopped(_: Landed) -> None:
            self._overdue_blocks -= overdue_blocks
            links.stopped(node)
            ledger.abandon(put_id)

        self._overdue_blocks += overdue_blocks
        links.overdue(node)
        ledger.forget(put_id)
        landed.add_done_callback(stopped)
        if not has_room:
            await asyncio.wait({landed})

    def _failed(self, source: Source) -> None:
        """A holder is left alone as soon as it is known to have failed:
        until it is sure that it has stopped much time may pass.
        """
        self._neighbours.links.failed(source.state.node, self._clock.now_s())

    async def _ask(self, part: _Part, permit: Permit, source: Source) -> IncomingBlocks | None:
        """Asks the holder to write the blocks, and what they are; None where it has less than the directory says."""
        question = pb.FetchBlocks(
            permit=shown(permit),
            keys=keys_to_bytes(part.keys),
            address=self._address,
            wait_s=_ASK_WAIT_S if source.on_disk else 0.0,
        )
        request = pb.PeerRequest(fetch=question)
        reply = await self._neighbours.ask(source.state, request, self._timeout_s)
        if reply.coming.held < len(part.keys):
            return None
        return incoming_from_proto(
            reply.coming, num_blocks=len(part.keys), slot_bytes=self._store.slab.slot_bytes
        )

    def _permit(self, source: Source, num_blocks: int) -> Permit:
        here = self._here
        name = f"pool-{here.identity.worker_id}-{here.identity.incarnation:x}-{next(self._numbers)}"
        return here.office.issue(
            Permit(
                xfer_id=XferId(name),
                attempt=1,
                cache_scope="",
                layout_digest=here.layout.content_digest(),
                source=source.state.node,
                target=here.identity,
                num_blocks=num_blocks,
            )
        )

    async def _verified(self, part: _Part, coming: IncomingBlocks) -> list[bytes]:
        """The checksums of the blocks that are what they were put as; an empty entry for each other one."""
        right = await asyncio.to_thread(
            self._store.slab.right, part.slots, coming.checksums, coming.block_bytes
        )
        wrong = len(right) - sum(right)
        if wrong:
            error = CorruptKvError(f"{wrong} of {len(right)} blocks have other bytes than were put")
            _log.error("fetched blocks are corrupt", cause=error)
            self._store.ledger.counts.corrupt_blocks += wrong
        return [sums if ok else b"" for sums, ok in zip(coming.checksums, right, strict=True)]


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
        neighbours: PeerTable,
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
        """Texts that are being fetched; those whose part is overdue are not."""
        return len(self._tasks)

    async def bring(self, keys: Sequence[BlockKey], held: int, wait_s: float) -> None:
        """Has the blocks of a text after the first `held` ones brought here, as far as another node has them.

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

    def start(
        self, keys: Sequence[BlockKey], held: int, *, soon_s: float, only_cold: bool = False
    ) -> Fetch | None:
        """Begins to bring them, or finds that they are being fetched; None where too much is under way,
        or the node stops.

        Args:
            keys: Of the text, from its first block on.
            held: So many are here.
            soon_s: A part that is expected to take longer is not worth waiting for.
            only_cold: See `NodeLedger.reserve`.
        """
        known = self._fetches.get(keys[held])
        if known is not None or self._closed or len(self._tasks) >= _MAX_FETCHES:
            return known
        fetch = self._fetches[keys[held]] = Fetch(tuple(keys), held, only_cold)
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
        num_flushes = self._parts.num_flushes
        try:
            source = await self._neighbours.source(fetch.keys[fetch.at :])
            if source is not None:
                await self._bring_all(fetch, source, soon_s, num_flushes)
        except PoolUnavailableError as error:
            _log.debug("nothing is fetched: the directory is away", reason=error.message)
        finally:
            self._move(fetch, len(fetch.keys))
            fetch.not_soon.set()

    async def _bring_all(
        self, fetch: Fetch, source: Source, soon_s: float, num_flushes: int
    ) -> None:
        """Not what may have been flushed here since it was looked up: its holder may not have heard of that."""
        if self._part_s(source) > soon_s:
            fetch.not_soon.set()
        end = fetch.at + min(source.num_blocks, self._most_blocks)
        while fetch.at < end and self._parts.num_flushes == num_flushes:
            part = fetch.keys[fetch.at : min(fetch.at + self._part_blocks, end)]
            before = fetch.keys[: fetch.at]
            if not await self._parts.bring(part, before, source, only_cold=fetch.only_cold):
                return
            self._move(fetch, fetch.at + len(part))

    def _part_s(self, source: Source) -> float:
        """What its first part is expected to take."""
        blocks = min(self._part_blocks, source.num_blocks)
        return blocks * self._slot_bytes / self._neighbours.links.rate(source.state.node)

    def _move(self, fetch: Fetch, to: int) -> None:
        """The next reader of this text lacks the block at `to`."""
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


_ASK_WAIT_S = 0.5
"""That a holder may take to read blocks from its disk before it answers."""

_UNKNOWN = Owner(tenant="", scope="", model="")
"""Whose blocks are until their holder says it."""
