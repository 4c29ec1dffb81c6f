"""A part of a text that does not come: what is believed of its holder, and what stays out of use meanwhile."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from baton.clock import ManualClock
from baton.errors import BatonError, PoolUnavailableError, TransferError
from baton.ids import WorkerIdentity, XferId
from baton.rpc.v1 import pool_pb2 as pb
from kv_transfer.session.handshake import SessionEndpoint
from kv_transfer.ticket import TicketOffice
from kvpool.messages import NodeState
from kvpool.node.ledger import NodeLedger, NodeLimits
from kvpool.node.slab import slab_layout
from kvpool.peers.fetcher import PartFetcher
from kvpool.peers.peer_table import PeerLinks
from kvpool.peers.placement import Source
from tests.kvpool.nodes_world import identity, keys

SLOT_BYTES = 16
HOLDER = Source(state=NodeState(node=identity("holder"), address="unix:/there"), num_blocks=2)


class Standing:
    """Transfers that are not over until a test says so."""

    def __init__(self) -> None:
        self.landed: asyncio.Future[BatonError | None] = asyncio.get_running_loop().create_future()

    def expect(self, *_: object) -> "asyncio.Future[BatonError | None]":
        return self.landed

    def withdraw(self, xfer_id: XferId, error: BatonError) -> None:
        del xfer_id, error


class WatchedLinks(PeerLinks):
    def __init__(self) -> None:
        super().__init__()
        self.blamed = asyncio.Event()

    def failed(self, node: WorkerIdentity, now_s: float) -> None:
        super().failed(node, now_s)
        self.blamed.set()


class World:
    def __init__(self, answer: pb.PeerReply | None, timeout_s: float = 30.0) -> None:
        self.inbound, self.links, self.clock = Standing(), WatchedLinks(), ManualClock()
        self.ledger = NodeLedger(NodeLimits(num_slots=4, slot_bytes=SLOT_BYTES), "n")

        async def ask(*_: object) -> pb.PeerReply:
            if answer is None:
                raise PoolUnavailableError("it stands still")
            return answer

        store: Any = SimpleNamespace(
            ledger=self.ledger,
            carry_out=lambda: None,
            slab=SimpleNamespace(slot_bytes=SLOT_BYTES),
        )
        neighbours: Any = SimpleNamespace(links=self.links, ask=ask)
        self.parts = PartFetcher(
            SessionEndpoint(
                identity=identity("here"),
                layout=slab_layout(SLOT_BYTES),
                office=TicketOffice(bytes(32)),
            ),
            "unix:/here",
            store,
            cast("Any", self.inbound),
            neighbours,
            timeout_s=timeout_s,
            clock=self.clock,
        )

    @property
    def asked_again(self) -> bool:
        return self.links.usable(HOLDER.state.node, self.clock.now_s())

    def bring(self) -> "asyncio.Task[bool]":
        return asyncio.create_task(self.parts.bring(keys(1, 2), 0, HOLDER))

    async def left_alone(self) -> None:
        async with asyncio.timeout(30):
            await self.links.blamed.wait()
        assert not self.asked_again


def coming() -> pb.PeerReply:
    blocks = [pb.ComingBlock(checksums=bytes(8), owner=0) for _ in range(2)]
    return pb.PeerReply(
        coming=pb.BlocksComing(
            held=2, block_bytes=SLOT_BYTES, owners=[pb.BlockOwner(tenant="anna")], blocks=blocks
        )
    )


async def test_a_holder_that_gives_no_answer_is_left_alone_before_its_slots_are_free() -> None:
    world = World(answer=None)
    bringing = world.bring()
    await world.left_alone()
    assert not bringing.done()
    assert world.ledger.usage().slots_free == 2
    world.inbound.landed.set_result(None)
    assert not await bringing
    assert world.ledger.usage().slots_free == 4


async def test_a_holder_whose_blocks_do_not_come_in_time_is_left_alone_meanwhile() -> None:
    world = World(answer=coming(), timeout_s=0.01)
    bringing = world.bring()
    await world.left_alone()
    assert not bringing.done()
    assert world.ledger.usage().slots_free == 2
    world.inbound.landed.set_result(TransferError("it was killed"))
    assert not await bringing
    assert world.ledger.usage().slots_free == 4


async def test_one_fault_counts_once_against_a_holder() -> None:
    world = World(answer=coming())
    bringing = world.bring()
    world.inbound.landed.set_result(TransferError("it gave up"))
    assert not await bringing
    assert not world.asked_again
    world.clock.advance(1.5)
    assert world.asked_again, (
        "it rests for one second after the first fault, for two after the second"
    )
