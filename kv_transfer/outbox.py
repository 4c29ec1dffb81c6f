"""The prefill worker's book of hand-offs: what was opened, who takes it, and when it is over.

Counterpart of `ledger.py`. The engine exports pages layer by layer while it computes; they wait (`shipment.py`) until the
decode worker has granted its own, are pushed then, and are committed once every layer of every page has landed and the first
tokens are known. How one hand-off goes stands in `sending.py`; here is which one is meant, and by whom.
"""

import itertools

from baton.errors import InvariantError
from baton.ids import WorkerIdentity, XferId
from baton.layout import KvLayout
from kv_transfer.heads import plan_link
from kv_transfer.messages import AbortRequest, Committed, Granted, GrantRefused, Quiesced
from kv_transfer.outbox_messages import (
    Drew,
    Exported,
    FromDecode,
    GivenUp,
    Opened,
    OutboxAction,
    OutboxEvent,
    PeerDown,
    PeerUp,
    PushDone,
    Send,
    Started,
)
from kv_transfer.sending import Sending, SendingState
from kv_transfer.shipment import Shipment


class Outbox:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds).

    Every method returns the actions the shell must carry out, in order. Not thread-safe: one owner.
    """

    def __init__(self, layout: KvLayout) -> None:
        self._num_layers = len(layout.layers)
        self._whole = plan_link(layout, layout)
        self._sendings: dict[XferId, Sending] = {}
        self._peers: dict[WorkerIdentity, PeerUp] = {}
        self._push_ids = itertools.count(1)
        self.stale = 0
        """Messages of peers about attempts that are over here."""

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

    def state(self, xfer_id: XferId) -> SendingState | None:
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
        self._sendings[permit.xfer_id] = Sending(permit=permit, shipment=shipment)
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
        self, event: Started | Exported | Drew | GivenUp, now_s: float
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
            case Drew():
                return sending.drew(event.first_tokens, now_s)
            case GivenUp():
                return self._kept(sending, sending.give_up())

    def _from_decode(self, event: FromDecode, now_s: float) -> list[OutboxAction]:
        message = event.message
        sending = self._sendings.get(message.xfer_id)
        meant = sending is not None and sending.peer == event.peer
        if sending is None or not meant or sending.attempt != message.attempt:
            self.stale += 1
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

    def _granted(self, sending: Sending, granted: Granted, now_s: float) -> list[OutboxAction]:
        if sending.state is not SendingState.RESERVING:
            self.stale += 1  # a ticket that is shown again is worth nothing
            return []
        peer = self._peers[sending.peer]
        return sending.granted(granted, peer, peer.link or self._whole, now_s)

    def _push_done(self, event: PushDone) -> list[OutboxAction]:
        sending = self._sendings.get(event.xfer_id)
        if sending is None:
            raise InvariantError(f"push {event.push_id} of {event.xfer_id} was never started")
        return self._kept(sending, sending.push_done(event))

    def _kept(self, sending: Sending, actions: list[OutboxAction]) -> list[OutboxAction]:
        """What followed of an event that may have been a hand-off's last."""
        if sending.state is SendingState.OVER:
            del self._sendings[sending.xfer_id]
        return actions

    def _to(self, peer: WorkerIdentity) -> list[Sending]:
        return [sending for sending in self._sendings.values() if sending.peer == peer]


def _answer_stale(event: FromDecode) -> list[OutboxAction]:
    """It is over here, and nothing outstanding: a peer that still waits for it is told so."""
    message = event.message
    if not isinstance(message, AbortRequest):
        return []
    quiesced = Quiesced(xfer_id=message.xfer_id, attempt=message.attempt)
    return [Send(peer=event.peer, message=quiesced)]
