"""One part of a text on its way from another node into slots of this one: reserved, asked for, written, verified, held.

All of it or nothing is sent; each block that has come is held or not by its own checksums, which go back to whoever computed it.
Nothing here raises: what did not come is a miss.
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from baton.clock import Clock
from baton.errors import BatonError, CorruptKvError, TransferError
from baton.ids import BlockId, BlockKey, XferId
from baton.rpc.v1 import pool_pb2 as pb
from baton.telemetry.logs import get_logger
from kv_transfer.plan import Grant
from kv_transfer.session.handshake import Endpoint
from kv_transfer.ticket import Permit, shown
from kvpool.convert import keys_to_bytes
from kvpool.inbound import Inbound
from kvpool.messages import Owner, PutGrant
from kvpool.neighbours import Neighbours
from kvpool.peer_convert import Coming, coming_from_proto
from kvpool.placement import Source
from kvpool.store import NodeStore

_ASK_WAIT_S = 0.5
"""That a holder may take to read blocks from its disk before it answers."""

_UNKNOWN = Owner(tenant="", scope="", model="")
"""Whose blocks are until their holder says it."""

_log = get_logger(__name__)


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
        clock: Monotonic.
    """

    def __init__(
        self,
        here: Endpoint,
        address: str,
        store: NodeStore,
        inbound: Inbound,
        neighbours: Neighbours,
        *,
        timeout_s: float,
        clock: Clock,
    ) -> None:
        self._here = here
        self._address = address
        self._store = store
        self._inbound = inbound
        self._neighbours = neighbours
        self._timeout_s = timeout_s
        self._clock = clock
        self._numbers = itertools.count(1)

    async def bring(self, keys: Sequence[BlockKey], first: int, source: Source) -> bool:
        """Brings what is missing of `keys`, which begin at block `first` of their text. Returns whether to go on."""
        ledger = self._store.ledger
        put = ledger.reserve(keys, _UNKNOWN, self._clock.now_s(), first=first, fetched=True)
        self._store.carry_out()
        if not isinstance(put, PutGrant):
            return False
        if not put.items:
            return True  # they have come by another way
        fetched = _Part(
            keys=[item.key for item in put.items], slots=[item.slot for item in put.items]
        )
        begin_s = self._clock.now_s()
        coming = await self._settled(put.put_id, fetched, source)
        if coming is None:
            ledger.counts.failed_fetches += 1
            return False
        seconds = self._clock.now_s() - begin_s
        self._neighbours.links.landed(
            source.state.node, coming.block_bytes * len(put.items), seconds
        )
        return True

    async def _settled(self, put_id: str, part: _Part, source: Source) -> Coming | None:
        """Whatever happens, the put is over afterwards, and nobody writes to its slots. None: nothing has come."""
        ledger, coming, sums = self._store.ledger, None, list[bytes]()
        try:
            coming = await self._transfer(part, source)
            if coming is not None:
                sums = await self._verified(part, coming)
                if not all(sums):
                    self._failed(source)
        except BatonError as error:
            _log.info(
                "blocks were not fetched", source=str(source.state.node), reason=error.message
            )
        if coming is None or not any(sums):
            ledger.abandon(put_id)
            return None
        now_s = self._clock.now_s()
        ledger.commit(put_id, sums, now_s, coming.owners, coming.block_bytes)
        ledger.demand.read(part.keys, now_s)
        self._store.carry_out()
        return coming if all(sums) else None

    async def _transfer(self, part: _Part, source: Source) -> Coming | None:
        """Has the holder write the blocks. Nobody writes any more when this returns, or raises; None: it has less of them."""
        permit = self._permit(source, len(part.keys))
        grant = Grant(held_blocks=0, blocks=tuple(map(BlockId, part.slots)))
        landed = self._inbound.expect(permit, grant, self._timeout_s)
        try:
            coming = await self._ask(part, permit, source)
        except BatonError as error:
            self._failed(source)
            self._inbound.withdraw(permit.xfer_id, error)
            await landed
            raise
        if coming is None:
            self._inbound.withdraw(permit.xfer_id, TransferError("the holder has less"))
        in_time, _ = await asyncio.wait({landed}, timeout=self._timeout_s)
        if not in_time:
            self._failed(source)
        fault = await landed
        if coming is not None and fault is not None:
            if in_time:
                self._failed(source)
            raise fault
        return coming

    def _failed(self, source: Source) -> None:
        """A holder is left alone as soon as it is known to have failed: until it is sure that it has stopped much time may pass."""
        self._neighbours.links.failed(source.state.node, self._clock.now_s())

    async def _ask(self, part: _Part, permit: Permit, source: Source) -> Coming | None:
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
        return coming_from_proto(
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

    async def _verified(self, part: _Part, coming: Coming) -> list[bytes]:
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
