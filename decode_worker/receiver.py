"""The half of a worker that receives pages: the sessions of the workers that write into its arena."""

import asyncio
from collections.abc import Callable, Mapping

import grpc

from baton.config.schema import TransferConfig
from baton.errors import TicketError
from baton.ids import WorkerIdentity
from baton.rpc.v1 import transfer_pb2_grpc
from baton.telemetry.logs import get_logger
from baton_worker.legs import WorkerLegTable
from baton_worker.messages import ReceivingAction, SendingEvent, WorkerEvent
from baton_worker.metrics import WorkerMetrics
from decode_worker.hand_offs import ReceivingHandOffs
from decode_worker.metrics import ReceivingMetrics
from decode_worker.verifier import PageVerifier
from kv_transfer.heads import LinkPlan
from kv_transfer.ledger.ledger import (
    FromPeer,
    PagesVerified,
    PeerFenced,
    SessionLost,
    SessionOpened,
)
from kv_transfer.ledger.transfer import EndSession, LedgerLimits, ToPeer, VerifyPages
from kv_transfer.memory.page_hash import Hashing
from kv_transfer.messages import SessionId, ToDecode
from kv_transfer.ports import KvReceiver
from kv_transfer.session.handshake import SessionEndpoint, SessionOffer
from kv_transfer.session.server import TransferService

_log = get_logger(__name__)


class PageReceiver:
    """Serves `Transfer.Session` (a `baton_worker.ports.ReceivingHalf` and a `kv_transfer.session.server.SessionHost`).

    Args:
        here: This worker.
        legs: Its legs.
        num_blocks: Pages that peers may be granted.
        receivers: Transfer backends by name.
        hashes: Of the arena that they receive into; peers are asked for the first rule.
        transfer: Timeouts of the hand-off.
        metrics: Of the worker.
    """

    def __init__(
        self,
        *,
        here: SessionEndpoint,
        legs: WorkerLegTable,
        num_blocks: int,
        receivers: Mapping[str, KvReceiver],
        hashes: Hashing,
        transfer: TransferConfig,
        metrics: WorkerMetrics,
    ) -> None:
        limits = LedgerLimits(
            expect_timeout_s=transfer.expect_timeout_s,
            reserve_timeout_s=transfer.reserve_timeout_s,
            quiesce_timeout_s=transfer.quiesce_timeout_s,
            lease_s=transfer.lease_s,
            retry_grace_s=transfer.retry_grace_s,
            checksums=transfer.checksums,
        )
        self.hand_offs = ReceivingHandOffs(limits, legs)
        self._receivers = receivers
        self._shared = metrics
        self._metrics = ReceivingMetrics(metrics.registry)
        checksum = next(iter(hashes))
        self._verifier = PageVerifier(hashes[checksum], self._verified)
        offer = SessionOffer(
            num_blocks=num_blocks,
            lease_s=transfer.lease_s,
            checksum=checksum if transfer.checksums else None,
        )
        self._transfers = TransferService(here=here, offer=offer, receivers=receivers, host=self)
        self._apply: Callable[[WorkerEvent], None]

    def start(
        self,
        apply: Callable[[WorkerEvent], None],
        post: Callable[[SendingEvent], None],  # noqa: ARG002  # nothing here happens on another thread
    ) -> None:
        """See `WorkerHalf`."""
        self._apply = apply

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the Transfer service."""
        transfer_pb2_grpc.add_TransferServicer_to_server(self._transfers, server)

    def carry_out(self, action: ReceivingAction) -> None:
        """See `WorkerHalf`."""
        match action:
            case VerifyPages():
                self._verifier.verify(action)
            case ToPeer():
                self._transfers.send(action.session, action.message)
            case EndSession():
                self._metrics.cut_off()
                self._transfers.end(action.session, action.error)

    def observe(self) -> None:
        """See `WorkerHalf`."""
        self._metrics.observe(
            refused=self.hand_offs.refused_messages,
            corrupted=self.hand_offs.corrupted_transfers,
            quarantined=self.hand_offs.quarantined_pages(),
        )

    async def close(self) -> None:
        """Takes back what gives peers access to the arena."""
        for receiver in self._receivers.values():
            await asyncio.to_thread(receiver.close)
        await self._verifier.close()

    def on_session_open(self, session: SessionId, peer: WorkerIdentity, link: LinkPlan) -> None:
        """A sending worker was let in."""
        self._apply(SessionOpened(session=session, peer=peer, link=link))

    def on_handshake_refused(self, field: str) -> None:
        """A sending worker was not let in."""
        self._shared.handshake_refused(field)

    def on_ticket_refused(self, error: TicketError) -> None:
        """A sending worker showed a permit that is not good."""
        _log.warning("a permit was refused", reason=error.message)
        self._shared.ticket_refused(error.param or "other")

    def on_peer_message(self, session: SessionId, peer: WorkerIdentity, message: ToDecode) -> None:
        """A sending worker says something."""
        self._apply(FromPeer(session=session, peer=peer, message=message))

    def on_session_lost(self, session: SessionId) -> None:
        """A sending worker's stream ended; it may still be writing."""
        self._apply(SessionLost(session=session))

    def on_peer_fenced(self, session: SessionId) -> None:
        """A sending worker can never write here again."""
        self._apply(PeerFenced(session=session))

    def _verified(self, outcome: PagesVerified) -> None:
        """Pages of a hand-off that was given up meanwhile may be another's by now, and count for nothing."""
        before = self.hand_offs.corrupted_transfers
        self._apply(outcome)
        if self.hand_offs.corrupted_transfers > before:
            _log.error("corrupt KV pages", xfer_id=outcome.xfer_id, fault=outcome.fault)
