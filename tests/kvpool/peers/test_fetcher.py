"""A part of a text that does not come: what is believed of its holder, what stays out of use meanwhile,
and that other fetches go on.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.clock import ManualClock
from baton.errors import BatonError, PoolUnavailableError, TransferError
from baton.ids import BlockKey, WorkerIdentity, XferId
from baton.rpc.v1 import pool_pb2 as pb
from kv_transfer.session.handshake import SessionEndpoint
from kv_transfer.ticket import TicketOffice
from kvpool.messages import Allowance, NodeState, Owner, PutGrant, Selection
from kvpool.node.ledger import NodeLedger, NodeLimits
from kvpool.node.slab import slab_layout
from kvpool.peers.fetcher import Fetcher, PartFetcher
from kvpool.peers.peer_table import PeerLinks
from kvpool.peers.placement import Source
from tests.kvpool.nodes_world import identity, keys
from tests.waits import WAIT_S, soon

SLOT_BYTES = 16
HOLDER = Source(state=NodeState(node=identity("holder"), address="unix:/there"), num_blocks=2)
OTHER = Source(state=NodeState(node=identity("other"), address="unix:/elsewhere"), num_blocks=2)


class Standing:
    """Transfers that are not over until a test says so."""

    def __init__(self) -> None:
        self.all: list[asyncio.Future[BatonError | None]] = []

    @property
    def landed(self) -> "asyncio.Future[BatonError | None]":
        """The first one."""
        return self.all[0]

    def expect(self, *_: object) -> "asyncio.Future[BatonError | None]":
        self.all.append(asyncio.get_running_loop().create_future())
        return self.all[-1]

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
    def __init__(
        self,
        answer: pb.PeerReply | None,
        timeout_s: float = 30.0,
        *,
        num_slots: int = 4,
        max_overdue_blocks: int = 2,
    ) -> None:
        self.inbound, self.links, self.clock = Standing(), WatchedLinks(), ManualClock()
        self.ledger = NodeLedger(NodeLimits(num_slots=num_slots, slot_bytes=SLOT_BYTES), "n")
        self.asked = asyncio.Queue[WorkerIdentity]()

        async def ask(node: NodeState, *_: object) -> pb.PeerReply:
            self.asked.put_nowait(node.node)
            if answer is None:
                raise PoolUnavailableError("it stands still")
            return answer

        store: Any = SimpleNamespace(
            ledger=self.ledger,
            carry_out=lambda: None,
            slab=SimpleNamespace(
                slot_bytes=SLOT_BYTES, right=lambda slots, *_: [True] * len(slots)
            ),
        )
        self.neighbours = cast("Any", SimpleNamespace(links=self.links, ask=ask))
        self.parts = PartFetcher(
            SessionEndpoint(
                identity=identity("here"),
                layout=slab_layout(SLOT_BYTES),
                office=TicketOffice(bytes(32)),
            ),
            "unix:/here",
            store,
            cast("Any", self.inbound),
            self.neighbours,
            timeout_s=timeout_s,
            max_overdue_blocks=max_overdue_blocks,
            clock=self.clock,
        )

    def asked_again(self) -> bool:
        return self.links.usable(HOLDER.state.node, self.clock.now_s())

    def bring(self, *numbers: int) -> "asyncio.Task[bool]":
        return asyncio.create_task(self.parts.bring(keys(*(numbers or (1, 2))), (), HOLDER))

    async def stopped(self, at: int = 0) -> None:
        """The holder writes no more of that transfer, and everybody knows."""
        self.inbound.all[at].set_result(TransferError("it was killed"))
        await asyncio.wait({self.inbound.all[at]})

    async def left_alone(self) -> None:
        async with asyncio.timeout(30):
            await self.links.blamed.wait()
        assert not self.asked_again()


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
    assert not await soon(bringing)
    assert world.ledger.usage().slots_free == 2
    await world.stopped()
    assert world.ledger.usage().slots_free == 4


async def test_a_holder_whose_blocks_do_not_come_in_time_is_left_alone_until_it_has_stopped() -> (
    None
):
    world = World(answer=coming(), timeout_s=0.01)
    bringing = world.bring()
    await world.left_alone()
    assert not await soon(bringing)
    world.clock.advance(1000.0)
    assert not world.asked_again()
    assert world.ledger.usage().slots_free == 2
    await world.stopped()
    assert world.asked_again()
    assert world.ledger.usage().slots_free == 4
    world.ledger.check_integrity()


async def test_blocks_that_do_not_come_in_time_may_be_put_before_their_holder_has_stopped() -> None:
    world = World(answer=coming(), timeout_s=0.01)
    assert not await soon(world.bring(1, 2))
    put = world.ledger.reserve(keys(1, 2), Owner(tenant="anna", scope="", model=""), 0.0)
    assert isinstance(put, PutGrant)
    assert world.ledger.commit(put.put_id, [bytes(8)] * 2, 0.0) == 2
    await world.stopped()
    assert world.ledger.held(keys(1, 2)) == 2
    world.ledger.check_integrity()


async def test_a_part_that_too_many_overdue_slots_leave_no_room_for_is_waited_for() -> None:
    world = World(answer=coming(), timeout_s=0.01, max_overdue_blocks=3)
    assert not await soon(world.bring(1, 2))
    world.links.blamed.clear()
    waiting = world.bring(3, 4)
    await soon(world.links.blamed.wait())
    await world.stopped(at=0)
    assert not waiting.done()
    assert world.ledger.usage().slots_free == 2
    await world.stopped(at=1)
    assert not await soon(waiting)
    assert world.ledger.usage().slots_free == 4
    assert not await soon(world.bring(5, 6)), "there is room again"
    await world.stopped(at=2)
    world.ledger.check_integrity()


async def test_a_holder_that_stands_still_keeps_no_fetch_from_others_waiting() -> None:
    world = World(answer=coming(), timeout_s=0.01, num_slots=64, max_overdue_blocks=16)
    texts = [keys(2 * number, 2 * number + 1) for number in range(1, 9)]
    elsewhere = keys(100, 101)

    async def source(of: list[BlockKey]) -> Source:
        return OTHER if set(of) <= set(elsewhere) else HOLDER

    world.neighbours.source = source
    fetcher = Fetcher(
        world.parts, world.neighbours, num_slots=64, slot_bytes=SLOT_BYTES, fetch_bytes=1 << 20
    )
    for text in texts:
        assert fetcher.start(text, 0, soon_s=30.0) is not None
    assert fetcher.start(elsewhere, 0, soon_s=30.0) is None, "eight are under way"
    stood = [fetcher.bring(text, 0, WAIT_S) for text in texts]
    await soon(asyncio.gather(*stood))
    asked = {world.asked.get_nowait() for _ in texts}
    assert asked == {HOLDER.state.node}
    other = asyncio.create_task(fetcher.bring(elsewhere, 0, WAIT_S))
    assert await soon(world.asked.get()) == OTHER.state.node
    await world.stopped(len(texts))
    await soon(other)
    for at in range(len(texts)):
        await world.stopped(at)
    assert (world.ledger.usage().slots_free, world.ledger.usage().puts) == (64, 0)
    await fetcher.close()


async def test_one_fault_counts_once_against_a_holder() -> None:
    world = World(answer=coming())
    bringing = world.bring()
    await soon(world.asked.get())
    world.inbound.landed.set_result(TransferError("it gave up"))
    assert not await soon(bringing)
    assert not world.asked_again()
    world.clock.advance(1.5)
    assert world.asked_again(), (
        "it rests for one second after the first fault, for two after the second"
    )


@pytest.mark.parametrize("has_room", [True, False])
async def test_a_text_is_fetched_as_far_as_its_tenants_quota_goes(has_room: bool) -> None:
    world = World(answer=coming())
    world.ledger.allow("anna", Allowance(max_bytes=(2 if has_room else 1) * SLOT_BYTES))
    bringing = world.bring()
    await soon(world.asked.get())
    world.inbound.landed.set_result(None)
    assert await soon(bringing) is has_room
    assert world.ledger.held(keys(1, 2)) == (2 if has_room else 1)
    assert world.ledger.counts.failed_fetches == 0


@pytest.mark.parametrize("copy", [True, False])
async def test_parts_of_a_text_are_brought_behind_those_before_them(copy: bool) -> None:
    brought: list[tuple[list[BlockKey], list[BlockKey]]] = []

    async def bring(
        part: Sequence[BlockKey], before: Sequence[BlockKey], _: Source, *, only_cold: bool
    ) -> bool:
        assert only_cold is copy
        brought.append(([*part], [*before]))
        return True

    async def source(_: Sequence[BlockKey]) -> Source:
        return replace(HOLDER, num_blocks=3)

    fetcher = Fetcher(
        cast("Any", SimpleNamespace(bring=bring, num_flushes=0)),
        cast("Any", SimpleNamespace(links=PeerLinks(), source=source)),
        num_slots=32,
        slot_bytes=SLOT_BYTES,
        fetch_bytes=1 << 20,
    )
    text = keys(*range(4))
    fetch = fetcher.start(text, 1, soon_s=WAIT_S, only_cold=copy)
    assert fetch is not None
    await soon(fetch.not_soon.wait())
    assert brought == [(text[1:3], text[:1]), (text[3:], text[:3])]
    await fetcher.close()


@pytest.mark.parametrize("flushed_at", [0, 1, 2])
async def test_what_was_looked_up_before_a_flush_is_not_fetched_after_it(
    flushed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder may not have heard of it. The flush comes with the look (0), or with a part."""
    world = World(answer=None)
    brought: list[list[BlockKey]] = []

    def flush_at(event: int) -> None:
        if event == flushed_at and not world.ledger.num_flushes:
            world.ledger.flush(Selection(tenant="anna"))

    async def bring(part: Sequence[BlockKey], *_: object, **__: object) -> bool:
        brought.append([*part])
        flush_at(len(brought))
        return True

    async def source(_: Sequence[BlockKey]) -> Source:
        flush_at(0)
        return replace(HOLDER, num_blocks=4)

    monkeypatch.setattr(world.parts, "bring", bring)
    fetcher = Fetcher(
        world.parts,
        cast("Any", SimpleNamespace(links=PeerLinks(), source=source)),
        num_slots=16,
        slot_bytes=SLOT_BYTES,
        fetch_bytes=1 << 20,
    )
    await fetcher.bring(keys(*range(4)), 0, WAIT_S)
    assert len(brought) == flushed_at
    await fetcher.bring(keys(*range(4)), 0, WAIT_S)
    assert len(brought) == flushed_at + 4, "what is looked up after the flush is fetched"
    await fetcher.close()
