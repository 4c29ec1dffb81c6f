"""A worker's client of its host's pool node: attaches, maps the slab,
and does so again whenever the node has started anew.

Without a node every call raises `PoolUnavailableError` and the worker computes what it needs;
nothing waits for a node to come.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

import grpc

from baton.backoff import Backoff
from baton.errors import BatonError, PoolUnavailableError, TransferError
from baton.ids import BlockKey, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.channel import open_channel
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.hello import identity_from_proto, identity_to_proto, layout_to_proto
from baton.rpc.identity import PeerRole
from baton.rpc.reports import failure_from_proto
from baton.rpc.v1 import pool_pb2 as pb
from baton.rpc.v1 import pool_pb2_grpc
from baton.telemetry.logs import get_logger
from kv_transfer.memory.pages import Pages
from kv_transfer.memory.shared_region import Attachment, attach_region
from kvpool.client.arena_pages import slab_layers
from kvpool.convert import (
    MAX_KEYS,
    grant_from_proto,
    keys_to_bytes,
    lease_from_proto,
    owner_to_proto,
)
from kvpool.messages import BlockLease, Owner, PutGrant, PutRefused

CALL_TIMEOUT_S = 2.0
_RETRIES = Backoff(first_s=0.1, max_s=5.0)

OnSlab = Callable[[list[Pages] | None], None]
"""Told, on the event loop, when a slab was mapped, and with None when its node is gone."""

_log = get_logger(__name__)


class GrpcPoolClient:
    """A `PoolClient` over gRPC. One event loop owns it.

    Args:
        address: Of the node: `unix:/path`.
        worker: The worker that attaches.
        layout: Of the worker's pages.
        on_slab: Told of slabs that come and go.
        credentials: Of this process; None where the node is reached by a Unix socket only.
    """

    def __init__(
        self,
        address: str,
        worker: WorkerIdentity,
        layout: KvLayout,
        on_slab: OnSlab,
        *,
        credentials: ClusterCredentials | None = None,
    ) -> None:
        self._address = address
        self._worker = identity_to_proto(worker)
        self._layout = layout
        self._on_slab = on_slab
        self._credentials = credentials
        self._node: pb.AttachPoolReply | None = None
        self._slab: list[Pages] | None = None
        self._attaching: asyncio.Task[None] | None = None
        self._unusable: BatonError | None = None  # why the node is, as it was logged

    async def start(self) -> None:
        """Begins to look for the node; returns at once."""
        self._attaching = asyncio.create_task(self._stay_attached(), name="pool-client")

    async def close(self) -> None:
        """Lets go of the slab."""
        if self._attaching is not None:
            self._attaching.cancel()
            await asyncio.wait([self._attaching])

    def slab(self) -> list[Pages] | None:
        """See `PoolClient`."""
        return self._slab

    def node(self) -> WorkerIdentity | None:
        """See `AttachedClient`."""
        return None if self._node is None else identity_from_proto(self._node.node)

    async def lease(
        self, keys: Sequence[BlockKey], lease_s: float, wait_s: float, tenant: str = ""
    ) -> BlockLease:
        """See `PoolClient`."""
        keys = keys[:MAX_KEYS]
        request = pb.LeaseBlocksRequest(
            reader=self._worker,
            node=self._attached().node,
            keys=keys_to_bytes(keys),
            lease_s=lease_s,
            wait_s=wait_s,
            tenant=tenant,
        )
        with _unavailable():
            reply = await self._stub.Lease(request, timeout=CALL_TIMEOUT_S + wait_s)
        return lease_from_proto(reply, keys)

    async def renew(self, lease_ids: Sequence[str], lease_s: float) -> tuple[str, ...]:
        """See `PoolClient`."""
        self._attached()
        request = pb.RenewLeasesRequest(lease_ids=lease_ids, lease_s=lease_s)
        with _unavailable():
            reply = await self._stub.Renew(request, timeout=CALL_TIMEOUT_S)
        return tuple(reply.lost)

    async def release(self, lease_ids: Sequence[str]) -> None:
        """See `PoolClient`."""
        self._attached()
        with _unavailable():
            await self._stub.Release(
                pb.ReleaseLeasesRequest(lease_ids=lease_ids), timeout=CALL_TIMEOUT_S
            )

    async def reserve(
        self, keys: Sequence[BlockKey], owner: Owner, first: int
    ) -> PutGrant | PutRefused:
        """See `PoolClient`."""
        request = pb.ReservePutRequest(
            writer=self._worker,
            node=self._attached().node,
            owner=owner_to_proto(owner),
            keys=keys_to_bytes(keys),
            first=first,
            block_bytes=self._layout.page_bytes,
        )
        with _unavailable():
            reply = await self._stub.Reserve(request, timeout=CALL_TIMEOUT_S)
        return grant_from_proto(reply, keys)

    async def commit(self, put_id: str, checksums: Sequence[bytes]) -> int:
        """See `PoolClient`."""
        self._attached()
        request = pb.CommitPutRequest(put_id=put_id, checksums=checksums)
        with _unavailable():
            reply = await self._stub.Commit(request, timeout=CALL_TIMEOUT_S)
        return int(reply.committed)

    async def corrupt(self, keys: Sequence[BlockKey]) -> None:
        """See `PoolClient`."""
        request = pb.ReportCorruptRequest(node=self._attached().node, keys=keys_to_bytes(keys))
        with _unavailable():
            await self._stub.ReportCorrupt(request, timeout=CALL_TIMEOUT_S)

    def _attached(self) -> pb.AttachPoolReply:
        if self._node is None:
            raise PoolUnavailableError("there is no pool node on this host now")
        return self._node

    async def _stay_attached(self) -> None:
        failures = 0
        while True:
            try:
                # A channel of its own each time: it shows the certificate that this process had when it was opened.
                async with open_channel(self._address, self._credentials, PeerRole.POOL) as channel:
                    self._stub = pool_pb2_grpc.PoolStub(channel)
                    await self._attach_once()
                failures = 0
            except (BatonError, grpc.aio.AioRpcError) as error:
                _log.debug("no pool node yet", address=self._address, reason=str(error))
            failures += 1
            await asyncio.sleep(_RETRIES.wait_s(failures))

    async def _attach_once(self) -> None:
        """From the node's welcome to its end."""
        request = pb.AttachPoolRequest(worker=self._worker, layout=layout_to_proto(self._layout))
        reply = await self._stub.Attach(request, timeout=CALL_TIMEOUT_S)
        if reply.failure.code:
            error = failure_from_proto(reply.failure)
            self._note_unusable("the pool refuses this worker", error)
            raise error
        size_bytes = reply.num_slots * reply.slot_bytes
        try:
            attachment = await asyncio.to_thread(
                attach_region, reply.region_path, reply.region_token, size_bytes
            )
        except TransferError as error:
            self._note_unusable("the pool's memory cannot be mapped", error)
            raise
        try:
            self._take(reply, attachment)
            await _hung_up(attachment)
        finally:
            self._node = self._slab = None
            self._on_slab(None)
            attachment.close()

    def _note_unusable(self, what: str, error: BatonError) -> None:
        """Once, and not at every attempt; figures in the text may differ."""
        told = self._unusable
        if told is None or (told.code, told.param) != (error.code, error.param):
            _log.error(what, reason=error.message)
        self._unusable = error

    def _take(self, reply: pb.AttachPoolReply, attachment: Attachment) -> None:
        self._slab = slab_layers(
            attachment.region.memoryview,
            self._layout,
            num_slots=reply.num_slots,
            slot_bytes=reply.slot_bytes,
        )
        self._node, self._unusable = reply, None
        self._on_slab(self._slab)
        _log.info("attached to the pool", node=str(identity_from_proto(reply.node)))


async def _hung_up(attachment: Attachment) -> None:
    """Returns when the node is gone: its end of the region's connection has closed."""
    connection = attachment.connection
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    while True:
        try:
            if not await loop.sock_recv(connection, 1):
                return
        except OSError:
            return


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    task = asyncio.current_task()
    assert task is not None
    cancelled = task.cancelling()
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise PoolUnavailableError(
            f"the pool node gave no answer: {error.code().name} {error.details()}"
        ) from error
    except asyncio.CancelledError as error:
        # A channel that is closed, here as the node has gone, cancels its calls; who waits for one was not cancelled.
        if task.cancelling() > cancelled:
            raise
        raise PoolUnavailableError("the pool node went before it answered") from error
