"""A hand-off that is given up while the backend has its pages queued: outbox and ledger over a slow link, in virtual
time.
"""

from collections import deque
from dataclasses import dataclass, field

import pytest

from baton.errors import CancelledByPeerError, InvariantError, TransferError
from baton.generation import TokenSample
from baton.ids import BlockId, Incarnation, LayerName, WorkerId, WorkerIdentity, XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from kv_transfer.heads import plan_link
from kv_transfer.ledger.ledger import (
    Expected,
    FromPeer,
    PagesReleased,
    PagesReserved,
    SessionOpened,
    TransferLedger,
    Withdrawn,
)
from kv_transfer.ledger.outbox import (
    FirstTokensDrawn,
    FromDecode,
    HandOffDone,
    Opened,
    Outbox,
    OutboxAction,
    OutboxEvent,
    OutgoingCancelled,
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
)
from kv_transfer.messages import Heartbeat, Quiesced, SessionId
from kv_transfer.plan import Grant
from kv_transfer.ports import begin_write
from tests.kv_transfer.permits import permit

LAYERS = 80
LAYOUT = KvLayout(
    model_fingerprint="f",
    dtype="float32",
    block_tokens=1,
    num_kv_heads=1,
    head_dim=1,
    layers=tuple(LayerName(f"layer.{i}") for i in range(LAYERS)),
)
LINK = plan_link(LAYOUT, LAYOUT)
P = WorkerIdentity(worker_id=WorkerId("p"), incarnation=Incarnation(1))
D = WorkerIdentity(worker_id=WorkerId("d"), incarnation=Incarnation(2))
SESSION = SessionId(1)
BIG, OTHER = XferId("big"), XferId("other")
SECONDS_PER_PUSH = 0.1
LIMITS = LedgerLimits(
    expect_timeout_s=600.0,
    reserve_timeout_s=60.0,
    quiesce_timeout_s=5.0,
    lease_s=5.0,
    retry_grace_s=2.0,
    checksums=False,
)


@dataclass
class Pair:
    """Both ends of one session. The link writes one push after the other, each for as long."""

    now_s: float = 0.0
    outbox: Outbox = field(default_factory=lambda: Outbox(LAYOUT))
    ledger: TransferLedger = field(default_factory=lambda: TransferLedger(LIMITS))
    queue: deque[PageWrite] = field(default_factory=deque)
    written: list[XferId] = field(default_factory=list)
    happened: list[object] = field(default_factory=list)

    def open(self, xfer_id: XferId, page: int, *, layers: int) -> None:
        """A prompt of one page is expected, granted, and computed as far."""
        claims = permit(xfer_id, num_blocks=1, source=P, target=D)
        self.act_d(self.ledger.handle(Expected(permit=claims), self.now_s))
        self.grants = Grant(held_blocks=0, blocks=(BlockId(page),))
        self.tell_p(Opened(permit=claims))
        self.tell_p(Started(xfer_id=xfer_id))
        for layer in range(layers):
            self.export(xfer_id, layer)

    def export(self, xfer_id: XferId, layer: int) -> None:
        self.tell_p(PageWrite(xfer_id=xfer_id, layer_index=layer, source=(BlockId(0),)))

    def cancel(self, xfer_id: XferId) -> None:
        """The client left: both legs are cancelled."""
        self.tell_p(OutgoingCancelled(xfer_id=xfer_id))
        error = CancelledByPeerError("the client left")
        self.act_d(self.ledger.handle(Withdrawn(xfer_id=xfer_id, error=error), self.now_s))

    def write_for(self, seconds: float) -> None:
        """What the link carries in so much time; a push that is given up takes none."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            error = self._write_next()
            if error is None:
                self.now_s += SECONDS_PER_PUSH
            beat = FromPeer(session=SESSION, peer=P, message=Heartbeat(number=1))
            self.act_d(self.ledger.handle(beat, self.now_s))
            self.act_d(self.ledger.tick(self.now_s))

    def _write_next(self) -> TransferError | None:
        if not self.queue:
            return None
        write, error = self.queue.popleft(), None
        try:
            begin_write(write, None)
            self.written.append(write.xfer_id)
        except TransferError as given_up:
            error = given_up
        self.tell_p(PushDone(xfer_id=write.xfer_id, push_id=write.push_id, error=error))
        return error

    def tell_p(self, event: OutboxEvent) -> None:
        self.act_p(self.outbox.handle(event, self.now_s))
        self.outbox.check_integrity()

    def act_p(self, actions: list[OutboxAction]) -> None:
        for action in actions:
            self.happened.append(action)
            match action:
                case Send():
                    said = FromPeer(session=SESSION, peer=P, message=action.message)
                    self.act_d(self.ledger.handle(said, self.now_s))
                case StartPush():
                    self.queue.append(action.write)

    def act_d(self, actions: list[LedgerAction]) -> None:
        for action in actions:
            self.happened.append(action)
            match action:
                case ToPeer():
                    self.tell_p(FromDecode(peer=D, message=action.message))
                case ReservePages():
                    reserved = PagesReserved(xfer_id=action.xfer_id, grant=self.grants)
                    self.act_d(self.ledger.handle(reserved, self.now_s))
                case FreePages():
                    released = PagesReleased(xfer_id=action.xfer_id)
                    self.act_d(self.ledger.handle(released, self.now_s))

    def count(self, kind: type) -> int:
        return sum(isinstance(action, kind) for action in self.happened)


@pytest.fixture
def pair() -> Pair:
    """Eight seconds of pushes of one prompt are queued, and behind them all of another but its last layer."""
    pair = Pair()
    opened = SessionOpened(session=SESSION, peer=P, link=LINK)
    pair.act_d(pair.ledger.handle(opened, 0.0))
    pair.tell_p(PeerUp(peer=D, region_blocks=10, link=LINK))
    pair.grants = Grant(held_blocks=0, blocks=())
    pair.open(BIG, 1, layers=LAYERS)
    pair.open(OTHER, 2, layers=LAYERS - 1)
    assert len(pair.queue) == 2 * LAYERS - 1
    return pair


def test_a_cancelled_hand_off_gives_up_its_queued_pushes_and_the_others_of_the_pair_go_on(
    pair: Pair,
):
    pair.write_for(2 * SECONDS_PER_PUSH)
    assert begins(pair.queue[0])
    pair.cancel(BIG)
    quiesced = Send(peer=D, message=Quiesced(xfer_id=BIG, attempt=1))
    assert quiesced not in pair.happened  # one push of it is on its way
    pair.tell_p(PushDone(xfer_id=BIG, push_id=pair.queue.popleft().push_id))
    assert quiesced in pair.happened
    assert FreePages(xfer_id=BIG) in pair.happened
    assert pair.written.count(BIG) == 2

    pair.export(OTHER, LAYERS - 1)
    pair.tell_p(FirstTokensDrawn(xfer_id=OTHER, first_tokens=(TokenSample(sample=0, token=5),)))
    pair.write_for((LAYERS + 1) * SECONDS_PER_PUSH)
    assert not pair.queue
    assert pair.count(EndSession) == 0
    assert [done.xfer_id for done in pair.happened if isinstance(done, HandOffDone)] == [OTHER]
    assert pair.count(StartDecoding) == 1
    assert pair.outbox.in_flight() == 0


def test_a_cancelled_hand_off_does_not_wait_for_its_turn_behind_another_one(pair: Pair):
    """Eight seconds are queued before its first push: longer than a decode worker waits."""
    pair.write_for(2 * SECONDS_PER_PUSH)
    pair.cancel(OTHER)
    assert Send(peer=D, message=Quiesced(xfer_id=OTHER, attempt=1)) in pair.happened
    assert FreePages(xfer_id=OTHER) in pair.happened
    pair.tell_p(FirstTokensDrawn(xfer_id=BIG, first_tokens=(TokenSample(sample=0, token=5),)))
    pair.write_for((LAYERS + 1) * SECONDS_PER_PUSH)
    assert not pair.queue
    assert pair.count(EndSession) == 0
    assert pair.written.count(OTHER) == 0
    assert [done.xfer_id for done in pair.happened if isinstance(done, HandOffDone)] == [BIG]
    assert pair.outbox.in_flight() == 0


def test_a_push_that_nobody_started_breaks_the_contract_if_it_has_landed(pair: Pair):
    with pytest.raises(InvariantError, match="was never started"):
        pair.tell_p(PushDone(xfer_id=BIG, push_id=10_000))
    pair.tell_p(PushDone(xfer_id=BIG, push_id=10_000, error=TransferError("given up")))
    pair.cancel(OTHER)
    with pytest.raises(InvariantError, match="was never started"):
        pair.tell_p(PushDone(xfer_id=OTHER, push_id=10_000))


def begins(write: PageWrite) -> bool:
    return write.begun is not None and write.begun.begin(write.push_id)
