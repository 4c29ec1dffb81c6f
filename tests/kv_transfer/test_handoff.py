"""Ledger and outbox against each other over a lossy world: random interleavings, and a model of the pages."""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import CancelledByPeerError, EngineError, TransferError, WorkerLostError
from baton.generation import TokenSample
from baton.ids import BlockId, Incarnation, LayerName, WorkerId, WorkerIdentity, XferId
from baton.layout import KvLayout
from kv_transfer.ledger import LedgerLimits, TransferLedger
from kv_transfer.messages import (
    Drew,
    EndSession,
    Expected,
    Exported,
    FreePages,
    FromDecode,
    FromPeer,
    GivenUp,
    HandOver,
    HandOverFailed,
    LedgerAction,
    Opened,
    OutboxAction,
    PagesGone,
    PagesReserved,
    PeerDown,
    PeerFenced,
    PeerUp,
    PushDone,
    ReservePages,
    Send,
    SessionId,
    SessionLost,
    StartDecoding,
    Started,
    StartPush,
    ToDecode,
    ToPeer,
    ToPrefill,
    TransferFailed,
    Withdrawn,
)
from kv_transfer.outbox import Outbox
from kv_transfer.plan import Export, Grant

NUM_BLOCKS = 6
LAYERS = 2
P = WorkerIdentity(worker_id=WorkerId("p"), incarnation=Incarnation(1))
D = WorkerIdentity(worker_id=WorkerId("d"), incarnation=Incarnation(2))
LAYOUT = KvLayout(
    model_fingerprint="f",
    dtype="float32",
    block_tokens=1,
    num_kv_heads=1,
    head_dim=1,
    layers=tuple(LayerName(f"layer.{i}") for i in range(LAYERS)),
)
LIMITS = LedgerLimits(
    expect_timeout_s=50.0,
    reserve_timeout_s=20.0,
    quiesce_timeout_s=5.0,
    page_bytes=LAYOUT.page_bytes,
)
FIRST = (TokenSample(sample=0, token=7),)


@dataclass
class Leg:
    """What router, engines and model know of one transfer."""

    xfer_id: XferId
    num_blocks: int
    started: bool = False
    todo: list[Export] = field(default_factory=list)
    drawn: bool = False
    over_here: bool = False  # on P
    ended_there: bool = False  # on D, as the router was told


@dataclass
class Link:
    """One session: what travels each way, and the pushes that may still land."""

    session: SessionId
    to_decode: deque[ToDecode] = field(default_factory=deque)
    to_prefill: deque[ToPrefill] = field(default_factory=deque)
    pushes: dict[int, StartPush] = field(default_factory=dict)
    alive: bool = True


class HandOffMachine(RuleBasedStateMachine):
    """Every rule is something that can happen at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.ledger = TransferLedger(LIMITS)
        self.outbox = Outbox(LAYOUT)
        self.legs: dict[XferId, Leg] = {}
        self.sessions = itertools.count(1)
        self.links: list[Link] = []
        self.free = set(range(NUM_BLOCKS))
        self.held: dict[XferId, set[int]] = {}
        self.line: deque[XferId] = deque()  # D's engine: waiting for room
        self.replies: deque[PagesGone] = deque()
        self.running: set[XferId] = set()
        self.landed: dict[tuple[XferId, int], int] = {}
        self.granted: dict[XferId, tuple[BlockId, ...]] = {}
        self.pending_expects: list[Leg] = []
        self.connect()

    def link(self) -> Link:
        return self.links[-1]

    def connect(self) -> None:
        self.links.append(Link(session=SessionId(next(self.sessions))))
        self.act_p(self.outbox.handle(PeerUp(peer=D, region_blocks=NUM_BLOCKS), self.now_s))

    def act_p(self, actions: list[OutboxAction]) -> None:
        for action in actions:
            match action:
                case Send():
                    if self.link().alive:
                        self.link().to_decode.append(action.message)
                case StartPush():
                    self.link().pushes[action.push_id] = action
                case HandOver() | HandOverFailed():
                    leg = self.legs[action.xfer_id]
                    assert not leg.over_here, "a leg ends once"
                    leg.over_here = True

    def act_d(self, actions: list[LedgerAction]) -> None:
        for action in actions:
            match action:
                case ReservePages():
                    self.line.append(action.xfer_id)
                case FreePages():
                    self.give_back(action.xfer_id)
                case StartDecoding():
                    assert action.first_tokens == FIRST
                    self.assert_written(action.xfer_id)
                    self.running.add(action.xfer_id)
                case ToPeer():
                    link = self.link()
                    if link.alive and link.session == action.session:
                        link.to_prefill.append(action.message)
                case TransferFailed():
                    leg = self.legs[action.xfer_id]
                    assert not leg.ended_there, "a failure is told once, never after a withdrawal"
                    leg.ended_there = True
                case EndSession():
                    if self.link().alive and self.link().session == action.session:
                        self.lose_session()

    def assert_written(self, xfer_id: XferId) -> None:
        landed = sum(self.landed.get((xfer_id, page), 0) for page in self.granted[xfer_id])
        assert landed >= len(self.granted[xfer_id]) * LAYERS

    def give_back(self, xfer_id: XferId) -> None:
        if xfer_id in self.line:
            self.line.remove(xfer_id)
        else:
            pages = self.held.pop(xfer_id)  # KeyError: freed twice
            in_danger = {
                page
                for link in self.links
                for push in link.pushes.values()
                if push.push.xfer_id == xfer_id
                for page in push.push.target
            }
            assert not in_danger, "pages were freed while a write was in flight"
            self.free |= pages
        self.replies.append(PagesGone(xfer_id=xfer_id))

    @precondition(lambda self: len(self.legs) < 12)
    @rule(num_blocks=st.integers(1, 3), expect_first=st.booleans())
    def submit(self, num_blocks: int, expect_first: bool) -> None:
        leg = Leg(XferId(f"x{len(self.legs)}"), num_blocks)
        leg.todo = [
            Export(layer_index=layer, first_block=block, source=(BlockId(block),))
            for block in range(num_blocks)
            for layer in range(LAYERS)
        ]
        self.legs[leg.xfer_id] = leg
        self.act_p(
            self.outbox.handle(
                Opened(xfer_id=leg.xfer_id, peer=D, num_blocks=num_blocks), self.now_s
            )
        )
        if expect_first:
            self.expect(leg)
        else:
            self.pending_expects.append(leg)

    def expect(self, leg: Leg) -> None:
        event = Expected(xfer_id=leg.xfer_id, source=P, num_blocks=leg.num_blocks)
        self.act_d(self.ledger.handle(event, self.now_s))

    def late_expect(self) -> None:
        self.expect(self.pending_expects.pop(0))

    def pick(self, data: st.DataObject) -> Leg:
        return data.draw(st.sampled_from(list(self.legs.values())))

    def progress(self) -> list[Callable[[], None]]:
        """What can go on by itself."""
        link = self.link()
        ops: list[Callable[[], None]] = []
        ops += [partial(self.compute, leg, 3) for leg in self.legs.values() if not leg.over_here]
        ops += [self.late_expect] if self.pending_expects else []
        ops += [partial(self.deliver_to_decode, 1)] if link.to_decode else []
        ops += [self.deliver_to_prefill] if link.to_prefill else []
        ops += [partial(self.engine_reserves, 1, False)] if self.line else []
        ops += [self.engine_released] if self.replies else []
        ops += [self.sequence_finishes] if self.running else []
        ops += [partial(self.land, ours, push) for ours in self.links for push in ours.pushes]
        return ops

    # Most of what happens is work; without three of these rules hardly a transfer would get anywhere.
    @rule(random=st.randoms(use_true_random=False), steps=st.integers(1, 30))
    def work(self, random: Random, steps: int) -> None:
        for _ in range(steps):
            ops = self.progress()
            if ops:
                random.choice(ops)()
                self.ledger.check_integrity()
                self.outbox.check_integrity()

    @rule(random=st.randoms(use_true_random=False))
    def work_a_little(self, random: Random) -> None:
        self.work(random, 4)

    @rule(random=st.randoms(use_true_random=False))
    def work_hard(self, random: Random) -> None:
        self.work(random, 60)

    def compute(self, leg: Leg, steps: int) -> None:
        if not leg.started:
            leg.started = True
            self.act_p(self.outbox.handle(Started(xfer_id=leg.xfer_id), self.now_s))
        for _ in range(min(steps, len(leg.todo))):
            export = leg.todo.pop(0)
            self.act_p(self.outbox.handle(Exported(xfer_id=leg.xfer_id, export=export), self.now_s))
        if not leg.todo and not leg.drawn:
            leg.drawn = True
            event = Drew(xfer_id=leg.xfer_id, first_tokens=FIRST)
            self.act_p(self.outbox.handle(event, self.now_s))

    @precondition(lambda self: any(x.started and not x.drawn for x in self.legs.values()))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        leg = data.draw(
            st.sampled_from([x for x in self.legs.values() if x.started and not x.drawn])
        )
        leg.todo = [
            Export(
                layer_index=layer, first_block=0, source=tuple(map(BlockId, range(leg.num_blocks)))
            )
            for layer in range(LAYERS)
        ]
        self.act_p(self.outbox.handle(Started(xfer_id=leg.xfer_id), self.now_s))

    @precondition(lambda self: self.link().to_decode)
    @rule(repeat=st.just(2))
    def deliver_to_decode(self, repeat: int) -> None:
        link = self.link()
        message = link.to_decode.popleft()
        for _ in range(repeat):
            event = FromPeer(session=link.session, peer=P, message=message)
            self.act_d(self.ledger.handle(event, self.now_s))

    def deliver_to_prefill(self) -> None:
        message = self.link().to_prefill.popleft()
        self.act_p(self.outbox.handle(FromDecode(peer=D, message=message), self.now_s))

    @precondition(lambda self: self.line)
    @rule(held=st.integers(0, 3), fails=st.booleans())
    def engine_reserves(self, held: int, fails: bool) -> None:
        xfer_id = self.line[0]
        leg = self.legs[xfer_id]
        if fails:
            self.line.popleft()
            error = EngineError("can never fit")
            self.act_d(self.ledger.handle(PagesGone(xfer_id=xfer_id, error=error), self.now_s))
            return
        if len(self.free) < leg.num_blocks:
            return
        self.line.popleft()
        pages = [BlockId(self.free.pop()) for _ in range(leg.num_blocks)]
        self.held[xfer_id] = set(pages)
        held = min(held, leg.num_blocks)
        self.granted[xfer_id] = tuple(pages[held:])
        event = PagesReserved(
            xfer_id=xfer_id, grant=Grant(held_blocks=held, blocks=tuple(pages[held:]))
        )
        self.act_d(self.ledger.handle(event, self.now_s))

    def engine_released(self) -> None:
        self.act_d(self.ledger.handle(self.replies.popleft(), self.now_s))

    def sequence_finishes(self) -> None:
        self.free |= self.held.pop(self.running.pop())

    @precondition(lambda self: any(link.pushes for link in self.links))
    @rule()
    def a_push_fails(self) -> None:
        link = next(link for link in self.links if link.pushes)
        self.land(link, next(iter(link.pushes)), fails=True)

    def land(self, link: Link, push_id: int, fails: bool = False) -> None:
        push = link.pushes.pop(push_id).push
        for page in push.target:
            assert page in self.held.get(push.xfer_id, set()), "a write hit pages that were freed"
            if not fails:
                key = (push.xfer_id, page)
                self.landed[key] = self.landed.get(key, 0) + 1
        error = TransferError("copy failed") if fails else None
        event = PushDone(xfer_id=push.xfer_id, push_id=push_id, error=error)
        self.act_p(self.outbox.handle(event, self.now_s))
        self.fence_drained()

    @precondition(lambda self: self.legs)
    @rule(data=st.data(), on_prefill=st.booleans(), on_decode=st.booleans())
    def router_cancels(self, data: st.DataObject, on_prefill: bool, on_decode: bool) -> None:
        self.cancel(self.pick(data), on_prefill, on_decode)

    @precondition(lambda self: any(link.pushes for link in self.links))
    @rule(on_prefill=st.booleans(), on_decode=st.booleans())
    def router_cancels_what_is_being_written(self, on_prefill: bool, on_decode: bool) -> None:
        push = next(push for link in self.links for push in link.pushes.values())
        self.cancel(self.legs[push.push.xfer_id], on_prefill, on_decode)

    def cancel(self, leg: Leg, on_prefill: bool, on_decode: bool) -> None:
        if on_prefill and not leg.over_here:
            leg.over_here = True
            self.act_p(self.outbox.handle(GivenUp(xfer_id=leg.xfer_id), self.now_s))
        expected = leg not in self.pending_expects
        if on_decode and expected and not leg.ended_there and leg.xfer_id not in self.running:
            leg.ended_there = True
            event = Withdrawn(xfer_id=leg.xfer_id, error=CancelledByPeerError("client left"))
            self.act_d(self.ledger.handle(event, self.now_s))

    @precondition(lambda self: self.link().alive)
    @rule()
    def lose_session(self) -> None:
        link = self.link()
        link.alive = False
        link.to_decode.clear()
        link.to_prefill.clear()
        self.act_d(self.ledger.handle(SessionLost(session=link.session), self.now_s))
        event = PeerDown(peer=D, error=WorkerLostError("session broke"))
        self.act_p(self.outbox.handle(event, self.now_s))
        self.fence_drained()

    def fence_drained(self) -> None:
        for link in self.links:
            if not link.alive and not link.pushes:
                self.act_d(self.ledger.handle(PeerFenced(session=link.session), self.now_s))

    @precondition(lambda self: not self.link().alive)
    @rule()
    def reconnect(self) -> None:
        self.connect()

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.act_d(self.ledger.tick(self.now_s))

    @invariant()
    def books_are_consistent(self) -> None:
        self.ledger.check_integrity()
        self.outbox.check_integrity()
        used = set().union(*self.held.values()) if self.held else set()
        assert len(self.free) + sum(map(len, self.held.values())) == NUM_BLOCKS
        assert not used & self.free

    def teardown(self) -> None:
        for leg in self.legs.values():
            if not leg.over_here:
                leg.over_here = True
                self.act_p(self.outbox.handle(GivenUp(xfer_id=leg.xfer_id), self.now_s))
        self.settle()
        self.now_s += 100.0
        self.act_d(self.ledger.tick(self.now_s))
        self.settle()
        assert self.ledger.in_flight() == 0
        assert self.outbox.in_flight() == 0
        assert len(self.free) == NUM_BLOCKS

    def settle(self) -> None:
        while self.busy():
            if self.link().to_decode:
                self.deliver_to_decode(1)
            elif self.link().to_prefill:
                self.deliver_to_prefill()
            elif self.replies:
                self.engine_released()
            elif self.running:
                self.sequence_finishes()
            else:
                link = next(link for link in self.links if link.pushes)
                self.land(link, next(iter(link.pushes)))

    def busy(self) -> bool:
        link = self.link()
        return bool(
            link.to_decode
            or link.to_prefill
            or self.replies
            or self.running
            or any(other.pushes for other in self.links)
        )


TestHandOff = HandOffMachine.TestCase
TestHandOff.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
