"""The decode worker's end of the hand-off's control messages: one stream per prefill worker carries all its transfers.

Counterpart of `session.py`, where the handshake is begun.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
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
from kv_transfer.convert import SessionTerms, reply_to_proto, request_from_proto
from kv_transfer.handshake import (
    Agreed,
    Doorkeeper,
    Endpoint,
    SessionOffer,
    accept,
    no_way,
    refused_field,
)
from kv_transfer.heads import LinkPlan
from kv_transfer.messages import Heartbeat, SessionId, ToDecode, ToPrefill
from kv_transfer.ports import KvReceiver, RegionHandle
from kv_transfer.seal import SessionSeal
from kv_transfer.ticket import region_digest

_log = get_logger(__name__)

_HANDSHAKE_TIMEOUT_S = 10.0
_MAX_REASON = 500


class SessionHost(Protocol):
    """What a decode worker hears of its peers' sessions. Called on the event loop."""

    def on_session_open(self, session: SessionId, peer: WorkerIdentity, link: LinkPlan) -> None:
        """A prefill worker was let in; `link` is what it writes of each page."""

    def on_handshake_refused(self, field: str) -> None:
        """A prefill worker was not let in, or found no way to the arena: this field did not fit."""

    def on_ticket_refused(self, error: TicketError) -> None:
        """A prefill worker showed a permit that is not good; its request is dropped."""

    def on_peer_message(self, session: SessionId, peer: WorkerIdentity, message: ToDecode) -> None:
        """A prefill worker says something."""

    def on_session_lost(self, session: SessionId) -> None:
        """The stream ended; the peer may still be writing."""

    def on_peer_fenced(self, session: SessionId) -> None:
        """The peer of this session can never write here again."""


class _Fence:
    """Tells once that a session's peer can never write here again: when every way in that it was shown is shut."""

    def __init__(self, fenced: Callable[[], None]) -> None:
        self._fenced = fenced
        self._lock = threading.Lock()
        self._open = 1

    def revoke(self, receiver: KvReceiver, handle: RegionHandle) -> None:
        """Shuts one way."""
        with self._lock:
            self._open += 1
        receiver.revoke(handle, self.shut)

    def shut(self) -> None:
        """One way is shut; the last time, that no other will be shown. From any thread."""
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            self._fenced()


@dataclass(slots=True, eq=False)
class _Served:
    """One session as the decode worker serves it.

    Attributes:
        agreed: What the handshake came to.
        fence: Of all the ways in that the peer was shown.
        handle: The way in that counts.
        terms: What binds tickets to it.
        tried: Backends that did not work.
        outgoing: What is to be said.
        cut: Set when the peer is to be cut off.
    """

    agreed: Agreed
    fence: _Fence
    handle: RegionHandle
    terms: SessionTerms
    seal: SessionSeal
    cut: asyncio.Future[BatonError]
    tried: list[str] = field(default_factory=list)
    outgoing: asyncio.Queue[pb.TransferReply] = field(default_factory=asyncio.Queue)


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
        self._sessions: dict[SessionId, _Served] = {}
        self._next = 0

    @property
    def sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    def send(self, session: SessionId, message: ToPrefill) -> None:
        """Queues a message; one for a session that is over is dropped, its end having been told."""
        served = self._sessions.get(session)
        if served is not None:
            served.outgoing.put_nowait(reply_to_proto(message, served.terms))

    def end(self, session: SessionId, error: BatonError) -> None:
        """Cuts a peer off, which fences it."""
        served = self._sessions.get(session)
        if served is not None and not served.cut.done():
            _log.warning(
                "cutting a prefill worker off", peer=str(served.agreed.peer), error=error.message
            )
            served.cut.set_result(error)

    async def Session(  # type: ignore[override]  # noqa: N802  # the stub's name; a coroutine that writes, not an iterator
        self,
        request_iterator: AsyncIterator[common_pb2.Signed],
        context: grpc.aio.ServicerContext[common_pb2.Signed, common_pb2.Signed],
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
            self._count(error)
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

    def _count(self, error: BatonError) -> None:
        refused = refused_field(error)
        if refused is not None:
            self._host.on_handshake_refused(refused)

    async def _serve(
        self,
        requests: AsyncIterator[common_pb2.Signed],
        context: grpc.aio.ServicerContext[common_pb2.Signed, common_pb2.Signed],
        agreed: Agreed,
        seal: SessionSeal,
    ) -> None:
        self._next += 1
        session, loop = SessionId(self._next), asyncio.get_running_loop()
        handle = self._receivers[agreed.backends[0]].handle()
        served = _Served(
            agreed=agreed,
            fence=_Fence(lambda: _tell(loop, self._host.on_peer_fenced, session)),
            handle=handle,
            terms=self._terms(handle),
            seal=seal,
            cut=loop.create_future(),
        )
        self._sessions[session] = served
        self._show(served)
        self._host.on_session_open(session, agreed.peer, agreed.link)
        reading = asyncio.create_task(self._read(session, served, requests))
        writing = asyncio.create_task(_write(served, context))
        ends: list[asyncio.Future[Any]] = [reading, writing, served.cut]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            del self._sessions[session]
            self._host.on_session_lost(session)
            self._revoke(served)
            served.fence.shut()
            await asyncio.gather(reading, writing, return_exceptions=True)

    def _show(self, served: _Served) -> None:
        accepted = accept(self._here, self._offer, served.handle)
        served.outgoing.put_nowait(pb.TransferReply(accepted=accepted))

    def _revoke(self, served: _Served) -> None:
        served.fence.revoke(self._receivers[served.handle.backend], served.handle)

    def _show_another(self, served: _Served, unreachable: pb.RegionUnreachable) -> None:
        """The peer finds no way in by the backend that was chosen: by the next one that both have."""
        if unreachable.backend != served.handle.backend or unreachable.backend in served.tried:
            raise TransferError(f"{unreachable.backend!r} is not the backend that was chosen")
        _log.warning(
            "a prefill worker cannot reach the arena",
            peer=str(served.agreed.peer),
            backend=unreachable.backend,
            reason=unreachable.reason[:_MAX_REASON],
        )
        served.tried.append(unreachable.backend)
        left = [name for name in served.agreed.backends if name not in served.tried]
        if not left:
            error = no_way(served.tried)
            self._count(error)
            served.outgoing.put_nowait(pb.TransferReply(refused=failure_to_proto(error)))
            return
        self._revoke(served)
        served.handle = self._receivers[left[0]].handle()
        served.terms = self._terms(served.handle)
        self._show(served)

    def _terms(self, handle: RegionHandle) -> SessionTerms:
        return SessionTerms(
            office=self._here.office,
            target=self._here.identity,
            layout_digest=self._here.layout.content_digest(),
            region=region_digest(handle.opaque),
            lease_s=self._offer.lease_s,
        )

    async def _read(
        self, session: SessionId, served: _Served, requests: AsyncIterator[common_pb2.Signed]
    ) -> None:
        try:
            async for signed in requests:
                self._take(session, served, served.seal.open(signed, pb.TransferRequest()))
        except TicketError as error:
            self._host.on_ticket_refused(error)
            _log.warning(
                "a session's seal is broken", peer=str(served.agreed.peer), error=error.message
            )
        except TransferError as error:
            _log.warning(
                "a prefill worker sent nonsense", peer=str(served.agreed.peer), error=error.message
            )

    def _take(self, session: SessionId, served: _Served, request: pb.TransferRequest) -> None:
        if request.WhichOneof("request") == "unreachable":
            self._show_another(served, request.unreachable)
            return
        try:
            message = request_from_proto(request, served.terms)
        except TicketError as error:
            self._host.on_ticket_refused(error)
            return
        if isinstance(message, Heartbeat):
            beat = pb.Heartbeat(number=message.number)
            served.outgoing.put_nowait(pb.TransferReply(heartbeat=beat))
        self._host.on_peer_message(session, served.agreed.peer, message)


async def _write(
    served: _Served, context: grpc.aio.ServicerContext[common_pb2.Signed, common_pb2.Signed]
) -> None:
    while True:
        await context.write(served.seal.seal(await served.outgoing.get()))


def _tell(
    loop: asyncio.AbstractEventLoop, call: Callable[[SessionId], None], session: SessionId
) -> None:
    """Brings a fence, reported from any thread, to the event loop; a loop that is closed needs it no more."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, session)
