"""The hand-off's control messages over gRPC: one stream per pair of workers carries all their transfers.

The prefill worker dials (`PeerSession`), the decode worker serves (`session_service.py`). Both are thin: they agree on
identities, layout and backend at the handshake, turn protobuf into messages of `messages.py` and back, and report the
stream's end. What a message means is decided by `ledger.py` and `outbox.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import grpc

from baton.errors import (
    BatonError,
    IncompatibleError,
    StaleIncarnationError,
    TransferError,
    WorkerLostError,
)
from baton.ids import WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.channel import open_channel
from baton.rpc.convert import (
    PROTOCOL_VERSION,
    failure_from_proto,
    identity_from_proto,
    identity_to_proto,
    layout_from_proto,
    layout_to_proto,
)
from baton.rpc.v1 import transfer_pb2 as pb
from baton.rpc.v1 import transfer_pb2_grpc as pb_grpc
from baton.telemetry.logs import get_logger
from kv_transfer.convert import (
    reply_from_proto,
    request_to_proto,
)
from kv_transfer.heads import LinkPlan, plan_link
from kv_transfer.messages import ToDecode, ToPrefill
from kv_transfer.ports import KvSender, KvWriter, RegionHandle

_log = get_logger(__name__)

_HANDSHAKE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Who a worker is at the handshake."""

    identity: WorkerIdentity
    layout: KvLayout


class SessionListener(Protocol):
    """What a prefill worker hears of one session. Called on the event loop."""

    def on_open(
        self, peer: WorkerIdentity, writer: KvWriter, region_blocks: int, link: LinkPlan
    ) -> None:
        """The handshake succeeded and the peer's region, of so many pages, is mapped."""

    def on_message(self, peer: WorkerIdentity, message: ToPrefill) -> None:
        """The peer says something."""

    def on_lost(self, peer: WorkerIdentity, error: BatonError) -> None:
        """The session is over, or never came up. The last call."""


class PeerSession:
    """A prefill worker's session with one decode worker."""

    def __init__(
        self,
        *,
        here: Endpoint,
        peer: WorkerIdentity,
        address: str,
        senders: Mapping[str, KvSender],
        listener: SessionListener,
    ) -> None:
        """Starts dialling; must be called on the event loop.

        Args:
            here: This worker.
            peer: The decode worker meant; another incarnation at the address is refused.
            address: Its Transfer service.
            senders: Backends by name, preferred first.
            listener: Told of everything that happens.
        """
        self._here = here
        self._peer = peer
        self._address = address
        self._senders = senders
        self._listener = listener
        self._outgoing: asyncio.Queue[pb.TransferRequest] = asyncio.Queue()
        self._connecting: asyncio.Task[KvWriter] | None = None
        self._task = asyncio.create_task(self._run(), name=f"transfer-session {peer}")

    def send(self, message: ToDecode) -> None:
        """Queues a message; lost without a trace if the session breaks, which `on_lost` tells."""
        self._outgoing.put_nowait(request_to_proto(message))

    @property
    def over(self) -> bool:
        """Whether it has ended and the peer's region is let go."""
        return self._task.done()

    async def close(self) -> None:
        """Ends the session and waits until no push is on its way; `on_lost` has been called afterwards."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        error: BatonError = WorkerLostError(f"the session with {self._peer} was closed")
        channel = open_channel(self._address)
        try:
            await self._talk(pb_grpc.TransferStub(channel).Session(self._requests()))
        except BatonError as fault:
            error = fault
        except grpc.aio.AioRpcError as fault:
            error = WorkerLostError(f"the session with {self._peer} broke: {fault.details()}")
        except TimeoutError:
            error = WorkerLostError(f"{self._peer} did not answer at {self._address}")
        finally:
            # The peer may be alive and reuse our target pages once it knows that we have let go of its region. Pushes
            # of this session finish first; only then does the region's connection close.
            self._listener.on_lost(self._peer, error)
            await asyncio.shield(self._let_go(channel))

    async def _let_go(self, channel: grpc.aio.Channel) -> None:
        if self._connecting is not None:
            try:
                writer = await self._connecting
            except (TransferError, IncompatibleError):
                _log.debug("the peer's region was never mapped", peer=str(self._peer))
            else:
                await asyncio.to_thread(writer.close)
        await channel.close(None)

    async def _requests(self) -> AsyncIterator[pb.TransferRequest]:
        yield pb.TransferRequest(
            open=pb.OpenSession(
                protocol_version=PROTOCOL_VERSION,
                identity=identity_to_proto(self._here.identity),
                expected_peer=identity_to_proto(self._peer),
                layout=layout_to_proto(self._here.layout),
                backends=list(self._senders),
            )
        )
        while True:
            yield await self._outgoing.get()

    async def _talk(
        self, call: grpc.aio.StreamStreamCall[pb.TransferRequest, pb.TransferReply]
    ) -> None:
        replies = call.__aiter__()
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                await self._shake_hands(await anext(replies))
            async for reply in replies:
                self._listener.on_message(self._peer, reply_from_proto(reply))
        except StopAsyncIteration:
            pass  # the peer hung up before it answered: told below
        finally:
            call.cancel()
        raise WorkerLostError(f"{self._peer} ended the session")

    async def _shake_hands(self, reply: pb.TransferReply) -> None:
        if reply.WhichOneof("reply") == "refused":
            raise failure_from_proto(reply.refused)
        accepted = reply.accepted
        identity = identity_from_proto(accepted.identity)
        if identity != self._peer:
            raise StaleIncarnationError(f"{self._address} is {identity}, expected {self._peer}")
        sender = self._senders.get(accepted.backend)
        if sender is None:
            raise IncompatibleError(
                f"{self._peer} chose a backend not offered: {accepted.backend!r}"
            )
        layout = layout_from_proto(accepted.layout)
        link = plan_link(self._here.layout, layout)
        handle = RegionHandle(
            backend=accepted.backend, opaque=accepted.region, num_blocks=accepted.num_blocks
        )
        # Shielded: a writer that is still being made when the session ends has to be closed all the same.
        connect = asyncio.to_thread(sender.connect, handle, self._here.layout, layout)
        self._connecting = asyncio.create_task(connect)
        writer = await asyncio.shield(self._connecting)
        self._listener.on_open(self._peer, writer, accepted.num_blocks, link)
