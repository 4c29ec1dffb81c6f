"""The decode worker's end of the hand-off's control messages: one stream per prefill worker carries all its transfers.

Counterpart of `session.py`, where the handshake is begun.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import grpc

from baton.errors import BatonError, IncompatibleError, StaleIncarnationError, TransferError
from baton.ids import WorkerIdentity
from baton.rpc.convert import (
    PROTOCOL_VERSION,
    failure_to_proto,
    identity_from_proto,
    identity_to_proto,
    layout_from_proto,
    layout_to_proto,
)
from baton.rpc.v1 import transfer_pb2 as pb
from baton.rpc.v1 import transfer_pb2_grpc as pb_grpc
from baton.telemetry.logs import get_logger
from kv_transfer.convert import reply_to_proto, request_from_proto
from kv_transfer.heads import plan_link
from kv_transfer.messages import SessionId, ToDecode, ToPrefill
from kv_transfer.ports import KvReceiver, RegionHandle
from kv_transfer.session import Endpoint

_log = get_logger(__name__)

_HANDSHAKE_TIMEOUT_S = 10.0


class SessionHost(Protocol):
    """What a decode worker hears of its peers' sessions. Called on the event loop."""

    def on_peer_message(self, session: SessionId, peer: WorkerIdentity, message: ToDecode) -> None:
        """A prefill worker says something."""

    def on_session_lost(self, session: SessionId) -> None:
        """The stream ended; the peer may still be writing."""

    def on_peer_fenced(self, session: SessionId) -> None:
        """The peer of this session can never write here again."""


@dataclass(slots=True, eq=False)
class _Served:
    """One session as the decode worker serves it."""

    peer: WorkerIdentity
    outgoing: asyncio.Queue[pb.TransferReply | BatonError]


class TransferService(pb_grpc.TransferServicer):
    """Serves `Transfer.Session` on a decode worker."""

    def __init__(
        self,
        *,
        here: Endpoint,
        num_blocks: int,
        receivers: Mapping[str, KvReceiver],
        host: SessionHost,
    ) -> None:
        self._here = here
        self._num_blocks = num_blocks
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
            served.outgoing.put_nowait(reply_to_proto(message))

    def end(self, session: SessionId, error: BatonError) -> None:
        """Cuts a peer off, which fences it."""
        served = self._sessions.get(session)
        if served is not None:
            served.outgoing.put_nowait(error)

    async def Session(  # type: ignore[override]  # noqa: N802  # the stub's name; a coroutine that writes, not an iterator
        self,
        request_iterator: AsyncIterator[pb.TransferRequest],
        context: grpc.aio.ServicerContext[pb.TransferRequest, pb.TransferReply],
    ) -> None:
        """One prefill worker's session, until either side ends it."""
        requests = aiter(request_iterator)
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                opening = await anext(requests, pb.TransferRequest())
            peer, backend = self._agree(opening)
        except TimeoutError:
            return
        except BatonError as error:
            await context.write(pb.TransferReply(refused=failure_to_proto(error)))
            return
        await self._serve(requests, context, peer, backend)

    def _agree(self, opening: pb.TransferRequest) -> tuple[WorkerIdentity, str]:
        """Who the peer is and which backend is used.

        Raises:
            IncompatibleError: Names what differs.
            StaleIncarnationError: The peer means another start of this worker.
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
        plan_link(theirs, self._here.layout)  # refuses a pair of ranks that share no heads
        backend = next((name for name in hello.backends if name in self._receivers), None)
        if backend is None:
            raise IncompatibleError(
                f"backends: {sorted(self._receivers)} here, {sorted(hello.backends)} there"
            )
        return identity_from_proto(hello.identity), backend

    async def _serve(
        self,
        requests: AsyncIterator[pb.TransferRequest],
        context: grpc.aio.ServicerContext[pb.TransferRequest, pb.TransferReply],
        peer: WorkerIdentity,
        backend: str,
    ) -> None:
        self._next += 1
        session = SessionId(self._next)
        receiver = self._receivers[backend]
        handle = receiver.handle()
        served = _Served(peer=peer, outgoing=asyncio.Queue())
        self._sessions[session] = served
        loop = asyncio.get_running_loop()
        served.outgoing.put_nowait(self._accepted(handle))
        reading = asyncio.create_task(self._read(session, peer, requests))
        writing = asyncio.create_task(_write(served, context))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, writing):
                task.cancel()
            del self._sessions[session]
            self._host.on_session_lost(session)
            receiver.revoke(handle, lambda: _tell(loop, self._host.on_peer_fenced, session))
            await asyncio.gather(reading, writing, return_exceptions=True)

    def _accepted(self, handle: RegionHandle) -> pb.TransferReply:
        return pb.TransferReply(
            accepted=pb.SessionAccepted(
                identity=identity_to_proto(self._here.identity),
                backend=handle.backend,
                region=handle.opaque,
                num_blocks=self._num_blocks,
                layout=layout_to_proto(self._here.layout),
            )
        )

    async def _read(
        self, session: SessionId, peer: WorkerIdentity, requests: AsyncIterator[pb.TransferRequest]
    ) -> None:
        try:
            async for request in requests:
                self._host.on_peer_message(session, peer, request_from_proto(request))
        except TransferError as error:
            _log.warning("a prefill worker sent nonsense", peer=str(peer), error=error.message)


async def _write(
    served: _Served, context: grpc.aio.ServicerContext[pb.TransferRequest, pb.TransferReply]
) -> None:
    while True:
        message = await served.outgoing.get()
        if isinstance(message, BatonError):
            _log.warning(
                "cutting a prefill worker off", peer=str(served.peer), error=message.message
            )
            return
        await context.write(message)


def _tell(
    loop: asyncio.AbstractEventLoop, call: Callable[[SessionId], None], session: SessionId
) -> None:
    """Brings a fence, reported from any thread, to the event loop; a loop that is closed needs it no more."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, session)
