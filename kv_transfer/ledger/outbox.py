"""The prefill worker's side of all hand-offs: which pages were granted by which peer, when they are pushed,
and when a transfer is over.

Counterpart of `ledger.py`. One transfer, from the router's word until nothing of it is on its way:

    OPENED ── first chunk ── RESERVING ── granted ── WRITING ── all landed ── COMMITTING ── verified ── over
       └──────────────────────────┴── cancelled, refused, failed ──┴── ABORTING ── nothing outstanding ── over

The engine exports pages layer by layer while it computes; they wait (`shipment.py`) until the decode worker has granted
its own, are pushed then, and are committed once every layer of every page has landed and the first tokens are known.
However a transfer ends early, its pushes that have not begun never do (`PageWrite.begun`), and the decode worker is told
(`Quiesced`) once those that have are over. It is told nothing once the way to its pages is
lost (`UnreachableError`): bytes may still be on that way when its pushes fail, and the session ends, by which the
decode worker fences this one.

    engine, router, sessions ── OutboxEvent ──▶ Outbox ── OutboxAction ──▶ sessions, connections, the leg's lifecycle
"""

import itertools
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, InvariantError, TransferError, UnreachableError
from baton.generation import TokenSample
from baton.ids import WorkerIdentity, XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from baton.story import StoryEntry, StoryLog
from kv_transfer.heads import LinkPlan, plan_link
from kv_transfer.ledger.shipment import Shipment
from kv_transfer.messages import (
    AbortRequest,
    Commit,
    Committed,
    GrantRefused,
    PagesGranted,
    Quiesced,
    Reserve,
    ToDecode,
    ToPrefill,
)
from kv_transfer.plan import check_grant
from kv_transfer.ticket import Permit, refuse_holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A prompt will be prefilled here for another worker."""

    permit: Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerUp:
    """The session with `peer` is open.

    Attributes:
        peer: The decode worker.
        region_blocks: Pages of its region.
        link: What is written of each page; None where both layouts are equal.
        checksums: Whether its commits have to carry them.
    """

    peer: WorkerIdentity
    region_blocks: int
    link: LinkPlan | None = None
    checksums: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDown:
    """The session with `peer` broke, or never came up."""

    peer: WorkerIdentity
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first chunk of the prompt is scheduled."""

    xfer_id: XferId


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokensDrawn:
    """The first tokens are known."""

    xfer_id: XferId
    first_tokens: tuple[TokenSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushDone:
    """A push landed in the peer's memory, or cannot.

    Attributes:
        xfer_id: Its transfer.
        push_id: Which one.
        error: Why not.
        hashes: Of the pages as they were pushed, `[pages]`, if the session wants them.
    """

    xfer_id: XferId
    push_id: int
    error: TransferError | None = None
    hashes: npt.NDArray[np.uint64] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingCancelled:
    """The leg is over here: stop, and let the peer know."""

    xfer_id: XferId


@dataclass(frozen=True, slots=True, kw_only=True)
class FromDecode:
    """A message of the session with `peer`."""

    peer: WorkerIdentity
    message: ToPrefill


OutboxEvent = (
    Opened
    | PeerUp
    | PeerDown
    | Started
    | PageWrite
    | FirstTokensDrawn
    | PushDone
    | OutgoingCancelled
    | FromDecode
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """To the session with `peer`: send this."""

    peer: WorkerIdentity
    message: ToDecode


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPush:
    """To the connection to `peer`: write these pages there and report `PushDone`."""

    peer: WorkerIdentity
    write: PageWrite


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffDone:
    """To the leg: the peer verified the commit.

    Attributes:
        peer: The worker that has them.
        blocks_sent: Pages written.
        bytes_sent: Their bytes.
        reserve_wait_s: From the first chunk until pages were granted.
        unhidden_s: From the first tokens until the verified commit.
    """

    xfer_id: XferId
    peer: WorkerIdentity
    blocks_sent: int
    bytes_sent: int
    reserve_wait_s: float
    unhidden_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffFailed:
    """To the leg: the pages will not be taken. Never said of a transfer that was cancelled here."""

    xfer_id: XferId
    error: BatonError


OutboxAction = Send | StartPush | HandOffDone | HandOffFailed


class OutgoingState(Enum):
    """Where one transfer stands on the prefill worker."""

    OPENED = "opened"
    RESERVING = "reserving"
    WRITING = "writing"
    COMMITTING = "committing"
    ABORTING = "aborting"
    OVER = "over"


_S = OutgoingState
TRANSITIONS: dict[OutgoingState, frozenset[OutgoingState]] = {
    _S.OPENED: frozenset({_S.RESERVING, _S.ABORTING}),
    _S.RESERVING: frozenset({_S.WRITING, _S.ABORTING}),
    _S.WRITING: frozenset({_S.COMMITTING, _S.ABORTING}),
    _S.COMMITTING: frozenset({_S.ABORTING, _S.OVER}),
    _S.ABORTING: frozenset({_S.OVER}),
    _S.OVER: frozenset(),
}
_ROUTINE = (PageWrite, PushDone)
"""Events of which there are many: logged where more follows from them than a push."""


class Outbox:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds).

    Every method returns the actions the shell must carry out, in order. Decides which transfer an event means and
    whether the peer may say it; how that transfer goes on is decided by `OutgoingTransfer`. Not thread-safe: one owner.
    """

    def __init__(self, layout: KvLayout) -> None:
        self._num_layers = len(layout.layers)
        self._whole = plan_link(layout, layout)
        self._transfers: dict[XferId, OutgoingTransfer] = {}
        self._peers: dict[WorkerIdentity, PeerUp] = {}
        # To whose pages the way is lost, until their session has ended.
        self._cut_off: set[WorkerIdentity] = set()
        self._push_ids = itertools.count(1)
        self._log = StoryLog("outbox")
        self.refused = 0
        """Messages of peers that fit nothing here: late, repeated, or of another attempt."""

    def handle(self, event: OutboxEvent, now_s: float) -> list[OutboxAction]:
        """Applies one event; what names an unknown transfer has no effect."""
        match event:
            case Opened():
                return self._open(event, now_s)
            case PeerUp():
                return self._peer_up(event, now_s)
            case PeerDown():
                return self._peer_down(event, now_s)
            case FromDecode():
                return self._from_decode(event, now_s)
            case PushDone():
                return self._push_done(event, now_s)
            case _:
                return self._from_worker(event, now_s)

    def is_up(self, peer: WorkerIdentity) -> bool:
        """Whether the session with `peer` is open."""
        return peer in self._peers

    def state(self, xfer_id: XferId) -> OutgoingState | None:
        """Where a transfer stands; None once it is over."""
        transfer = self._transfers.get(xfer_id)
        return transfer.state if transfer else None

    def granted(self, xfer_id: XferId) -> bool:
        """Whether the peer's pages were granted; also for a transfer that is over."""
        transfer = self._transfers.get(xfer_id)
        return transfer is None or transfer.shipment.granted

    def in_flight(self) -> int:
        """Transfers that are not over."""
        return len(self._transfers)

    def story(self, xfer_id: XferId) -> tuple[StoryEntry, ...]:
        """What has lately happened to a transfer, oldest first."""
        return self._log.story(xfer_id)

    def check_integrity(self) -> None:
        """Raises InvariantError if the outbox contradicts itself."""
        for xfer_id, transfer in self._transfers.items():
            transfer.check_integrity()
            if xfer_id != transfer.xfer_id:
                raise transfer.broken(f"kept as {xfer_id}")

    def _open(self, event: Opened, now_s: float) -> list[OutboxAction]:
        permit = event.permit
        known = self._transfers.get(permit.xfer_id)
        if known is not None:
            raise known.broken("opened twice")
        shipment = Shipment(
            permit, num_layers=self._num_layers, push_ids=self._push_ids, log=self._log
        )
        transfer = OutgoingTransfer(permit=permit, shipment=shipment, log=self._log)
        self._transfers[permit.xfer_id] = transfer
        return self._kept(transfer, event, [], now_s)

    def _peer_up(self, event: PeerUp, now_s: float) -> list[OutboxAction]:
        self._peers[event.peer] = event
        self._cut_off.discard(event.peer)
        actions: list[OutboxAction] = []
        for transfer in self._transfers_to(event.peer):
            actions += self._kept(transfer, event, transfer.peer_up(), now_s)
        return actions

    def _peer_down(self, event: PeerDown, now_s: float) -> list[OutboxAction]:
        self._peers.pop(event.peer, None)
        self._cut_off.discard(event.peer)
        actions: list[OutboxAction] = []
        for transfer in self._transfers_to(event.peer):
            actions += self._kept(transfer, event, transfer.peer_down(event.error), now_s)
        return actions

    def _from_worker(
        self, event: Started | PageWrite | FirstTokensDrawn | OutgoingCancelled, now_s: float
    ) -> list[OutboxAction]:
        """The engine's word, or the router's; of a transfer that is ending here it has no effect."""
        transfer = self._transfers.get(event.xfer_id)
        if transfer is None or transfer.ending:
            return []
        connected = transfer.peer in self._peers
        match event:
            case Started():
                actions = transfer.start(now_s, connected=connected)
            case PageWrite():
                actions = transfer.export(event, now_s, connected=connected)
            case FirstTokensDrawn():
                actions = transfer.drew(event.first_tokens, now_s)
            case OutgoingCancelled():
                actions = transfer.cancel()
        return self._kept(transfer, event, actions, now_s)

    def _from_decode(self, event: FromDecode, now_s: float) -> list[OutboxAction]:
        message = event.message
        transfer = self._transfers.get(message.xfer_id)
        meant = transfer is not None and transfer.peer == event.peer
        if transfer is None or not meant or transfer.attempt != message.attempt:
            return self._refuse(event, now_s)
        if transfer.ending:
            return []
        match message:
            case Committed():
                actions = transfer.committed(now_s)
            case PagesGranted() if transfer.state is not _S.RESERVING:
                self.refused += 1  # a ticket that is shown again is worth nothing
                actions = []
            case PagesGranted():
                peer = self._peers[transfer.peer]
                actions = transfer.granted(message, peer, peer.link or self._whole, now_s)
            case GrantRefused() | AbortRequest():
                actions = transfer.fail(message.error)
        return self._kept(transfer, message, actions, now_s)

    def _refuse(self, event: FromDecode, now_s: float) -> list[OutboxAction]:
        """It is over here, and nothing outstanding: a peer that still waits for it is told so."""
        self.refused += 1
        message = event.message
        actions: list[OutboxAction] = []
        if isinstance(message, AbortRequest) and event.peer not in self._cut_off:
            quiesced = Quiesced(xfer_id=message.xfer_id, attempt=message.attempt)
            actions = [Send(peer=event.peer, message=quiesced)]
        self._log.record(message.xfer_id, now_s, message, actions)
        return actions

    def _push_done(self, event: PushDone, now_s: float) -> list[OutboxAction]:
        transfer = self._transfers.get(event.xfer_id)
        if transfer is None:
            if event.error is not None:
                return []  # given up before its turn came
            raise InvariantError(
                f"push {event.push_id} of {event.xfer_id} was never started",
                story=self.story(event.xfer_id),
            )
        # A transfer that was cut off before is of a session that is over, and says nothing of the next one.
        if isinstance(event.error, UnreachableError) and not transfer.cut_off:
            self._cut_off.add(transfer.peer)
            for other in self._transfers_to(transfer.peer):
                other.cut_off = True
        return self._kept(transfer, event, transfer.push_done(event), now_s)

    def _kept(
        self,
        transfer: "OutgoingTransfer",
        event: OutboxEvent | ToPrefill,
        actions: list[OutboxAction],
        now_s: float,
    ) -> list[OutboxAction]:
        """What followed of an event, which is logged and may have been the transfer's last."""
        # Whatever else than pushes follows comes last.
        if type(event) not in _ROUTINE or (actions and type(actions[-1]) is not StartPush):
            self._log.record_kinds(transfer.xfer_id, now_s, event, actions)
        if transfer.state is _S.OVER:
            del self._transfers[transfer.xfer_id]
        return actions

    def _transfers_to(self, peer: WorkerIdentity) -> list["OutgoingTransfer"]:
        return [transfer for transfer in self._transfers.values() if transfer.peer == peer]


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """One transfer. Pure; every method returns what the shell has to do. Changed by the outbox only.

    Attributes:
        permit: The router's word for this attempt.
        shipment: The pages.
        log: Of the outbox.
        state: Where it stands.
        started_s: When the first chunk of the prompt was scheduled.
        granted_s: When the peer's pages were there.
        drawn_s: When the first tokens were.
        first_tokens: Those, once they are drawn.
        cut_off: Whether the session is over, or the way to the pages lost, so that the peer is told nothing.
    """

    permit: Permit
    shipment: Shipment
    log: StoryLog
    state: OutgoingState = _S.OPENED
    started_s: float | None = None
    granted_s: float = 0.0
    drawn_s: float = 0.0
    first_tokens: tuple[TokenSample, ...] | None = None
    cut_off: bool = False

    @property
    def xfer_id(self) -> XferId:
        """Its name."""
        return self.permit.xfer_id

    @property
    def attempt(self) -> int:
        """Which attempt at it this worker makes."""
        return self.permit.attempt

    @property
    def peer(self) -> WorkerIdentity:
        """The decode worker that takes the pages."""
        return self.permit.target

    @property
    def ending(self) -> bool:
        """Whether it only waits for pushes to come back, or not even for that."""
        return self.state in (_S.ABORTING, _S.OVER)

    def start(self, now_s: float, *, connected: bool) -> list[OutboxAction]:
        """A sign that the prompt is being computed; a later one means it was preempted.

        Args:
            now_s: When.
            connected: Whether the peer can be asked for pages already (else `peer_up` does).
        """
        if self.started_s is not None:
            return []
        self.started_s = now_s
        return self._reserve() if connected else []

    def peer_up(self) -> list[OutboxAction]:
        """The session is open."""
        waits = self.started_s is not None and self.state is _S.OPENED
        return self._reserve() if waits else []

    def export(self, write: PageWrite, now_s: float, *, connected: bool) -> list[OutboxAction]:
        """The engine completed pages of one layer."""
        if self.state is _S.COMMITTING:
            raise self.broken("pages were exported after its commit")
        try:
            self.shipment.export(write)
        except TransferError as error:
            return self.fail(error)
        return [*self.start(now_s, connected=connected), *self._push()]

    def granted(
        self, granted: PagesGranted, peer: PeerUp, link: LinkPlan, now_s: float
    ) -> list[OutboxAction]:
        """The peer answers the reservation; `link` is what is written of each page."""
        grant, num_blocks = granted.grant, self.permit.num_blocks
        if granted.cache_scope != self.permit.cache_scope:
            return self.fail(refuse_holder("cache_scope"))
        try:
            check_grant(grant, num_blocks=num_blocks, region_blocks=peer.region_blocks)
        except TransferError as error:
            return self.fail(error)
        self._move(_S.WRITING)
        self.granted_s = now_s
        self.shipment.grant(grant, link, checksums=peer.checksums)
        return [*self._push(), *self._try_commit()]

    def drew(self, first_tokens: tuple[TokenSample, ...], now_s: float) -> list[OutboxAction]:
        """The first tokens are known."""
        self.first_tokens, self.drawn_s = first_tokens, now_s
        return self._try_commit()

    def push_done(self, event: PushDone) -> list[OutboxAction]:
        """A push came back, landed or not."""
        if not self.shipment.is_outstanding(event.push_id):
            if event.error is not None:
                return []  # given up before its turn came; by this transfer, or by one before it
            raise self.broken(f"push {event.push_id} was never started")
        if self.state is _S.ABORTING:
            self.shipment.drop(event.push_id)
            return self._try_quiesce()
        if event.error is not None:
            self.shipment.drop(event.push_id)
            return self.fail(event.error)
        self.shipment.land(event.push_id, event.hashes)
        return [*self._push(), *self._try_commit()]

    def committed(self, now_s: float) -> list[OutboxAction]:
        """The peer verified the commit; before there was one it says nothing."""
        if self.state is not _S.COMMITTING:
            return []
        assert self.started_s is not None
        self._move(_S.OVER)
        done = HandOffDone(
            xfer_id=self.xfer_id,
            peer=self.peer,
            blocks_sent=self.shipment.num_pages,
            bytes_sent=self.shipment.num_bytes,
            reserve_wait_s=self.granted_s - self.started_s,
            unhidden_s=now_s - self.drawn_s,
        )
        return [done]

    def peer_down(self, error: BatonError) -> list[OutboxAction]:
        """The session broke, or never came up."""
        self.cut_off = True
        return [] if self.ending else self.fail(error)

    def fail(self, error: BatonError) -> list[OutboxAction]:
        """The pages will not be taken."""
        return [HandOffFailed(xfer_id=self.xfer_id, error=error), *self.cancel()]

    def cancel(self) -> list[OutboxAction]:
        """The leg is over here: no push begins any more, and the peer is told once those that have begun are over."""
        self.shipment.stop()
        self._move(_S.ABORTING)
        return self._try_quiesce()

    def broken(self, what: str) -> InvariantError:
        """An error with this transfer's story."""
        return InvariantError(
            f"transfer {self.xfer_id}: {what}", story=self.log.story(self.xfer_id)
        )

    def check_integrity(self) -> None:
        """Raises InvariantError if it contradicts itself."""
        self.shipment.check_integrity()
        granted, outstanding = self.shipment.granted, self.shipment.outstanding
        consistent = (
            self.state is not _S.OVER
            and (granted or self.state not in (_S.WRITING, _S.COMMITTING))
            and not (self.state is _S.COMMITTING and outstanding)
            and not (self.state is _S.ABORTING and not outstanding)
        )
        if not consistent:
            raise self.broken(f"inconsistent: {self!r}")

    def _reserve(self) -> list[OutboxAction]:
        self._move(_S.RESERVING)
        return [self._to_peer(Reserve(permit=self.permit))]

    def _push(self) -> list[OutboxAction]:
        return [StartPush(peer=self.peer, write=write) for write in self.shipment.start()]

    def _try_commit(self) -> list[OutboxAction]:
        if self.state is not _S.WRITING or self.first_tokens is None or not self.shipment.complete:
            return []
        self._move(_S.COMMITTING)
        commit = Commit(
            xfer_id=self.xfer_id,
            attempt=self.attempt,
            num_blocks=self.shipment.num_pages,
            num_bytes=self.shipment.num_bytes,
            first_tokens=self.first_tokens,
            checksums=self.shipment.checksums(),
        )
        return [self._to_peer(commit)]

    def _try_quiesce(self) -> list[OutboxAction]:
        if self.shipment.outstanding:
            return []
        self._move(_S.OVER)
        quiesced = Quiesced(xfer_id=self.xfer_id, attempt=self.attempt)
        return [] if self.cut_off else [self._to_peer(quiesced)]

    def _to_peer(self, message: ToDecode) -> Send:
        return Send(peer=self.peer, message=message)

    def _move(self, state: OutgoingState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise self.broken(f"{self.state} to {state}")
        self.state = state
