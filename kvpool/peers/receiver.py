"""Receives blocks from other nodes into this node's slab: what they may write there, and when they have stopped.

The part of a decode worker in the hand-off (`kv_transfer.ledger.ledger`), played by a node that fetches. Slots that may
still be written to are never given back.

    fetcher ── expect ──▶ TransferLedger ◀── Reserve, Commit, Quiesced ── the holder's session
            ◀── landed, or failed and nothing writes any more ──
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from baton.clock import Clock
from baton.config.schema import TransferConfig
from baton.errors import BatonError, DeadlineError, InvariantError, TicketError, TransferError
from baton.ids import WorkerIdentity, XferId
from baton.telemetry.logs import get_logger
from kv_transfer.heads import LinkPlan
from kv_transfer.ledger.ledger import (
    Expected,
    FromPeer,
    LedgerEvent,
    PagesReleased,
    PagesReserved,
    PeerFenced,
    SessionLost,
    SessionOpened,
    TransferLedger,
    Withdrawn,
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
from kv_transfer.messages import SessionId, ToDecode
from kv_transfer.plan import Grant
from kv_transfer.ports import KvReceiver
from kv_transfer.session.handshake import SessionEndpoint, SessionOffer
from kv_transfer.session.server import Context, Requests, TransferService
from kv_transfer.ticket import Permit

_log = get_logger(__name__)

Landed = asyncio.Future[BatonError | None]
"""What a transfer came to: None when every slot is written, else why not. Nothing writes there any more either way."""


@dataclass(slots=True, eq=False)
class _Incoming:
    grant: Grant
    until_s: float
    landed: Landed
    error: BatonError | None = None
    written: bool = False


class PeerReceiver:
    """A `kv_transfer.session.server.SessionHost`. For one event loop.

    Bytes are not checked here: a block has checksums of its own, which were made where it was computed.

    Args:
        here: This node.
        num_slots: Of its slab.
        receivers: What lets others write into the slab, by backend.
        transfer: Durations of the hand-off.
        clock: Monotonic.
    """

    def __init__(
        self,
        here: SessionEndpoint,
        *,
        num_slots: int,
        receivers: Mapping[str, KvReceiver],
        transfer: TransferConfig,
        clock: Clock,
    ) -> None:
        limits = LedgerLimits(
            expect_timeout_s=transfer.expect_timeout_s,
            reserve_timeout_s=transfer.reserve_timeout_s,
            quiesce_timeout_s=transfer.quiesce_timeout_s,
            lease_s=transfer.lease_s,
            retry_grace_s=0.0,
            checksums=False,
        )
        offer = SessionOffer(num_blocks=num_slots, lease_s=transfer.lease_s, checksum=None)
        self._ledger = TransferLedger(limits)
        self._receivers = receivers
        self._clock = clock
        self._sessions = TransferService(here=here, offer=offer, receivers=receivers, host=self)
        self._incoming: dict[XferId, _Incoming] = {}

    @property
    def in_flight(self) -> int:
        """Transfers that are not over."""
        return len(self._incoming)

    def expect(self, permit: Permit, grant: Grant, timeout_s: float) -> Landed:
        """From now on the permit's source may write to the slots of `grant`. The transfer ends after `timeout_s`, if
        not before; its slots are the transfer's until what is returned is done.
        """
        landed: Landed = asyncio.get_running_loop().create_future()
        until_s = self._clock.now_s() + timeout_s
        self._incoming[permit.xfer_id] = _Incoming(grant, until_s, landed)
        self._handle(Expected(permit=permit))
        return landed

    def withdraw(self, xfer_id: XferId, error: BatonError) -> None:
        """It will not come, or is not wanted any more."""
        coming = self._incoming.get(xfer_id)
        if coming is not None and coming.error is None:
            coming.error = error
            self._handle(Withdrawn(xfer_id=xfer_id, error=error))

    def tick(self) -> None:
        """Checks every lease and deadline; several times per second."""
        now_s = self._clock.now_s()
        self._carry_out(self._ledger.tick(now_s))
        for xfer_id, coming in list(self._incoming.items()):
            if coming.until_s <= now_s:
                self.withdraw(xfer_id, DeadlineError("the blocks did not come in time"))
        self._report_ended()

    async def serve(self, requests: Requests, context: Context) -> None:
        """One node's session, until either side ends it: `Transfer.Session`."""
        await self._sessions.Session(requests, context)

    async def close(self) -> None:
        """Takes back what gives others access to the slab."""
        for receiver in self._receivers.values():
            await asyncio.to_thread(receiver.close)

    def check_integrity(self) -> None:
        """Raises InvariantError if the ledger contradicts itself."""
        self._ledger.check_integrity()

    def on_session_open(self, session: SessionId, peer: WorkerIdentity, link: LinkPlan) -> None:
        """Another node was let in."""
        self._handle(SessionOpened(session=session, peer=peer, link=link))

    def on_handshake_refused(self, field: str) -> None:
        """Another node was not let in."""
        _log.warning("another pool node was refused", field=field)

    def on_ticket_refused(self, error: TicketError) -> None:
        """Another node showed a permit that is not good."""
        _log.warning("another pool node's permit was refused", reason=error.message)

    def on_peer_message(self, session: SessionId, peer: WorkerIdentity, message: ToDecode) -> None:
        """Another node says something."""
        self._handle(FromPeer(session=session, peer=peer, message=message))

    def on_session_lost(self, session: SessionId) -> None:
        """Its stream ended; it may still be writing."""
        self._handle(SessionLost(session=session))

    def on_peer_fenced(self, session: SessionId) -> None:
        """It can never write here again."""
        self._handle(PeerFenced(session=session))

    def _handle(self, event: LedgerEvent) -> None:
        self._carry_out(self._ledger.handle(event, self._clock.now_s()))
        self._report_ended()

    def _carry_out(self, actions: list[LedgerAction]) -> None:
        todo = deque(actions)
        while todo:
            todo.extend(self._do(todo.popleft()))

    def _do(self, action: LedgerAction) -> list[LedgerAction]:
        """Does what the ledger wants; what follows of that."""
        now_s = self._clock.now_s()
        match action:
            case ReservePages(xfer_id=xfer_id):
                grant = self._incoming[xfer_id].grant
                return self._ledger.handle(PagesReserved(xfer_id=xfer_id, grant=grant), now_s)
            case StartDecoding(xfer_id=xfer_id):
                self._incoming[xfer_id].written = True
            case FreePages(xfer_id=xfer_id):
                return self._ledger.handle(PagesReleased(xfer_id=xfer_id), now_s)
            case TransferFailed(xfer_id=xfer_id, error=error):
                self._failed(xfer_id, error)
            case WriterLost(xfer_id=xfer_id, error=error):
                self._failed(xfer_id, error)  # no other sender will take it over
                return self._ledger.handle(Withdrawn(xfer_id=xfer_id, error=error), now_s)
            case ToPeer(session=session, message=message):
                self._sessions.send(session, message)
            case EndSession(session=session, error=error):
                self._sessions.end(session, error)
            case VerifyPages():
                raise InvariantError("sessions between nodes have no checksums of their own")
        return []

    def _failed(self, xfer_id: XferId, error: BatonError) -> None:
        coming = self._incoming.get(xfer_id)
        if coming is not None and coming.error is None:
            coming.error = error

    def _report_ended(self) -> None:
        """Tells of transfers that are over: nothing writes to their slots any more."""
        for xfer_id, coming in list(self._incoming.items()):
            if self._ledger.state(xfer_id) is not None:
                continue
            self._incoming.pop(xfer_id, None)
            error = None if coming.written else coming.error or TransferError("given up")
            if not coming.landed.done():
                coming.landed.set_result(error)
