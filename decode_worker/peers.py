"""The prefill workers that write into this decode worker's arena: what they say comes in as events of the lifecycle."""

import asyncio
from collections.abc import Callable, Mapping

import grpc

from baton.errors import TicketError
from baton.ids import WorkerIdentity
from baton.rpc.v1 import transfer_pb2_grpc
from decode_worker.accounts import LegAccounts
from decode_worker.messages import DecodeEvent
from kv_transfer.heads import LinkPlan
from kv_transfer.ledger.ledger import FromPeer, PeerFenced, SessionLost, SessionOpened
from kv_transfer.ledger.transfer import EndSession, ToPeer
from kv_transfer.messages import SessionId, ToDecode
from kv_transfer.ports import KvReceiver
from kv_transfer.session.handshake import Endpoint, SessionOffer
from kv_transfer.session.server import TransferService


class PrefillPeers:
    """Serves `Transfer.Session` (a `kv_transfer.session.server.SessionHost`).

    Args:
        here: This worker.
        offer: What peers are granted at the handshake.
        receivers: Transfer backends by name.
        accounts: Told of what is refused and cut off.
        apply: Takes every event, on the event loop.
    """

    def __init__(
        self,
        *,
        here: Endpoint,
        offer: SessionOffer,
        receivers: Mapping[str, KvReceiver],
        accounts: LegAccounts,
        apply: Callable[[DecodeEvent], None],
    ) -> None:
        self._receivers = receivers
        self._accounts = accounts
        self._apply = apply
        self._transfers = TransferService(here=here, offer=offer, receivers=receivers, host=self)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the Transfer service."""
        transfer_pb2_grpc.add_TransferServicer_to_server(self._transfers, server)

    def send(self, action: ToPeer) -> None:
        """Says something to one of them."""
        self._transfers.send(action.session, action.message)

    def end(self, action: EndSession) -> None:
        """Cuts one of them off."""
        self._accounts.cut_off()
        self._transfers.end(action.session, action.error)

    async def close(self) -> None:
        """Takes back what gives peers access to the arena."""
        for receiver in self._receivers.values():
            await asyncio.to_thread(receiver.close)

    def on_session_open(self, session: SessionId, peer: WorkerIdentity, link: LinkPlan) -> None:
        """A prefill worker was let in."""
        self._apply(SessionOpened(session=session, peer=peer, link=link))

    def on_handshake_refused(self, field: str) -> None:
        """A prefill worker was not let in."""
        self._accounts.handshake_refused(field)

    def on_ticket_refused(self, error: TicketError) -> None:
        """A prefill worker showed a permit that is not good."""
        self._accounts.permit_refused(error)

    def on_peer_message(self, session: SessionId, peer: WorkerIdentity, message: ToDecode) -> None:
        """A prefill worker says something."""
        self._apply(FromPeer(session=session, peer=peer, message=message))

    def on_session_lost(self, session: SessionId) -> None:
        """A prefill worker's stream ended; it may still be writing."""
        self._apply(SessionLost(session=session))

    def on_peer_fenced(self, session: SessionId) -> None:
        """A prefill worker can never write here again."""
        self._apply(PeerFenced(session=session))
