"""One ledger against two prefill workers' outboxes over a lossy world: random interleavings, and a model of the pages.

A prefill worker has one rank, or two that share the heads out and of which each brings its half of every page.

The model knows what every page of the decode worker holds, who may write to it, and which copies are under way. A
worker that is stopped holds its copies where they are and goes on with them later; one that is killed drops them.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from baton.clock import ManualClock
from baton.errors import (
    CancelledByPeerError,
    CorruptKvError,
    EngineError,
    TransferError,
    WorkerLostError,
)
from baton.generation import TokenSample
from baton.ids import BlockId, Incarnation, LayerName, WorkerId, WorkerIdentity, XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from kv_transfer.heads import plan_link
from kv_transfer.lease import WriteLease
from kv_transfer.ledger.ledger import (
    Expected,
    FromPeer,
    PagesReleased,
    PagesReserved,
    PagesVerified,
    PeerFenced,
    Reassigned,
    SessionLost,
    SessionOpened,
    TransferLedger,
    Withdrawn,
)
from kv_transfer.ledger.outbox import (
    FirstTokensDrawn,
    FromDecode,
    HandOffDone,
    HandOffFailed,
    Opened,
    Outbox,
    OutboxAction,
    OutgoingCancelled,
    PeerDown,
    PeerUp,
    PushDone,
    Send,
    Started,
    StartPush,
)
from kv_transfer.ledger.transfer import (
    EndSession,
    FreePages,
    LedgerAction,
    LedgerLimits,
    ReservePages,
    StartDecoding,
    ToPeer,
    TransferFailed,
    VerifyPages,
    WriterLost,
)
from kv_transfer.memory.checksum import fold
from kv_transfer.messages import Heartbeat, PagesGranted, SessionId, ToDecode, ToPrefill
from kv_transfer.plan import Grant
from kv_transfer.ports import begin_write
from kv_transfer.ticket import Permit
from tests.kv_transfer.permits import D, permit

NUM_BLOCKS = 8
LAYERS = 2
LEASE_S = 5.0
LAYOUT = KvLayout(
    model_fingerprint="f",
    dtype="float32",
    block_tokens=1,
    num_kv_heads=2,
    head_dim=1,
    layers=tuple(LayerName(f"layer.{i}") for i in range(LAYERS)),
)
LIMITS = LedgerLimits(
    expect_timeout_s=50.0,
    reserve_timeout_s=20.0,
    quiesce_timeout_s=5.0,
    lease_s=LEASE_S,
    retry_grace_s=2.0,
    checksums=True,
)
FIRST = (TokenSample(sample=0, token=7),)
MAX_ATTEMPTS = 4
SETTLED_WITHIN = 20_000  # steps: many times what 16 transfers take


def kv(xfer_id: XferId, block: int, layer: int, rank: int) -> int:
    """What a rank's part of a page holds once it is written: the same whoever computes it."""
    return int(xfer_id[1:]) * 1000 + block * 100 + rank * 10 + layer + 1


def rank_of(asked: VerifyPages) -> int:
    """Whose part is to be verified."""
    (part,) = asked.link.slices
    return part.target_offset // part.length


@dataclass
class Compute:
    """One attempt's computation on a prefill worker."""

    permit: Permit
    started: bool = False
    todo: list[PageWrite] = field(default_factory=list)
    drawn: bool = False
    over: bool = False


@dataclass
class Leg:
    """What the router knows of one transfer."""

    permit: Permit
    told_decode: bool = False
    ended: bool = False
    started: bool = False


@dataclass
class Copy:
    """A push on its way: once it has begun nothing stops it."""

    action: StartPush
    attempt: int
    begun: bool = False

    @property
    def may_write(self) -> bool:
        """Whether it has begun, or still may."""
        of_all = self.action.write.begun
        return self.begun or of_all is None or not of_all.given_up


@dataclass
class Link:
    """One session: what travels each way, and the copies that may still land. The two ends learn of its end apart."""

    session: SessionId
    lease: WriteLease
    to_decode: deque[ToDecode] = field(default_factory=deque)
    to_prefill: deque[ToPrefill] = field(default_factory=deque)
    copies: dict[int, Copy] = field(default_factory=dict)
    up_here: bool = True  # as P sees it
    up_there: bool = True  # as D sees it
    fenced: bool = False
    heard_s: float = 0.0


class Prefiller:
    """One rank of a prefill worker: its identity changes with every start."""

    def __init__(self, name: str, incarnation: int, rank: int, ranks: int) -> None:
        self.identity = WorkerIdentity(
            worker_id=WorkerId(name), incarnation=Incarnation(incarnation)
        )
        self.rank = rank
        layout = replace(LAYOUT, num_kv_heads=2 // ranks, tp_size=ranks, tp_rank=rank)
        self.link = plan_link(layout, LAYOUT)
        self.outbox = Outbox(layout)
        self.work: dict[XferId, Compute] = {}
        self.links: list[Link] = []
        self.stopped = False


class HandOffMachine(RuleBasedStateMachine):
    """Every rule is something that can happen at any moment."""

    ranks = 1

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.ledger = TransferLedger(LIMITS)
        self.sessions = itertools.count(1)
        self.starts = itertools.count(1)
        self.workers = [rank for name in ("p0", "p1") for rank in self.new_worker(name)]
        self.dead_links: list[Link] = []
        self.legs: dict[XferId, Leg] = {}
        self.to_ledger: deque[Expected | Reassigned] = deque()
        self.free = set(range(NUM_BLOCKS))
        self.held: dict[XferId, list[BlockId]] = {}
        self.granted: dict[XferId, Grant] = {}
        self.writers: dict[XferId, set[SessionId]] = {}
        self.memory: dict[tuple[int, int, int], int] = {}
        self.written_by: dict[XferId, int] = {}  # the attempt
        self.verified: set[tuple[XferId, int]] = (
            set()
        )  # transfer and rank: what flips later is not seen
        self.siblings: deque[tuple[Prefiller, XferId, int]] = deque()
        self.corrupt: set[XferId] = set()
        self.line: deque[XferId] = deque()  # D's engine: waiting for room
        self.replies: deque[PagesReleased] = deque()
        self.verifying: deque[VerifyPages] = deque()
        self.running: set[XferId] = set()
        for worker in self.workers:
            self.connect(worker)

    @property
    def now_s(self) -> float:
        return self.clock.now_s()

    # Prefill workers.

    def new_worker(self, name: str) -> list[Prefiller]:
        start = next(self.starts)
        return [Prefiller(name, start, rank, self.ranks) for rank in range(self.ranks)]

    def group(self, which: int) -> list[Prefiller]:
        """All ranks of one prefill worker."""
        return self.workers[which * self.ranks : (which + 1) * self.ranks]

    def connect(self, worker: Prefiller) -> None:
        lease = WriteLease(self.clock, LEASE_S, self.now_s)
        link = Link(session=SessionId(next(self.sessions)), lease=lease, heard_s=self.now_s)
        worker.links.append(link)
        opened = SessionOpened(session=link.session, peer=worker.identity, link=worker.link)
        self.tell_d(opened)
        up = PeerUp(peer=D, region_blocks=NUM_BLOCKS, link=worker.link, checksums=True)
        self.act_p(worker, worker.outbox.handle(up, self.now_s))

    def act_p(self, worker: Prefiller, actions: list[OutboxAction]) -> None:
        for action in actions:
            link = worker.links[-1]
            match action:
                case Send():
                    if link.up_here and link.up_there:
                        link.to_decode.append(action.message)
                case StartPush():
                    attempt = worker.work[action.write.xfer_id].permit.attempt
                    link.copies[action.write.push_id] = Copy(action, attempt)
                case HandOffDone() | HandOffFailed():
                    compute = worker.work[action.xfer_id]
                    assert not compute.over, "a leg ends once"
                    compute.over = True
                    if isinstance(action, HandOffFailed):
                        attempt = compute.permit.attempt
                        self.siblings.append((worker, action.xfer_id, attempt))

    def tell_p(self, worker: Prefiller, event) -> None:
        self.act_p(worker, worker.outbox.handle(event, self.now_s))

    def siblings_stop(self) -> None:
        """What one rank cannot hand off the others give up."""
        failed, xfer_id, attempt = self.siblings.popleft()
        for worker in self.workers:
            compute = worker.work.get(xfer_id)
            if compute is None or compute.over or compute.permit.attempt != attempt:
                continue
            if worker.identity == failed.identity:
                compute.over = True
                self.tell_p(worker, OutgoingCancelled(xfer_id=xfer_id))

    def compute(self, worker: Prefiller, compute: Compute, steps: int) -> None:
        xfer_id = compute.permit.xfer_id
        if not compute.started:
            compute.started = True
            self.tell_p(worker, Started(xfer_id=xfer_id))
        for _ in range(min(steps, len(compute.todo))):
            self.tell_p(worker, compute.todo.pop(0))
        if not compute.todo and not compute.drawn:
            compute.drawn = True
            self.tell_p(worker, FirstTokensDrawn(xfer_id=xfer_id, first_tokens=FIRST))

    def begin_copy(self, worker: Prefiller, link: Link, push_id: int) -> None:
        """As a backend does: asked for the lease, and whether it is still wanted, right before the bytes move."""
        push = link.copies[push_id].action.write
        try:
            begin_write(push, link.lease)
        except TransferError as fault:
            error = fault
        else:
            link.copies[push_id].begun = True
            return
        del link.copies[push_id]
        self.tell_p(worker, PushDone(xfer_id=push.xfer_id, push_id=push_id, error=error))
        self.fence_drained(worker)

    def land(self, worker: Prefiller, link: Link, push_id: int, fails: bool = False) -> None:
        push = link.copies.pop(push_id).action.write
        values = []
        for source, page in zip(push.source, push.target, strict=True):
            assert page in self.held.get(push.xfer_id, ()), "a write hit pages that were freed"
            assert link.session in self.writers[push.xfer_id], "a write hit another's pages"
            value = kv(push.xfer_id, source, push.layer_index, worker.rank)
            values.append(value)
            if not fails:
                self.memory[page, push.layer_index, worker.rank] = value
        done = PushDone(
            xfer_id=push.xfer_id,
            push_id=push_id,
            error=TransferError("copy failed") if fails else None,
            hashes=None if fails else np.array(values, dtype=np.uint64),
        )
        self.tell_p(worker, done)
        self.fence_drained(worker)

    def notices(self, worker: Prefiller) -> None:
        """P learns that its session is over."""
        link = worker.links[-1]
        link.up_here = link.up_there = False
        link.lease.end()
        link.to_decode.clear()
        link.to_prefill.clear()
        self.tell_p(worker, PeerDown(peer=D, error=WorkerLostError("session broke")))
        self.tell_d(SessionLost(session=link.session))
        self.fence_drained(worker)

    def fence_drained(self, worker: Prefiller) -> None:
        """A sender lets go of the region when it knows of the session's end and copies no more."""
        for link in worker.links:
            if not link.up_here and not link.copies and not link.fenced:
                link.fenced = True
                self.tell_d(PeerFenced(session=link.session))

    # The decode worker.

    def tell_d(self, event) -> None:
        self.act_d(self.ledger.handle(event, self.now_s))

    def act_d(self, actions: list[LedgerAction]) -> None:
        for action in actions:
            match action:
                case ReservePages():
                    self.line.append(action.xfer_id)
                case VerifyPages():
                    self.verifying.append(action)
                case FreePages():
                    self.give_back(action.xfer_id)
                case StartDecoding():
                    assert action.first_tokens == FIRST
                    self.assert_written(action.xfer_id)
                    self.legs[action.xfer_id].started = True
                    self.running.add(action.xfer_id)
                case ToPeer():
                    self.send_to_peer(action)
                case WriterLost():
                    leg = self.legs[action.xfer_id]
                    assert not leg.ended, "a leg that is over lost its writer"
                case TransferFailed():
                    self.fail_leg(action)
                case EndSession():
                    self.end_session(action.session)

    def send_to_peer(self, action: ToPeer) -> None:
        message = action.message
        if isinstance(message, PagesGranted):
            self.granted_to(action.session, message)
        for worker in self.workers:
            link = worker.links[-1]
            if link.session == action.session and link.up_there:
                link.to_prefill.append(message)

    def granted_to(self, session: SessionId, granted: PagesGranted) -> None:
        self.assert_alone(granted.xfer_id, granted.attempt)
        # An attempt's first grant makes its pages blank, and those of the attempts before no business of theirs.
        if self.written_by.get(granted.xfer_id) != granted.attempt:
            self.written_by[granted.xfer_id] = granted.attempt
            self.writers[granted.xfer_id] = set()
            pages = set(granted.grant.blocks)
            self.memory = {at: kv for at, kv in self.memory.items() if at[0] not in pages}
        self.writers[granted.xfer_id].add(session)

    def assert_alone(self, xfer_id: XferId, attempt: int = 0) -> None:
        copies = [copy for link in self.all_links() for copy in link.copies.values()]
        mine = [c for c in copies if c.action.write.xfer_id == xfer_id and c.may_write]
        others = [copy for copy in mine if copy.attempt != attempt]
        assert not others, "pages were granted while somebody else may write there"

    def fail_leg(self, failed: TransferFailed) -> None:
        leg = self.legs[failed.xfer_id]
        assert not leg.ended, "a failure is told once, never after a withdrawal"
        assert not leg.started
        leg.ended = True
        if isinstance(failed.error, CorruptKvError):
            assert failed.xfer_id in self.corrupt

    def end_session(self, session: SessionId) -> None:
        for worker in self.workers:
            link = worker.links[-1]
            if link.session == session and link.up_there:
                link.up_there = False
                link.to_decode.clear()
                link.to_prefill.clear()
                self.tell_d(SessionLost(session=session))

    def assert_written(self, xfer_id: XferId) -> None:
        grant = self.granted[xfer_id]
        for index, page in enumerate(grant.blocks):
            for layer, rank in itertools.product(range(LAYERS), range(self.ranks)):
                wanted = kv(xfer_id, grant.held_blocks + index, layer, rank)
                assert self.memory.get((page, layer, rank)) == wanted, "decoding from wrong pages"

    def give_back(self, xfer_id: XferId) -> None:
        if xfer_id in self.line:
            self.line.remove(xfer_id)
        else:
            pages = self.held.pop(xfer_id)  # KeyError: freed twice
            self.assert_alone(xfer_id)
            self.free |= set(pages)
        self.replies.append(PagesReleased(xfer_id=xfer_id))

    def verify(self) -> None:
        asked = self.verifying.popleft()
        pages, rank = asked.grant.blocks, rank_of(asked)
        self.verified.add((asked.xfer_id, rank))
        found = [[self.memory.get((page, n, rank), 0) for page in pages] for n in range(LAYERS)]
        right = fold(np.array(found, dtype=np.uint64)).tobytes() == asked.checksums
        fault = None if right else "they differ"
        self.tell_d(
            PagesVerified(
                xfer_id=asked.xfer_id, session=asked.session, attempt=asked.attempt, fault=fault
            )
        )

    def has_room(self) -> bool:
        """Whether the first in line could be granted its pages now."""
        return bool(self.line) and len(self.free) >= self.legs[self.line[0]].permit.num_blocks

    def engine_grants(self, held: int) -> None:
        if not self.has_room():
            return
        xfer_id = self.line.popleft()
        leg = self.legs[xfer_id]
        pages = [BlockId(self.free.pop()) for _ in range(leg.permit.num_blocks)]
        held = min(held, len(pages))
        self.held[xfer_id] = pages
        self.granted[xfer_id] = Grant(held_blocks=held, blocks=tuple(pages[held:]))
        self.tell_d(PagesReserved(xfer_id=xfer_id, grant=self.granted[xfer_id]))

    def engine_released(self) -> None:
        self.tell_d(self.replies.popleft())

    def sequence_finishes(self) -> None:
        self.free |= set(self.held.pop(self.running.pop()))

    # The router.

    def start(self, worker: Prefiller, ask: Permit) -> None:
        todo = [
            PageWrite(
                xfer_id=ask.xfer_id,
                layer_index=layer,
                first_block=block,
                source=(BlockId(block),),
            )
            for block in range(ask.num_blocks)
            for layer in range(LAYERS)
        ]
        worker.work[ask.xfer_id] = Compute(permit=ask, todo=todo)
        self.tell_p(worker, Opened(permit=ask))

    @precondition(lambda self: len(self.legs) < 16)
    @rule(
        sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
        which=st.integers(0, 1),
        expect_first=st.booleans(),
        random=st.randoms(use_true_random=False),
        steps=st.integers(0, 40),
    )
    def submit(
        self, sizes: list[int], which: int, expect_first: bool, random: Random, steps: int
    ) -> None:
        for num_blocks in sizes:
            self.submit_one(num_blocks, which, expect_first)
        self.work(random, steps)

    def submit_one(self, num_blocks: int, which: int, expect_first: bool) -> None:
        source = self.group(which)[0].identity
        asked = permit(f"x{len(self.legs)}", num_blocks=num_blocks, source=source)
        self.legs[asked.xfer_id] = Leg(permit=asked)
        self.to_ledger.append(Expected(permit=asked))
        if expect_first:
            self.router_tells_d()
        for worker in self.group(which):
            self.start(worker, asked)

    def router_tells_d(self) -> None:
        event = self.to_ledger.popleft()
        leg = self.legs[event.permit.xfer_id]
        leg.told_decode = True
        if not leg.ended:
            self.tell_d(event)

    def orphans(self) -> list[Leg]:
        """Legs whose prefill worker has nothing more to give, as the router may know."""
        return [
            leg
            for leg in self.legs.values()
            if not leg.ended
            and not leg.started
            and leg.permit.attempt < MAX_ATTEMPTS
            and not any(self.computes(worker, leg) for worker in self.workers)
        ]

    def computes(self, worker: Prefiller, leg: Leg) -> bool:
        compute = worker.work.get(leg.permit.xfer_id)
        return compute is not None and compute.permit == leg.permit and not compute.over

    @precondition(lambda self: self.orphans())
    @rule(which=st.integers(0, 1), at_once=st.booleans(), random=st.randoms(use_true_random=False))
    def router_reassigns(self, which: int, at_once: bool, random: Random) -> None:
        for leg in self.orphans():
            self.reassign(leg, which, at_once)
        self.work(random, 20)

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), which=st.integers(0, 1), at_once=st.booleans())
    def router_reassigns_what_is_written(
        self, data: st.DataObject, which: int, at_once: bool
    ) -> None:
        """The router lost its own stream to P, which works on."""
        leg = self.legs[data.draw(st.sampled_from(sorted(self.writers)))]
        if not leg.ended and not leg.started and leg.permit.attempt < MAX_ATTEMPTS:
            self.reassign(leg, which, at_once)

    def reassign(self, leg: Leg, which: int, at_once: bool) -> None:
        group = self.group(which)
        if any(worker.outbox.state(leg.permit.xfer_id) is not None for worker in group):
            return  # an earlier attempt of its own has not stopped yet: it refuses
        leg.permit = permit(
            leg.permit.xfer_id,
            attempt=leg.permit.attempt + 1,
            num_blocks=leg.permit.num_blocks,
            source=group[0].identity,
        )
        self.to_ledger.append(Reassigned(permit=leg.permit))
        while at_once and self.to_ledger:
            self.router_tells_d()
        for worker in group:
            self.start(worker, leg.permit)

    @precondition(lambda self: self.legs)
    @rule(data=st.data(), on_prefill=st.booleans(), on_decode=st.booleans())
    def router_cancels(self, data: st.DataObject, on_prefill: bool, on_decode: bool) -> None:
        leg = data.draw(st.sampled_from(list(self.legs.values())))
        self.cancel(leg, on_prefill, on_decode)

    @precondition(lambda self: any(link.copies for link in self.all_links()))
    @rule(on_prefill=st.booleans(), on_decode=st.booleans())
    def router_cancels_what_is_being_written(self, on_prefill: bool, on_decode: bool) -> None:
        copy = next(copy for link in self.all_links() for copy in link.copies.values())
        self.cancel(self.legs[copy.action.write.xfer_id], on_prefill, on_decode)

    def cancel(self, leg: Leg, on_prefill: bool, on_decode: bool) -> None:
        xfer_id = leg.permit.xfer_id
        for worker in self.workers:
            compute = worker.work.get(xfer_id)
            if on_prefill and compute is not None and not compute.over:
                compute.over = True
                self.tell_p(worker, OutgoingCancelled(xfer_id=xfer_id))
        if on_decode and leg.told_decode and not leg.ended and not leg.started:
            leg.ended = True
            error = CancelledByPeerError("client left")
            self.tell_d(Withdrawn(xfer_id=xfer_id, error=error))

    # Work, and what goes wrong with it.

    def all_links(self) -> list[Link]:
        return [link for worker in self.workers for link in worker.links]

    def going(self) -> list[Prefiller]:
        return [worker for worker in self.workers if not worker.stopped]

    def progress(self) -> list[Callable[[], None]]:
        """What can go on by itself."""
        ops: list[Callable[[], None]] = []
        for worker in self.going():
            ops += self.progress_of(worker)
        for worker in self.workers:
            if worker.links[-1].to_decode:
                ops.append(partial(self.deliver_to_decode, worker, 1))
        ops += [self.router_tells_d] if self.to_ledger else []
        ops += [partial(self.engine_grants, 0)] if self.has_room() else []
        ops += [self.engine_released] if self.replies else []
        ops += [self.verify] if self.verifying else []
        ops += [self.siblings_stop] if self.siblings else []
        ops += [self.sequence_finishes] if self.running else []
        return ops

    def progress_of(self, worker: Prefiller) -> list[Callable[[], None]]:
        ops: list[Callable[[], None]] = []
        ops += [
            partial(self.compute, worker, compute, 3)
            for compute in worker.work.values()
            if not compute.over and not compute.drawn
        ]
        link = worker.links[-1]
        if link.to_prefill:
            ops.append(partial(self.deliver_to_prefill, worker))
        if link.up_here and not link.up_there:
            ops.append(partial(self.notices, worker))
        if not link.up_here:
            ops.append(partial(self.connect, worker))
        for ours in worker.links:
            for push_id, copy in ours.copies.items():
                step = self.land if copy.begun else self.begin_copy
                ops.append(partial(step, worker, ours, push_id))
        return ops

    # Most of what happens is work; without three of these rules hardly a transfer would get anywhere.
    @rule(random=st.randoms(use_true_random=False), steps=st.integers(1, 30))
    def work(self, random: Random, steps: int) -> None:
        for _ in range(steps):
            ops = self.progress()
            if ops:
                random.choice(ops)()
                self.books_are_consistent()

    @rule(random=st.randoms(use_true_random=False))
    def work_a_little(self, random: Random) -> None:
        self.work(random, 4)

    @rule(random=st.randoms(use_true_random=False))
    def work_hard(self, random: Random) -> None:
        self.work(random, 60)

    @precondition(lambda self: any(w.links[-1].to_decode for w in self.workers))
    @rule()
    def a_message_comes_twice(self) -> None:
        worker = next(w for w in self.workers if w.links[-1].to_decode)
        self.deliver_to_decode(worker, 2)

    def deliver_to_decode(self, worker: Prefiller, repeat: int) -> None:
        link = worker.links[-1]
        message = link.to_decode.popleft()
        link.heard_s = self.now_s
        for _ in range(repeat):
            self.tell_d(FromPeer(session=link.session, peer=worker.identity, message=message))

    def deliver_to_prefill(self, worker: Prefiller) -> None:
        message = worker.links[-1].to_prefill.popleft()
        self.tell_p(worker, FromDecode(peer=D, message=message))

    @precondition(lambda self: self.line)
    @rule(held=st.integers(0, 3), fails=st.booleans())
    def engine_answers(self, held: int, fails: bool) -> None:
        if not fails:
            self.engine_grants(held)
            return
        error = EngineError("can never fit")
        self.tell_d(PagesReleased(xfer_id=self.line.popleft(), error=error))

    @precondition(lambda self: any(x.started and not x.drawn for x in self.unfinished()))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        compute = data.draw(
            st.sampled_from([x for x in self.unfinished() if x.started and not x.drawn])
        )
        pages = tuple(map(BlockId, range(compute.permit.num_blocks)))
        compute.todo = [
            PageWrite(xfer_id=compute.permit.xfer_id, layer_index=layer, source=pages)
            for layer in range(LAYERS)
        ]

    def unfinished(self) -> list[Compute]:
        return [c for worker in self.going() for c in worker.work.values() if not c.over]

    @precondition(lambda self: any(c.begun for k in self.all_links() for c in k.copies.values()))
    @rule()
    def a_push_fails(self) -> None:
        for worker in self.going():
            for link in worker.links:
                for push_id in [n for n, copy in link.copies.items() if copy.begun][:1]:
                    self.land(worker, link, push_id, fails=True)
                    return

    @precondition(lambda self: self.verifying)
    @rule(data=st.data())
    def a_bit_flips_in_a_written_page(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(list(self.verifying)))
        page = data.draw(st.sampled_from(asked.grant.blocks))
        at = page, 0, rank_of(asked)
        # Of a transfer that was withdrawn meanwhile the pages may hold another's KV by now.
        if at in self.memory and page in self.held.get(asked.xfer_id, ()):
            self.memory[at] ^= 1
            self.corrupt.add(asked.xfer_id)

    @precondition(lambda self: self.memory)
    @rule(data=st.data())
    def a_bit_flips(self, data: st.DataObject) -> None:
        """In any page that was granted, while it is being written."""
        places = [
            (xfer_id, at)
            for xfer_id, grant in self.granted.items()
            if xfer_id in self.held and not self.legs[xfer_id].started
            for at in self.memory
            if at[0] in grant.blocks and (xfer_id, at[2]) not in self.verified
        ]
        if places:
            xfer_id, at = data.draw(st.sampled_from(places))
            self.memory[at] ^= 1
            self.corrupt.add(xfer_id)

    @rule(which=st.integers(0, 3))
    def a_session_breaks(self, which: int) -> None:
        """D learns of it first."""
        self.end_session(self.workers[which % len(self.workers)].links[-1].session)

    @rule(which=st.integers(0, 3))
    def stop(self, which: int) -> None:
        self.workers[which % len(self.workers)].stopped = True

    @rule(which=st.integers(0, 3), random=st.randoms(use_true_random=False))
    def go_on(self, which: int, random: Random) -> None:
        self.workers[which % len(self.workers)].stopped = False
        self.work(random, 20)

    @rule(which=st.integers(0, 1))
    def kill(self, which: int) -> None:
        """Its memory is unmapped by the kernel; it comes back as another incarnation."""
        killed = self.group(which)
        for link in [link for worker in killed for link in worker.links]:
            link.copies.clear()
            link.up_here = link.up_there = False
            if not link.fenced:
                self.tell_d(SessionLost(session=link.session))
                self.tell_d(PeerFenced(session=link.session))
        born = self.new_worker(killed[0].identity.worker_id)
        self.workers[which * self.ranks : (which + 1) * self.ranks] = born
        for worker in born:
            self.connect(worker)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0, 6.0, 25.0]), beats=st.booleans())
    def time_passes(self, seconds: float, beats: bool) -> None:
        """Without beats the way between the workers is cut without either end knowing."""
        while seconds > 0:
            step_s = min(seconds, 1.0)
            seconds -= step_s
            self.clock.advance(step_s)
            for worker in self.going() if beats else []:
                self.beat(worker)
            self.act_d(self.ledger.tick(self.now_s))
            self.books_are_consistent()
            for link in self.all_links():
                silent_s = self.now_s - link.heard_s
                assert not link.up_there or silent_s <= LEASE_S, "silence was not suspected"

    def beat(self, worker: Prefiller) -> None:
        link = worker.links[-1]
        if link.up_here and link.up_there:
            beat = Heartbeat(number=1)
            self.tell_d(FromPeer(session=link.session, peer=worker.identity, message=beat))
            link.lease.renew(self.now_s)
            link.heard_s = self.now_s

    @invariant()
    def books_are_consistent(self) -> None:
        self.ledger.check_integrity()
        for worker in self.workers:
            worker.outbox.check_integrity()
        used = [page for pages in self.held.values() for page in pages]
        assert len(used) == len(set(used)), "a page is given to two"
        assert len(self.free) + len(used) == NUM_BLOCKS
        assert not self.free & set(used)
        assert self.ledger.quarantined() <= len(used)

    def teardown(self) -> None:
        """Everyone wakes up, in half of the runs every leg is cancelled, and time passes: nothing is left."""
        for worker in self.workers:
            worker.stopped = False
        while self.to_ledger:
            self.router_tells_d()
        for leg in self.legs.values() if len(self.legs) % 2 else ():
            self.cancel(leg, True, True)
        self.settle()
        self.time_passes(120.0, beats=True)
        self.settle()
        assert self.ledger.in_flight() == 0
        assert self.ledger.quarantined() == 0
        assert [worker.outbox.in_flight() for worker in self.workers] == [0] * len(self.workers)
        assert len(self.free) == NUM_BLOCKS

    def settle(self) -> None:
        random = Random(0)
        for _ in range(SETTLED_WITHIN):
            ops = self.progress()
            if not ops:
                return
            random.choice(ops)()
        raise AssertionError(f"work goes on for ever: {self.progress()}")


class RanksMachine(HandOffMachine):
    """Both prefill workers have two ranks, which fill the pages of one."""

    ranks = 2


TestHandOff = HandOffMachine.TestCase
TestHandOff.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate],  # a run of this length takes minutes to shrink
    suppress_health_check=[HealthCheck.too_slow],
)
TestHandOffOfRanks = RanksMachine.TestCase
TestHandOffOfRanks.settings = settings(TestHandOff.settings, max_examples=80)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [HandOffMachine, RanksMachine])
def test_thousands_of_random_hand_offs_lose_and_corrupt_nothing(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(TestHandOff.settings, max_examples=3000, stateful_step_count=40),
    )
