"""The decode worker's end of the hand-off's control messages: one stream per prefill worker carries all its transfers.

Counterpart of `session.py`, where the handshake is begun. Here is who is let in; each session goes its way in `served_session.py`.
"""

import asyncio
from collections.abc import Mapping

import grpc

from baton.errors import BatonError, TicketError
from baton.rpc.hello import identity_from_proto, layout_from_proto
from baton.rpc.reports import failure_to_proto
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import transfer_pb2 as pb
from baton.rpc.v1 import transfer_pb2_grpc as pb_grpc
from kv_transfer.handshake import Agreed, Doorkeeper, Endpoint, SessionOffer
from kv_transfer.messages import SessionId, ToPrefill
from kv_transfer.ports import KvReceiver
from kv_transfer.seal import SessionSeal
from kv_transfer.served_session import (
    Context,
    Requests,
    ServedSession,
    SessionHost,
    tell_refused,
)

_HANDSHAKE_TIMEOUT_S = 10.0


class TransferService(pb_grpc.TransferServicer):
    """Serves `Transfer.Session` on a decode worker."""

    def __init__(
        self,
        *,
        here: Endpoint,
        offer: SessionOffer,
        receivers: Mapping[str, KvReceiver],
        host: SessionHost,
    ) -> None:
        self._here = here
        self._offer = offer
        self._door = Doorkeeper(here, receivers)
        self._receivers = receivers
        self._host = host
        self._sessions: dict[SessionId, ServedSession] = {}
        self._next = 0

    @property
    def sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    def send(self, session: SessionId, message: ToPrefill) -> None:
        """Queues a message; one for a session that is over is dropped, its end having been told."""
        served = self._sessions.get(session)
        if served is not None:
            served.send(message)

    def end(self, session: SessionId, error: BatonError) -> None:
        """Cuts a peer off, which fences it."""
        served = self._sessions.get(session)
        if served is not None:
            served.cut_off(error)

    async def Session(  # type: ignore[override]  # noqa: N802  # the stub's name; a coroutine that writes, not an iterator
        self, request_iterator: Requests, context: Context
    ) -> None:
        """One prefill worker's session, until either side ends it."""
        requests = aiter(request_iterator)
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                signed = await anext(requests, common_pb2.Signed())
            opening = self._here.office.open_opening(signed)
        except TimeoutError:
            return
        except TicketError as error:
            self._host.on_ticket_refused(error)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
        seal = self._seal(opening.open)
        try:
            agreed = self._door.agree(opening)
        except BatonError as error:
            tell_refused(self._host, error)
            await context.write(seal.seal(pb.TransferReply(refused=failure_to_proto(error))))
            return
        await self._serve(requests, context, agreed, seal)

    def _seal(self, hello: pb.OpenSession) -> SessionSeal:
        source, target = (
            identity_from_proto(hello.identity),
            identity_from_proto(hello.expected_peer),
        )
        rank = layout_from_proto(hello.layout).digest()
        key = self._here.office.session_key(source, target, hello.number, rank)
        return SessionSeal(key, prefills=False)

    async def _serve(
        self, requests: Requests, context: Context, agreed: Agreed, seal: SessionSeal
    ) -> None:
        self._next += 1
        session = SessionId(self._next)
        served = ServedSession(
            session,
            agreed,
            seal,
            here=self._here,
            offer=self._offer,
            receivers=self._receivers,
            host=self._host,
        )
        self._sessions[session] = served
        try:
            await served.run(requests, context)
        finally:
            del self._sessions[session]
