"""The prefill worker's book of hand-offs: what was opened, who takes it, and when it is over.

Counterpart of `ledger.py`. The engine exports pages layer by layer while it computes; they wait (`shipment.py`) until the
decode worker has granted its own, are pushed then, and are committed once every layer of every page has landed and the first
tokens are known. How one hand-off goes stands in `sending.py`; here is which one is meant, and by whom.
"""

import itertools
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, InvariantError, TransferError
from baton.generation import TokenSample
from baton.ids import WorkerIdentity, XferId
from baton.layout import KvLayout
from kv_transfer.heads import LinkPlan, plan_link
from kv_transfer.ledger.shipment import Shipment, StartPush
from kv_transfer.messages import (
    AbortRequest,
    Commit,
    Committed,
    Granted,
    GrantRefused,
    Quiesced,
    Reserve,
    ToDecode,
    ToPrefill,
)
from kv_transfer.plan import Export, check_grant
from kv_transfer.ticket import Permit, refuse_holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A prompt will be prefilled here for another worker."""

    permit: Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerUp:
    """The session with `peer` is open.

    Attributes:
        peer: Who.
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
class Exported:
    """The engine completed pages of one layer."""

    xfer_id: XferId
    export: Export


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
class GivenUp:
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
    | Exported
    | FirstTokensDrawn
    | PushDone
    | GivenUp
    | FromDecode
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """To the session with `peer`: send this."""

    peer: WorkerIdentity
    message: ToDecode


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """To the leg: the peer verified the commit.

    Attributes:
        peer: Who has them.
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
class HandOverFailed:
    """To the leg: the pages will not be taken. Never said of a leg that was given up here."""

    xfer_id: XferId
    error: BatonError


OutboxAction = Send | StartPush | HandOver | HandOverFailed


class OutgoingState(Enum):
    """Where one hand-off stands on the prefill worker."""

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


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """Pure. Every method returns what the shell has to do. Changed by the outbox only.

    Attributes:
        permit: The router's word for this attempt.
        shipment: The pages.
        state: Where it stands.
        started_s: When the first chunk of the prompt was scheduled.
        granted_s: When the peer's pages were there.
        drawn_s: When the first tokens were.
        first_tokens: Those, once they are drawn.
        cut_off: Whether the session is over, so that the peer can be told nothing.
    """

    permit: Permit
    shipment: Shipment
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
        """Who takes the pages."""
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

    def export(self, export: Export, now_s: float, *, connected: bool) -> list[OutboxAction]:
        """The engine completed pages of one layer."""
        if self.state is _S.COMMITTING:
            raise InvariantError(f"pages of {self.xfer_id} were exported after its commit")
        try:
            self.shipment.export(export)
        except TransferError as error:
            return self.fail(error)
        return [*self.start(now_s, connected=connected), *self.shipment.start()]

    def granted(
        self, granted: Granted, peer: PeerUp, link: LinkPlan, now_s: float
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
        return [*self.shipment.start(), *self._try_commit()]

    def drew(self, first_tokens: tuple[TokenSample, ...], now_s: float) -> list[OutboxAction]:
        """The first tokens are known."""
        self.first_tokens, self.drawn_s = first_tokens, now_s
        return self._try_commit()

    def push_done(self, event: PushDone) -> list[OutboxAction]:
        """A push came back, landed or not."""
        if not self.shipment.is_outstanding(event.push_id):
            raise InvariantError(f"push {event.push_id} of {self.xfer_id} was never started")
        if self.state is _S.ABORTING:
            self.shipment.give_up(event.push_id)
            return self._try_quiesce()
        if event.error is not None:
            self.shipment.give_up(event.push_id)
            return self.fail(event.error)
        self.shipment.land(event.push_id, event.hashes)
        return [*self.shipment.start(), *self._try_commit()]

    def committed(self, now_s: float) -> list[OutboxAction]:
        """The peer verified the commit; before there was one it says nothing."""
        if self.state is not _S.COMMITTING:
            return []
        assert self.started_s is not None
        self._move(_S.OVER)
        done = HandOver(
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
        return [HandOverFailed(xfer_id=self.xfer_id, error=error), *self.give_up()]

    def give_up(self) -> list[OutboxAction]:
        """The leg is over here: nothing more is pushed, and the peer is told once nothing is outstanding."""
        self.shipment.stop()
        self._move(_S.ABORTING)
        return self._try_quiesce()

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
            raise InvariantError(f"hand-off {self.xfer_id} is inconsistent: {self!r}")

    def _reserve(self) -> list[OutboxAction]:
        self._move(_S.RESERVING)
        return [self._tell(Reserve(permit=self.permit))]

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
        return [self._tell(commit)]

    def _try_quiesce(self) -> list[OutboxAction]:
        if self.shipment.outstanding:
            return []
        self._move(_S.OVER)
        quiesced = Quiesced(xfer_id=self.xfer_id, attempt=self.attempt)
        return [] if self.cut_off else [self._tell(quiesced)]

    def _tell(self, message: ToDecode) -> Send:
        return Send(peer=self.peer, message=message)

    def _move(self, state: OutgoingState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"hand-off {self.xfer_id}: {self.state} to {state}")
        self.state = state


class Outbox:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds).

    Every method returns the actions the shell must carry out, in order. Not thread-safe: one owner.
    """

    def __init__(self, layout: KvLayout) -> None:
        self._num_layers = len(layout.layers)
        self._whole = plan_link(layout, layout)
        self._sendings: dict[XferId, OutgoingTransfer] = {}
        self._peers: dict[WorkerIdentity, PeerUp] = {}
        self._push_ids = itertools.count(1)
        self.refused = 0
        """Messages of peers that fit nothing here: late, repeated, or of another attempt."""

    def handle(self, event: OutboxEvent, now_s: float) -> list[OutboxAction]:
        """Applies one event; what names an unknown transfer has no effect."""
        match event:
            case Opened():
                return self._open(event)
            case PeerUp():
                return self._peer_up(event)
            case PeerDown():
                return self._peer_down(event)
            case FromDecode():
                return self._from_decode(event, now_s)
            case PushDone():
                return self._push_done(event)
            case _:
                return self._from_worker(event, now_s)

    def state(self, xfer_id: XferId) -> OutgoingState | None:
        """Where a transfer stands; None once it is over."""
        sending = self._sendings.get(xfer_id)
        return sending.state if sending else None

    def granted(self, xfer_id: XferId) -> bool:
        """Whether the peer's pages were granted; also for a transfer that is over."""
        sending = self._sendings.get(xfer_id)
        return sending is None or sending.shipment.granted

    def in_flight(self) -> int:
        """Transfers that are not over."""
        return len(self._sendings)

    def check_integrity(self) -> None:
        """Raises InvariantError if the book contradicts itself."""
        for xfer_id, sending in self._sendings.items():
            sending.check_integrity()
            if xfer_id != sending.xfer_id:
                raise InvariantError(f"hand-off {xfer_id} is kept as {sending!r}")

    def _open(self, event: Opened) -> list[OutboxAction]:
        permit = event.permit
        if permit.xfer_id in self._sendings:
            raise InvariantError(f"hand-off {permit.xfer_id} was opened twice")
        shipment = Shipment(permit, num_layers=self._num_layers, push_ids=self._push_ids)
        self._sendings[permit.xfer_id] = OutgoingTransfer(permit=permit, shipment=shipment)
        return []

    def _peer_up(self, event: PeerUp) -> list[OutboxAction]:
        self._peers[event.peer] = event
        return [action for sending in self._to(event.peer) for action in sending.peer_up()]

    def _peer_down(self, event: PeerDown) -> list[OutboxAction]:
        self._peers.pop(event.peer, None)
        actions: list[OutboxAction] = []
        for sending in self._to(event.peer):
            actions += self._kept(sending, sending.peer_down(event.error))
        return actions

    def _from_worker(
        self, event: Started | Exported | FirstTokensDrawn | GivenUp, now_s: float
    ) -> list[OutboxAction]:
        """The engine's word, or the router's: of what is ending here nobody wants to know any more."""
        sending = self._sendings.get(event.xfer_id)
        if sending is None or sending.ending:
            return []
        connected = sending.peer in self._peers
        match event:
            case Started():
                return sending.start(now_s, connected=connected)
            case Exported():
                exported = sending.export(event.export, now_s, connected=connected)
                return self._kept(sending, exported)
            case FirstTokensDrawn():
                return sending.drew(event.first_tokens, now_s)
            case GivenUp():
                return self._kept(sending, sending.give_up())

    def _from_decode(self, event: FromDecode, now_s: float) -> list[OutboxAction]:
        message = event.message
        sending = self._sendings.get(message.xfer_id)
        meant = sending is not None and sending.peer == event.peer
        if sending is None or not meant or sending.attempt != message.attempt:
            self.refused += 1
            return _answer_stale(event)
        if sending.ending:
            return []
        match message:
            case Granted():
                return self._kept(sending, self._granted(sending, message, now_s))
            case Committed():
                return self._kept(sending, sending.committed(now_s))
            case GrantRefused() | AbortRequest():
                return self._kept(sending, sending.fail(message.error))

    def _granted(
        self, sending: OutgoingTransfer, granted: Granted, now_s: float
    ) -> list[OutboxAction]:
        if sending.state is not OutgoingState.RESERVING:
            self.refused += 1  # a ticket that is shown again is worth nothing
            return []
        peer = self._peers[sending.peer]
        return sending.granted(granted, peer, peer.link or self._whole, now_s)

    def _push_done(self, event: PushDone) -> list[OutboxAction]:
        sending = self._sendings.get(event.xfer_id)
        if sending is None:
            raise InvariantError(f"push {event.push_id} of {event.xfer_id} was never started")
        return self._kept(sending, sending.push_done(event))

    def _kept(self, sending: OutgoingTransfer, actions: list[OutboxAction]) -> list[OutboxAction]:
        """What followed of an event that may have been a hand-off's last."""
        if sending.state is OutgoingState.OVER:
            del self._sendings[sending.xfer_id]
        return actions

    def _to(self, peer: WorkerIdentity) -> list[OutgoingTransfer]:
        return [sending for sending in self._sendings.values() if sending.peer == peer]


def _answer_stale(event: FromDecode) -> list[OutboxAction]:
    """It is over here, and nothing outstanding: a peer that still waits for it is told so."""
    message = event.message
    if not isinstance(message, AbortRequest):
        return []
    quiesced = Quiesced(xfer_id=message.xfer_id, attempt=message.attempt)
    return [Send(peer=event.peer, message=quiesced)]
