"""The server for other nodes: their requests, and the sessions in which they write blocks into this node's slab.

A server of its own, beside the one for this host's workers: nothing else can be asked here,
and only with the cluster's seal.
"""

from dataclasses import dataclass

import grpc

from baton.clock import Clock
from baton.errors import (
    BatonError,
    OverloadedError,
    PoolUnavailableError,
    StaleIncarnationError,
    TicketError,
)
from baton.ids import WorkerIdentity
from baton.rpc.bounds import POOL
from baton.rpc.channel import bind, new_server
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.hello import identity_from_proto
from baton.rpc.reports import failure_to_proto
from baton.rpc.v1 import common_pb2, pool_pb2_grpc, transfer_pb2_grpc
from baton.rpc.v1 import pool_pb2 as pb
from baton.telemetry.logs import get_logger
from kv_transfer.session.handshake import SessionEndpoint
from kv_transfer.session.server import Context, Requests
from kv_transfer.ticket import Permit, refuse_holder
from kvpool.convert import incoming_to_proto, keys_from_bytes
from kvpool.messages import BlockLease
from kvpool.node.storage import NodeStorage
from kvpool.peers.client import PeerSeal
from kvpool.peers.fetcher import Fetcher
from kvpool.peers.placement import leaves_room
from kvpool.peers.receiver import PeerReceiver
from kvpool.peers.sender import PeerSender

_GRACE_S = 0.5
_CLOSED = PoolUnavailableError("the node has no blocks yet")

_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Hold:
    """A lease for a transfer (`kvpool.peers.sender.Hold`)."""

    store: NodeStorage
    clock: Clock
    lease_id: str

    def renew(self) -> bool:
        return self.store.ledger.renew(self.lease_id, _HOLD_S, self.clock.now_s())

    def release(self) -> None:
        self.store.ledger.release(self.lease_id)


class PeerRequestHandler:
    """Answers what other nodes ask: to send them blocks, and to take copies of theirs. For one event loop.

    Args:
        here: This node.
        store: Its blocks.
        outbound: Sends them.
        fetcher: Brings copies.
        clock: Monotonic.
    """

    def __init__(
        self,
        here: SessionEndpoint,
        store: NodeStorage,
        outbound: PeerSender,
        fetcher: Fetcher,
        clock: Clock,
    ) -> None:
        self._here = here
        self._store = store
        self._outbound = outbound
        self._fetcher = fetcher
        self._clock = clock

    async def answer(self, request: pb.PeerRequest) -> pb.PeerReply:
        """What a node asks that has shown the cluster's seal. Refusals are answers."""
        try:
            if identity_from_proto(request.asked) != self._here.identity:
                raise StaleIncarnationError(f"this is {self._here.identity}")
            match request.WhichOneof("request"):
                case "fetch":
                    asker = identity_from_proto(request.asker)
                    return pb.PeerReply(coming=await self._fetch(request.fetch, asker))
                case "take":
                    self._take(request.take)
                case _:
                    raise TicketError("the question is of another version")
        except BatonError as error:
            return pb.PeerReply(failure=failure_to_proto(error))
        return pb.PeerReply()

    async def _fetch(self, asked: pb.FetchBlocks, asker: WorkerIdentity) -> pb.BlocksComing:
        """Sends blocks, all or none."""
        keys = keys_from_bytes(asked.keys)
        permit = self._permit(asked, asker, len(keys))
        ledger = self._store.ledger
        lease_id = ledger.lease(keys, _HOLD_S, self._clock.now_s()).lease_id
        self._store.carry_out()
        if ledger.loading(lease_id):
            await self._store.loaded(lease_id, min(asked.wait_s, _MAX_WAIT_S))
        lease = ledger.leased(lease_id)
        if len(lease.blocks) < len(keys):
            ledger.release(lease_id)
            return pb.BlocksComing(held=len(lease.blocks))
        return self._send(permit, lease, asked.address)

    def _send(self, permit: Permit, lease: BlockLease, address: str) -> pb.BlocksComing:
        ledger = self._store.ledger
        hold = _Hold(self._store, self._clock, lease.lease_id)
        stored = [known for held in lease.blocks if (known := ledger.find(held.key)) is not None]
        if len(stored) < len(lease.blocks):  # flushed while the disk was read
            hold.release()
            return pb.BlocksComing(held=0)
        try:
            self._outbound.send(permit, [held.slot for held in lease.blocks], hold, address)
        except BatonError:
            hold.release()
            raise
        return incoming_to_proto(lease.blocks, stored)

    def _permit(self, asked: pb.FetchBlocks, asker: WorkerIdentity, num_blocks: int) -> Permit:
        """The asker's word that its slab may be written to.

        Raises:
            TicketError: It is not good, or for something else.
        """
        permit = self._here.office.read_permit(asked.permit)
        if permit.source != self._here.identity:
            raise refuse_holder("source")
        if permit.target != asker:
            raise refuse_holder("target")
        if permit.layout_digest != self._here.layout.content_digest():
            raise refuse_holder("layout_digest")
        if permit.num_blocks != num_blocks or not num_blocks:
            raise refuse_holder("num_blocks")
        return permit

    def _take(self, asked: pb.TakeReplica) -> None:
        """Begins to bring copies, where there is room without what was read of late.

        Raises:
            OverloadedError: There is none, or the node takes nothing new.
        """
        keys = keys_from_bytes(asked.keys)
        ledger, usage = self._store.ledger, self._store.ledger.usage()
        held = ledger.held(keys)
        if held == len(keys):
            return
        spare = ledger.spare_slots(self._clock.now_s())
        room = leaves_room(spare, usage.slots_total, len(keys) - held)
        if not room or ledger.refuses is not None:
            raise OverloadedError("the node takes no copies now", retry_after_s=1.0)
        if self._fetcher.start(keys, held, soon_s=0.0, only_cold=True) is None:
            raise OverloadedError("the node fetches too much already", retry_after_s=1.0)


class PeerServer(pool_pb2_grpc.PoolPeersServicer, transfer_pb2_grpc.TransferServicer):
    """Serves `PoolPeers` and `Transfer` from the process's start on. Before there is a slab it refuses everything.

    Args:
        seal: Of the cluster.
        credentials: Of this process.
    """

    def __init__(self, seal: PeerSeal, credentials: ClusterCredentials | None = None) -> None:
        self._seal = seal
        self._supplier: PeerRequestHandler | None = None
        self._inbound: PeerReceiver | None = None
        self._credentials = credentials
        self._server = new_server(credentials, POOL)
        pool_pb2_grpc.add_PoolPeersServicer_to_server(self, self._server)
        transfer_pb2_grpc.add_TransferServicer_to_server(self, self._server)

    async def start(self, address: str) -> str:
        """Binds `unix:/path` or `host:port`; returns the address with the real port.

        Raises:
            ConfigError: It cannot be bound.
        """
        bound = bind(self._server, address, self._credentials)
        await self._server.start()
        return bound

    def open(self, supplier: PeerRequestHandler, inbound: PeerReceiver) -> None:
        """There is a slab from now on."""
        self._supplier, self._inbound = supplier, inbound

    async def close(self) -> None:
        """Accepts no calls any more, and ends every session."""
        await self._server.stop(_GRACE_S)

    async def Ask(  # noqa: N802  # the stub's name
        self,
        request: common_pb2.Signed,
        context: grpc.aio.ServicerContext[common_pb2.Signed, common_pb2.Signed],
    ) -> common_pb2.Signed:
        """Another node's question."""
        try:
            question = self._seal.open(request)
        except TicketError as error:
            _log.warning("a caller without the cluster's key asked for blocks")
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
        if self._supplier is None:
            reply = pb.PeerReply(failure=failure_to_proto(_CLOSED))
        else:
            reply = await self._supplier.answer(question)
        return self._seal.seal_reply(reply, request)

    async def Session(  # type: ignore[override]  # noqa: N802  # a coroutine that writes, not an iterator
        self, request_iterator: Requests, context: Context
    ) -> None:
        """Another node's session, in which it writes into the slab."""
        if self._inbound is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, _CLOSED.message)
        else:
            await self._inbound.serve(request_iterator, context)


_MAX_WAIT_S = 1.0
_HOLD_S = 10.0
