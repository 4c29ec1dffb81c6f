"""Where other nodes reach this one: their questions, and the sessions in which blocks are written into its slab.

A server of its own, beside the one for this host's workers: nothing else can be asked here, and only with the cluster's seal.
"""

import grpc

from baton.errors import PoolUnavailableError, TicketError
from baton.rpc.channel import bind, new_server
from baton.rpc.reports import failure_to_proto
from baton.rpc.v1 import common_pb2, pool_pb2_grpc, transfer_pb2_grpc
from baton.rpc.v1 import pool_pb2 as pb
from baton.telemetry.logs import get_logger
from kv_transfer.session.server import Context, Requests
from kvpool.inbound import Inbound
from kvpool.peer_seal import PeerSeal
from kvpool.supplier import Supplier

_GRACE_S = 0.5
_CLOSED = PoolUnavailableError("the node has no blocks yet")

_log = get_logger(__name__)


class PeerService(pool_pb2_grpc.PoolPeersServicer, transfer_pb2_grpc.TransferServicer):
    """Serves `PoolPeers` and `Transfer` from the process's start on. Before there is a slab it refuses everything.

    Args:
        seal: Of the cluster.
    """

    def __init__(self, seal: PeerSeal) -> None:
        self._seal = seal
        self._supplier: Supplier | None = None
        self._inbound: Inbound | None = None
        self._server = new_server()
        pool_pb2_grpc.add_PoolPeersServicer_to_server(self, self._server)
        transfer_pb2_grpc.add_TransferServicer_to_server(self, self._server)

    async def start(self, address: str) -> str:
        """Binds `unix:/path` or `host:port`; returns the address with the real port.

        Raises:
            OSError: It cannot be bound.
        """
        bound = bind(self._server, address)
        await self._server.start()
        return bound

    def open(self, supplier: Supplier, inbound: Inbound) -> None:
        """There is a slab from now on."""
        self._supplier, self._inbound = supplier, inbound

    async def close(self) -> None:
        """Lets nobody in any more, and ends every session."""
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
            _log.warning("somebody without the cluster's key asked for blocks")
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
