"""The hand-off's control messages over gRPC: one stream per pair of workers carries all their transfers.

The prefill worker dials (`PeerSession`), the decode worker serves (`server.py`). Both are thin: they agree on
identities, layout and backend at the handshake, turn protobuf into messages of `messages.py` and back, and report the
stream's end. What a message means is decided by `ledger.py` and `outbox.py`.
"""

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import grpc

from baton.clock import Clock
from baton.errors import BatonError, TransferError, UnreachableError, WorkerLostError
from baton.ids import BlockId, WorkerIdentity
from baton.rpc.channel import open_channel, stranger
from baton.rpc.identity import PeerRole
from baton.rpc.reports import failure_from_proto
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import transfer_pb2 as pb
from baton.rpc.v1 import transfer_pb2_grpc as pb_grpc
from kv_transfer.backends.registry import offered
from kv_transfer.lease import WriteLease
from kv_transfer.memory.page_hash import Hashing
from kv_transfer.messages import Heartbeat, ToDecode, ToPrefill
from kv_transfer.ports import KvSender
from kv_transfer.session.connection import OpenedSession, PeerConnection
from kv_transfer.session.convert import SessionTerms, reply_from_proto, request_to_proto
from kv_transfer.session.handshake import Accepted, SessionEndpoint, greet, read_accepted
from kv_transfer.session.seal import SessionSeal
from kv_transfer.ticket import region_digest

_HANDSHAKE_TIMEOUT_S = 5.0
_MAP_TIMEOUT_S = 10.0
"""For all backends together: prompts wait for it that another prefill worker, or the peer itself,
could compute meanwhile.
"""

Call = grpc.aio.StreamStreamCall[common_pb2.Signed, common_pb2.Signed]


class SessionListener(Protocol):
    """What a prefill worker hears of one session. Called on the event loop."""

    def on_open(self, peer: WorkerIdentity, opened: OpenedSession) -> None:
        """The handshake succeeded and the peer's region is mapped."""

    def on_unreachable(self, peer: WorkerIdentity, backend: str, error: TransferError) -> None:
        """The peer's region cannot be written to by the backend that it chose; the next one is tried."""

    def on_message(self, peer: WorkerIdentity, message: ToPrefill) -> None:
        """The peer says something."""

    def on_lost(self, peer: WorkerIdentity, error: BatonError) -> None:
        """The session is over, or never came up. The last call."""


class PeerSession:
    """A prefill worker's session with one decode worker."""

    def __init__(
        self,
        *,
        here: SessionEndpoint,
        peer: WorkerIdentity,
        address: str,
        senders: Mapping[str, KvSender],
        listener: SessionListener,
        hashes: Hashing,
        clock: Clock,
        number: int,
        spare: BlockId | None = None,
    ) -> None:
        """Starts dialling; must be called on the event loop.

        Args:
            here: This worker.
            peer: The decode worker meant; another incarnation at the address is refused.
            address: Its Transfer service.
            senders: Backends by name, preferred first; those that cannot reach the peer are not offered to it.
            listener: Told of everything that happens.
            hashes: Of the local arena, by every rule that it can be hashed by.
            clock: Monotonic.
            number: Of this worker's sessions with this peer; each has a greater one.
            spare: A page of the local arena to try the link with; without one it is measured on real pages only.
        """
        self._here = here
        self._peer = peer
        self._address = address
        self._senders = senders
        self._connection = PeerConnection(
            peer=peer,
            layout=here.layout,
            senders=senders,
            hashes=hashes,
            spare=spare,
            on_lost=self._on_link_lost,
        )
        self._loop = asyncio.get_running_loop()
        self._link_lost: asyncio.Future[UnreachableError] = self._loop.create_future()
        self._listener = listener
        self._clock = clock
        self._number = number
        self._offers: asyncio.Queue[Accepted] = asyncio.Queue()
        self._lease: WriteLease | None = None
        self._terms: SessionTerms | None = None
        self._beats: dict[int, float] = {}
        key = here.office.session_key(here.identity, peer, number, here.layout.digest())
        self._seal = SessionSeal(key, prefills=True)
        self._outgoing: asyncio.Queue[pb.TransferRequest] = asyncio.Queue()
        self._letting_go = False
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
        if not self._letting_go:
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        error: BatonError = WorkerLostError(f"the session with {self._peer} was closed")
        own = self._here.credentials
        # Workers hand off to workers, pool nodes to pool nodes.
        channel = open_channel(self._address, own, own.identity.role if own else PeerRole.WORKER)
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                self._senders = await offered(self._senders, self._address)
            call: Call = pb_grpc.TransferStub(channel).Session()  # type: ignore[call-arg]
            await self._talk(call)
        except BatonError as fault:
            error = fault
        except grpc.aio.AioRpcError as fault:
            error = stranger(fault, self._address, own) or self._broken_by(fault)
        except TimeoutError:
            error = UnreachableError(f"{self._peer} did not answer at {self._address}")
        finally:
            self._letting_go = True
            if self._lease is not None:
                self._lease.end()
            # The peer may be alive and reuse our target pages once it knows that we have let go of its region. Pushes
            # of this session finish first; only then does the region's connection close.
            self._listener.on_lost(self._peer, error)
            await asyncio.shield(self._let_go(channel))

    def _broken_by(self, fault: grpc.aio.AioRpcError) -> BatonError:
        """A peer that never answered may be alive, and serve others; one whose connection ended has probably died."""
        if self._lease is None and fault.code() is grpc.StatusCode.UNAVAILABLE:
            return UnreachableError(
                f"{self._peer} cannot be reached at {self._address}: {fault.details()}"
            )
        return WorkerLostError(f"the session with {self._peer} broke: {fault.details()}")

    async def _let_go(self, channel: grpc.aio.Channel) -> None:
        await self._connection.close()
        await channel.close(None)

    async def _talk(self, call: Call) -> None:
        asked_s = self._clock.now_s()
        writing = asyncio.create_task(self._write(call))
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                reply = await self._read(call)
            if reply is None:
                raise WorkerLostError(f"{self._peer} hung up before it answered")
            self._offers.put_nowait(self._agreed(reply, asked_s))
            await self._keep_up(call)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            call.cancel()

    async def _write(self, call: Call) -> None:
        # Not a request iterator: grpc leaves the task that reads one behind when the call fails.
        hello = greet(self._here, self._peer, list(self._senders), self._number)
        with suppress(asyncio.InvalidStateError):  # the call is over; who reads is told why
            await call.write(self._here.office.seal_opening(pb.TransferRequest(open=hello)))
            while True:
                await call.write(self._seal.seal(await self._outgoing.get()))

    async def _read(self, call: Call) -> pb.TransferReply | None:
        """What the peer says next; None at the end."""
        signed = await call.read()
        if not isinstance(signed, common_pb2.Signed):  # grpc's mark of the end
            return None
        return self._seal.open(signed, pb.TransferReply())

    async def _keep_up(self, call: Call) -> None:
        """Maps the region, renews the lease and listens, all at once,
        until one of them fails or the way to the region is lost.

        Beats do not wait for the region: mapping it, by one backend or another, may take longer than a lease.
        """
        tasks = [
            asyncio.create_task(part)
            for part in (self._connect(), self._beat(), self._listen(call), self._watch_link())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _beat(self) -> None:
        """One heartbeat for everything that this session writes.

        Raises:
            UnreachableError: The peer has not answered for a whole lease.
        """
        assert self._lease is not None
        for number in itertools.count(1):
            self._beats[number] = self._clock.now_s()
            self.send(Heartbeat(number=number))
            await asyncio.sleep(self._lease.beat_interval_s)
            if self._lease.expired():
                raise UnreachableError(f"{self._peer} does not answer heartbeats")

    def _answered(self, number: int) -> None:
        assert self._lease is not None
        sent_s = self._beats.get(number)
        if sent_s is not None:
            self._lease.renew(sent_s)
            self._beats = {n: s for n, s in self._beats.items() if n > number}

    async def _listen(self, call: Call) -> None:
        assert self._terms is not None
        while (reply := await self._read(call)) is not None:
            match reply.WhichOneof("reply"):
                case "heartbeat":
                    self._answered(reply.heartbeat.number)
                case "accepted" | "refused":
                    self._offers.put_nowait(self._offered(reply))
                case _:
                    self._listener.on_message(self._peer, reply_from_proto(reply, self._terms))
        raise WorkerLostError(f"{self._peer} ended the session")

    def _agreed(self, reply: pb.TransferReply, asked_s: float) -> Accepted:
        """What the peer accepted; the lease counts from before it can have counted itself."""
        accepted = self._offered(reply)
        self._lease = WriteLease(self._clock, accepted.lease_s, asked_s)
        return accepted

    def _offered(self, reply: pb.TransferReply) -> Accepted:
        """A region to write to. Whatever is granted from here on is bound to it."""
        if reply.WhichOneof("reply") == "refused":
            raise failure_from_proto(reply.refused)
        accepted = read_accepted(reply.accepted, self._here, self._peer, self._senders)
        self._terms = SessionTerms(
            office=self._here.office,
            target=self._peer,
            layout_digest=self._here.layout.content_digest(),
            region=region_digest(accepted.handle.opaque),
            lease_s=accepted.lease_s,
        )
        return accepted

    async def _connect(self) -> None:
        """Tries one backend after the other, as the peer offers them.

        Raises:
            IncompatibleError: The two do not fit.
            UnreachableError: None works, or none in time.
        """
        try:
            async with asyncio.timeout(_MAP_TIMEOUT_S):
                opened = await self._first_that_works()
        except TimeoutError as error:
            raise UnreachableError(f"no backend reached {self._peer} in time") from error
        self._listener.on_open(self._peer, opened)

    async def _first_that_works(self) -> OpenedSession:
        assert self._lease is not None
        while True:
            accepted = await self._offers.get()
            try:
                return await self._connection.open(accepted, self._lease)
            except TransferError as error:
                self._report_unreachable(accepted.handle.backend, error)

    async def _watch_link(self) -> None:
        """Ends a session whose messages still pass while pages do not: the next one opens the way anew.

        Raises:
            UnreachableError: Pages cannot be written to the peer any more.
        """
        raise await self._link_lost

    def _on_link_lost(self, error: UnreachableError) -> None:
        """From any thread; a loop that is closed needs it no more."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_link, error)

    def _end_link(self, error: UnreachableError) -> None:
        if not self._link_lost.done():
            self._link_lost.set_result(error)

    def _report_unreachable(self, backend: str, error: TransferError) -> None:
        self._listener.on_unreachable(self._peer, backend, error)
        unreachable = pb.RegionUnreachable(backend=backend, reason=error.message)
        self._outgoing.put_nowait(pb.TransferRequest(unreachable=unreachable))
