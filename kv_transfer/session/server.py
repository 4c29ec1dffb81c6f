"""The decode worker's end of the hand-off's control messages: one stream per prefill worker carries all its transfers.

Counterpart of `client.py`, where the handshake begins. `TransferService` admits prefill workers; each session is then a
`ServedSession`, in which the handshake goes on for as long as the peer cannot reach the arena: it is offered the next
backend that both have.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

import grpc

from baton.errors import BatonError, TicketError, TransferError
from baton.ids import WorkerIdentity
from baton.rpc.hello import identity_from_proto, layout_from_proto
from baton.rpc.reports import failure_to_proto
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import transfer_pb2 as pb
from baton.rpc.v1 import transfer_pb2_grpc as pb_grpc
from baton.telemetry.logs import get_logger
from kv_transfer.handles import handle_for, revoke_for
from kv_transfer.heads import LinkPlan
from kv_transfer.messages import Heartbeat, SessionId, ToDecode, ToPrefill
from kv_transfer.ports import KvReceiver, RegionHandle
from kv_transfer.session.convert import SessionTerms, reply_to_proto, request_from_proto
from kv_transfer.session.handshake import (
    Agreed,
    HandshakeServer,
    SessionEndpoint,
    SessionOffer,
    accept,
    no_backend_works,
    refused_field,
)
from kv_transfer.session.seal import SessionSeal
from kv_transfer.ticket import region_digest


class Fence:
    """Tells once that a session's peer can never write here again:
    when its access by every backend that it was offered is revoked.
    """

    def __init__(self, ranks: int, fenced: Callable[[], None]) -> None:
        self._ranks = ranks
        self._fenced = fenced
        self._lock = threading.Lock()
        self._open = 1  # the ways that may still be shown

    def revoke(self, receiver: KvReceiver, handle: RegionHandle) -> None:
        """Takes the access by one backend back."""
        with self._lock:
            self._open += 1
        revoke_for(receiver, handle, self._ranks, self._shut)

    def close(self) -> None:
        """No other backend will be offered."""
        self._shut()

    def _shut(self) -> None:
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            self._fenced()


_log = get_logger(__name__)

_MAX_REASON = 500

Requests = AsyncIterator[common_pb2.Signed]
Context = grpc.aio.ServicerContext[common_pb2.Signed, common_pb2.Signed]


class SessionHost(Protocol):
    """What a decode worker hears of its peers' sessions. Called on the event loop."""

    def on_session_open(self, session: SessionId, peer: WorkerIdentity, link: LinkPlan) -> None:
        """A prefill worker was admitted; `link` is what it writes of each page."""

    def on_handshake_refused(self, field: str) -> None:
        """A prefill worker was not admitted, or cannot reach the arena: this field did not fit."""

    def on_ticket_refused(self, error: TicketError) -> None:
        """A prefill worker showed a permit that is not good; its request is dropped."""

    def on_peer_message(self, session: SessionId, peer: WorkerIdentity, message: ToDecode) -> None:
        """A prefill worker says something."""

    def on_session_lost(self, session: SessionId) -> None:
        """The stream ended; the peer may still be writing."""

    def on_peer_fenced(self, session: SessionId) -> None:
        """The peer of this session can never write here again."""


def tell_refused(host: SessionHost, error: BatonError) -> None:
    """Counts a handshake that failed because of a field."""
    refused = refused_field(error)
    if refused is not None:
        host.on_handshake_refused(refused)


class ServedSession:
    """For the event loop."""

    def __init__(
        self,
        session: SessionId,
        agreed: Agreed,
        seal: SessionSeal,
        *,
        here: SessionEndpoint,
        offer: SessionOffer,
        receivers: Mapping[str, KvReceiver],
        host: SessionHost,
    ) -> None:
        """The peer is offered its preferred backend once `run` begins.

        Args:
            session: Its number here.
            agreed: What the handshake came to.
            seal: Of this end.
            here: This worker.
            offer: What it offers to all peers.
            receivers: Backends by name.
            host: Told of everything that happens.
        """
        self._session = session
        self._agreed = agreed
        self._seal = seal
        self._here = here
        self._offer = offer
        self._receivers = receivers
        self._host = host
        loop = asyncio.get_running_loop()
        self._fence = Fence(agreed.ranks, lambda: _tell(loop, host.on_peer_fenced, session))
        self._cut: asyncio.Future[BatonError] = loop.create_future()
        self._outgoing: asyncio.Queue[pb.TransferReply] = asyncio.Queue()
        self._tried: list[str] = []
        self._handle = handle_for(receivers[agreed.backends[0]], agreed.ranks)
        self._terms = self._bound_to(self._handle)

    async def run(self, requests: Requests, context: Context) -> None:
        """Until either side ends it."""
        self._offer_region()
        self._host.on_session_open(self._session, self._agreed.peer, self._agreed.link)
        reading = asyncio.create_task(self._read(requests))
        writing = asyncio.create_task(self._write(context))
        ends: list[asyncio.Future[Any]] = [reading, writing, self._cut]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            self._host.on_session_lost(self._session)
            self._revoke()
            self._fence.close()
            await asyncio.gather(reading, writing, return_exceptions=True)

    def send(self, message: ToPrefill) -> None:
        """Queues a message; one for a session that is over is lost, its end having been told."""
        self._outgoing.put_nowait(reply_to_proto(message, self._terms))

    def cut_off(self, error: BatonError) -> None:
        """Ends it, which fences the peer."""
        if self._cut.done():
            return
        _log.warning("cutting a prefill worker off", peer=self._peer_name, error=error.message)
        self._cut.set_result(error)

    @property
    def _peer_name(self) -> str:
        return str(self._agreed.peer)

    def _bound_to(self, handle: RegionHandle) -> SessionTerms:
        """What binds tickets to the region handle that counts."""
        return SessionTerms(
            office=self._here.office,
            target=self._here.identity,
            layout_digest=self._here.layout.content_digest(),
            region=region_digest(handle.opaque),
            lease_s=self._offer.lease_s,
        )

    def _offer_region(self) -> None:
        accepted = accept(self._here, self._offer, self._handle)
        self._outgoing.put_nowait(pb.TransferReply(accepted=accepted))

    def _revoke(self) -> None:
        self._fence.revoke(self._receivers[self._handle.backend], self._handle)

    def _offer_next(self, unreachable: pb.RegionUnreachable) -> None:
        """The peer cannot reach the arena by the backend that was chosen: it is offered the next one that both have."""
        if unreachable.backend != self._handle.backend or unreachable.backend in self._tried:
            raise TransferError(f"{unreachable.backend!r} is not the backend that was chosen")
        _log.warning(
            "a prefill worker cannot reach the arena",
            peer=self._peer_name,
            backend=unreachable.backend,
            reason=unreachable.reason[:_MAX_REASON],
        )
        self._tried.append(unreachable.backend)
        left = [name for name in self._agreed.backends if name not in self._tried]
        if not left:
            refused = failure_to_proto(no_backend_works(self._tried))
            self._outgoing.put_nowait(pb.TransferReply(refused=refused))
            return
        self._revoke()
        self._handle = handle_for(self._receivers[left[0]], self._agreed.ranks)
        self._terms = self._bound_to(self._handle)
        self._offer_region()

    async def _read(self, requests: Requests) -> None:
        try:
            async for signed in requests:
                self._take(self._seal.open(signed, pb.TransferRequest()))
        except TicketError as error:
            self._host.on_ticket_refused(error)
            _log.warning("a session's seal is broken", peer=self._peer_name, error=error.message)
        except TransferError as error:
            _log.warning(
                "a prefill worker sent nonsense", peer=self._peer_name, error=error.message
            )

    def _take(self, request: pb.TransferRequest) -> None:
        if request.WhichOneof("request") == "unreachable":
            self._offer_next(request.unreachable)
            return
        try:
            message = request_from_proto(request, self._terms)
        except TicketError as error:
            self._host.on_ticket_refused(error)
            return
        if isinstance(message, Heartbeat):
            beat = pb.Heartbeat(number=message.number)
            self._outgoing.put_nowait(pb.TransferReply(heartbeat=beat))
        self._host.on_peer_message(self._session, self._agreed.peer, message)

    async def _write(self, context: Context) -> None:
        while True:
            await context.write(self._seal.seal(await self._outgoing.get()))


def _tell(
    loop: asyncio.AbstractEventLoop, call: Callable[[SessionId], None], session: SessionId
) -> None:
    """Brings a fence, reported from any thread, to the event loop; a loop that is closed needs it no more."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, session)


_HANDSHAKE_TIMEOUT_S = 10.0


class TransferService(pb_grpc.TransferServicer):
    """Serves `Transfer.Session` on a decode worker."""

    def __init__(
        self,
        *,
        here: SessionEndpoint,
        offer: SessionOffer,
        receivers: Mapping[str, KvReceiver],
        host: SessionHost,
    ) -> None:
        self._here = here
        self._offer = offer
        self._handshakes = HandshakeServer(here, receivers)
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
            agreed = self._handshakes.agree(opening)
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
