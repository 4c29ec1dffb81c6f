"""What a pool node answers over gRPC: workers of its host, routers and operators.

A router that watches is told which blocks the node holds, as workers tell of theirs: a greeting, a snapshot, then
numbered changes. One that falls behind is sent another snapshot, one that has lost count watches anew;
so what waits for it is bounded.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from baton.blocks import BlockChanges
from baton.errors import (
    BatonError,
    InvalidRequestError,
    StaleIncarnationError,
    UnavailableError,
    disposition,
)
from baton.hashing import KEY_BYTES
from baton.ids import BlockKey, WorkerIdentity
from baton.rpc.block_feed import HEARTBEAT_S, MAX_KEYS_WAITING, BlockFeed, HeldBlocks
from baton.rpc.hello import (
    PROTOCOL_VERSION,
    identity_from_proto,
    identity_to_proto,
    layout_from_proto,
)
from baton.rpc.reports import blocks_to_proto, failure_to_proto
from baton.rpc.stories import story_to_proto
from baton.rpc.v1 import common_pb2, pool_pb2_grpc
from baton.rpc.v1 import pool_pb2 as pb
from baton.telemetry.logs import get_logger
from kvpool.convert import (
    grant_to_proto,
    keys_from_bytes,
    lease_to_proto,
    owner_from_proto,
    selection_from_proto,
    status_to_proto,
)
from kvpool.node.pool_node import PoolNode

_MAX_WAIT_S = 1.0
_MAX_HOTTEST = 1000

_Context = grpc.aio.ServicerContext[Any, Any]
_WatchContext = grpc.aio.ServicerContext[pb.WatchPoolRequest, pb.PoolFrame]

_Service = TypeVar("_Service")
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")
_Method = Callable[[_Service, _Request, _Context], Awaitable[_Reply]]

_log = get_logger(__name__)


def _typed(
    method: "_Method[_Service, _Request, _Reply]",
) -> "_Method[_Service, _Request, _Reply]":
    """Ends a call that is at fault with the code that the table of errors has for it."""

    @functools.wraps(method)
    async def answer(self: _Service, request: _Request, context: _Context) -> _Reply:
        try:
            return await method(self, request, context)
        except BatonError as error:
            await context.abort(grpc.StatusCode[disposition(error).grpc], error.message)
            raise

    return answer


class WatchStreams:
    """For one event loop.

    Args:
        node: This start of it.
        heartbeat_s: A router hears at least so often that the node lives.
        max_waiting: Changes that may wait for one router.
    """

    def __init__(
        self,
        node: WorkerIdentity,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        max_waiting: int = MAX_KEYS_WAITING,
    ) -> None:
        self._node = node
        self._heartbeat_s = heartbeat_s
        self._held = HeldBlocks(max_waiting=max_waiting)
        self._awake: set[asyncio.Event] = set()

    def __len__(self) -> int:
        return len(self._awake)

    def changed(self, changes: BlockChanges | None) -> None:
        """The node's blocks have changed; None if they have not."""
        if changes is None:
            return
        self._held.apply(changes)
        for awake in self._awake:
            awake.set()

    async def serve(self, context: _WatchContext) -> None:
        """Tells one more router, until it is gone."""
        hello = pb.PoolHello(protocol_version=PROTOCOL_VERSION, node=identity_to_proto(self._node))
        await context.write(pb.PoolFrame(hello=hello))
        feed, awake = self._held.open_feed(), asyncio.Event()
        self._awake.add(awake)
        try:
            while True:
                await context.write(await self._next(feed, awake))
        finally:
            self._awake.remove(awake)
            self._held.close_feed(feed)

    async def _next(self, feed: BlockFeed, awake: asyncio.Event) -> pb.PoolFrame:
        """What there is to tell; after a while, that there is nothing."""
        awake.clear()
        report = feed.next()
        if report is None:
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await awake.wait()
            except TimeoutError:
                return pb.PoolFrame()
            report = feed.next()
        return pb.PoolFrame(blocks=None if report is None else blocks_to_proto(report))


class PoolService(pool_pb2_grpc.PoolServicer):
    """Answers workers, routers and operators for one node.
    A request that is malformed is refused by the name of its field.
    """

    def __init__(self, node: PoolNode, watchers: WatchStreams) -> None:
        self._node = node
        self._watchers = watchers

    async def Attach(  # noqa: N802  # the stub's name
        self, request: pb.AttachPoolRequest, context: _Context
    ) -> pb.AttachPoolReply:
        """Lets a worker of this host map the slab."""
        del context
        try:
            layout = layout_from_proto(request.layout)
            welcome = self._node.attach(identity_from_proto(request.worker), layout)
        except BatonError as error:
            return pb.AttachPoolReply(failure=failure_to_proto(error))
        except OSError as error:  # of the slab's socket
            return pb.AttachPoolReply(failure=failure_to_proto(UnavailableError(str(error))))
        return pb.AttachPoolReply(
            node=identity_to_proto(self._node.identity),
            region_path=welcome.path,
            region_token=welcome.token,
            num_slots=welcome.num_slots,
            slot_bytes=welcome.slot_bytes,
        )

    @_typed
    async def Reserve(  # noqa: N802
        self, request: pb.ReservePutRequest, context: _Context
    ) -> pb.ReservePutReply:
        """Slots to write blocks to."""
        del context
        self._check_node(request.node)
        keys = keys_from_bytes(request.keys)
        outcome = self._node.reserve(
            keys,
            owner_from_proto(request.owner),
            first=request.first,
            size_bytes=request.block_bytes,
            writer=identity_from_proto(request.writer),
        )
        return grant_to_proto(outcome, keys)

    @_typed
    async def Commit(  # noqa: N802
        self, request: pb.CommitPutRequest, context: _Context
    ) -> pb.CommitPutReply:
        """A put is written."""
        del context
        return pb.CommitPutReply(
            committed=self._node.commit(request.put_id, list(request.checksums))
        )

    @_typed
    async def Lease(  # noqa: N802
        self, request: pb.LeaseBlocksRequest, context: _Context
    ) -> pb.LeaseBlocksReply:
        """Keeps the leading blocks of a text where they are."""
        del context
        self._check_node(request.node)
        keys = keys_from_bytes(request.keys)
        lease = await self._node.lease(
            keys,
            max(0.0, request.lease_s),
            min(max(0.0, request.wait_s), _MAX_WAIT_S),
            identity_from_proto(request.reader),
        )
        hits = len(lease.blocks)
        self._node.tenants.asked(request.tenant, hit_blocks=hits, missed_blocks=len(keys) - hits)
        return lease_to_proto(lease)

    @_typed
    async def Renew(  # noqa: N802
        self, request: pb.RenewLeasesRequest, context: _Context
    ) -> pb.RenewLeasesReply:
        """Prolongs leases."""
        del context
        return pb.RenewLeasesReply(
            lost=self._node.renew(request.lease_ids, max(0.0, request.lease_s))
        )

    @_typed
    async def Release(  # noqa: N802
        self, request: pb.ReleaseLeasesRequest, context: _Context
    ) -> pb.ReleaseLeasesReply:
        """Readers are done."""
        del context
        self._node.release(request.lease_ids)
        return pb.ReleaseLeasesReply()

    @_typed
    async def ReportCorrupt(  # noqa: N802
        self, request: pb.ReportCorruptRequest, context: _Context
    ) -> pb.ReportCorruptReply:
        """A reader found other bytes than were put."""
        del context
        self._check_node(request.node)
        self._node.corrupt(keys_from_bytes(request.keys))
        return pb.ReportCorruptReply()

    async def Watch(  # type: ignore[override]  # noqa: N802  # the stub's name; a coroutine that writes
        self, request: pb.WatchPoolRequest, context: _Context
    ) -> None:
        """Tells a router which blocks are here."""
        del request
        await self._watchers.serve(context)

    @_typed
    async def Flush(  # noqa: N802
        self, request: pb.FlushPoolRequest, context: _Context
    ) -> pb.FlushPoolReply:
        """Gives up blocks, here at once and on other nodes with their next renewal."""
        del context
        selection = selection_from_proto(request)
        blocks = await self._node.flush(selection)
        _log.info("the pool was flushed", blocks=blocks)
        return pb.FlushPoolReply(blocks=blocks)

    @_typed
    async def Usage(  # noqa: N802
        self, request: pb.PoolUsageRequest, context: _Context
    ) -> pb.PoolUsageReply:
        """How the node is used."""
        del context
        return status_to_proto(self._node.status(min(request.hottest, _MAX_HOTTEST)))

    @_typed
    async def Story(  # noqa: N802
        self, request: pb.BlockStoryRequest, context: _Context
    ) -> common_pb2.StoryReply:
        """What happened to one block here."""
        del context
        if len(request.key) != KEY_BYTES:
            raise InvalidRequestError(
                f"key: a block's has {KEY_BYTES} bytes, not {len(request.key)}", param="key"
            )
        told, now_s = self._node.story(BlockKey(request.key))
        return story_to_proto(self._node.identity.worker_id, told, now_s=now_s)

    def _check_node(self, named: common_pb2.WorkerIdentity) -> None:
        if identity_from_proto(named) != self._node.identity:
            raise StaleIncarnationError(
                f"node: {named.worker_id} has started again since the worker attached", param="node"
            )
