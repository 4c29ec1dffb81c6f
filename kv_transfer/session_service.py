"""The decode worker's end of the hand-off's control messages: one stream per prefill worker carries all its transfers.

Counterpart of `session.py`, where the handshake is begun.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from baton.errors import (
    BatonError,
    IncompatibleError,
    StaleIncarnationError,
    TicketError,
    TransferError,
)
from baton.ids import WorkerIdentity
from baton.rpc.convert import (
    PROTOCOL_VERSION,
    failure_to_proto,
    identity_from_proto,
    identity_to_proto,
    layout_from_proto,
    layout_to_proto,
)
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import transfer_pb2 as pb
from baton.rpc.v1 import transfer_pb2_grpc as pb_grpc
from baton.telemetry.logs import get_logger
from kv_transfer.convert import SessionTerms, reply_to_proto, request_from_proto
from kv_transfer.heads import LinkPlan, plan_link
from kv_transfer.messages import Heartbeat, SessionId, ToDecode, ToPrefill
from kv_transfer.ports import KvReceiver, RegionHandle
from kv_transfer.seal import SessionSeal
from kv_transfer.session import Endpoint
from kv_transfer.ticket import region_digest

_log = get_logger(__name__)

_HANDSHAKE_TIMEOUT_S = 10.0
_MAX_KNOWN_PEERS = 4096


class SessionHost(Protocol):
    """What a decode worker hears of its peers' sessions. Called on the event loop."""

    def on_session_open(self, session: SessionId, peer: WorkerIdentity, link: LinkPlan) -> None:
        """A prefill worker was let in; `link` is what it writes of each page."""

    def on_ticket_refused(self, error: TicketError) -> None:
        """A prefill worker showed a permit that is not good; its request is dropped."""

    def on_peer_message(self, session: SessionId, peer: WorkerIdentity, message: ToDecode) -> None:
        """A prefill worker says something."""

    def on_session_lost(self, session: SessionId) -> None:
        """The stream ended; the peer may still be writing."""

    def on_peer_fenced(self, session: SessionId) -> None:
        """The peer of this session can never write here again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOffer:
    """What a decode worker offers to all of its peers.

    Attributes:
        num_blocks: Pages of its region.
        lease_s: How long what it grants holds without a heartbeat.
        checksums: Whether commits have to carry them.
    """

    num_blocks: int
    lease_s: float
    checksums: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agreed:
    """What a handshake came to."""

    peer: WorkerIdentity
    link: LinkPlan
    backend: str


@dataclass(slots=True, eq=False)
class _Served:
    """One session as the decode worker serves it."""

    peer: WorkerIdentity
    terms: SessionTerms
    seal: SessionSeal
    outgoing: asyncio.Queue[pb.TransferReply]
    cut: asyncio.Future[BatonError]


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
        self._newest: dict[WorkerIdentity, int] = {}
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
            _log.warning("cutting a prefill worker off", peer=str(served.peer), error=error.message)
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
            agreed = self._agree(opening)
        except BatonError as error:
            await context.write(seal.seal(pb.TransferReply(refused=failure_to_proto(error))))
            return
        await self._serve(requests, context, agreed, seal)

    def _seal(self, hello: pb.OpenSession) -> SessionSeal:
        source, target = (
            identity_from_proto(hello.identity),
            identity_from_proto(hello.expected_peer),
        )
        return SessionSeal(
            self._here.office.session_key(source, target, hello.number), prefills=False
        )

    def _agree(self, opening: pb.TransferRequest) -> _Agreed:
        """Who the peer is, what it writes of each page, and by which backend.

        Raises:
            IncompatibleError: Names what differs.
            StaleIncarnationError: The peer means another start of this worker, or shows an old greeting.
        """
        if opening.WhichOneof("request") != "open":
            raise IncompatibleError("a session begins with OpenSession")
        hello = opening.open
        if hello.protocol_version != PROTOCOL_VERSION:
            raise IncompatibleError(
                f"protocol_version: {PROTOCOL_VERSION} here, {hello.protocol_version} there"
            )
        expected = identity_from_proto(hello.expected_peer)
        if expected != self._here.identity:
            raise StaleIncarnationError(f"this is {self._here.identity}, not {expected}")
        theirs = layout_from_proto(hello.layout)
        difference = self._here.layout.difference(theirs)
        if difference is not None:
            raise IncompatibleError(f"KV layouts differ in {difference}")
        link = plan_link(theirs, self._here.layout)  # refuses a pair of ranks that share no heads
        backend = next((name for name in hello.backends if name in self._receivers), None)
        if backend is None:
            raise IncompatibleError(
                f"backends: {sorted(self._receivers)} here, {sorted(hello.backends)} there"
            )
        peer = self._identified(hello)
        return _Agreed(peer=peer, link=link, backend=backend)

    def _identified(self, hello: pb.OpenSession) -> WorkerIdentity:
        peer = identity_from_proto(hello.identity)
        if hello.number <= self._newest.get(peer, 0):
            raise StaleIncarnationError(f"session {hello.number} of {peer} has been opened before")
        self._newest.pop(peer, None)  # so that the order is that of use
        self._newest[peer] = hello.number
        if len(self._newest) > _MAX_KNOWN_PEERS:
            del self._newest[next(iter(self._newest))]
        return peer

    async def _serve(
        self,
        requests: AsyncIterator[common_pb2.Signed],
        context: grpc.aio.ServicerContext[common_pb2.Signed, common_pb2.Signed],
        agreed: _Agreed,
        seal: SessionSeal,
    ) -> None:
        self._next += 1
        session, peer = SessionId(self._next), agreed.peer
        receiver = self._receivers[agreed.backend]
        handle = receiver.handle()
        loop = asyncio.get_running_loop()
        served = _Served(
            peer=peer,
            terms=self._terms(handle),
            seal=seal,
            outgoing=asyncio.Queue(),
            cut=loop.create_future(),
        )
        self._sessions[session] = served
        served.outgoing.put_nowait(self._accepted(handle))
        self._host.on_session_open(session, peer, agreed.link)
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
            receiver.revoke(handle, lambda: _tell(loop, self._host.on_peer_fenced, session))
            await asyncio.gather(reading, writing, return_exceptions=True)

    def _terms(self, handle: RegionHandle) -> SessionTerms:
        return SessionTerms(
            office=self._here.office,
            target=self._here.identity,
            layout_digest=self._here.layout.content_digest(),
            region=region_digest(handle.opaque),
            lease_s=self._offer.lease_s,
        )

    def _accepted(self, handle: RegionHandle) -> pb.TransferReply:
        return pb.TransferReply(
            accepted=pb.SessionAccepted(
                identity=identity_to_proto(self._here.identity),
                backend=handle.backend,
                region=handle.opaque,
                num_blocks=self._offer.num_blocks,
                layout=layout_to_proto(self._here.layout),
                lease_ms=round(self._offer.lease_s * 1000),
                checksums=self._offer.checksums,
            )
        )

    async def _read(
        self, session: SessionId, served: _Served, requests: AsyncIterator[common_pb2.Signed]
    ) -> None:
        try:
            async for signed in requests:
                self._take(session, served, served.seal.open(signed, pb.TransferRequest()))
        except TicketError as error:
            self._host.on_ticket_refused(error)
            _log.warning("a session's seal is broken", peer=str(served.peer), error=error.message)
        except TransferError as error:
            _log.warning(
                "a prefill worker sent nonsense", peer=str(served.peer), error=error.message
            )

    def _take(self, session: SessionId, served: _Served, request: pb.TransferRequest) -> None:
        try:
            message = request_from_proto(request, served.terms)
        except TicketError as error:
            self._host.on_ticket_refused(error)
            return
        if isinstance(message, Heartbeat):
            beat = pb.Heartbeat(number=message.number)
            served.outgoing.put_nowait(pb.TransferReply(heartbeat=beat))
        self._host.on_peer_message(session, served.peer, message)


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
