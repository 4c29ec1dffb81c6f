"""Routers that watch a pool node: each is told which blocks the node holds, as workers tell of theirs.

A stream begins with a greeting and a snapshot and goes on with numbered changes. A router that falls behind is sent another
snapshot, one that has lost count watches anew; so what waits for it is bounded either way.
"""

import asyncio

import grpc

from baton.blocks import BlockChanges
from baton.ids import WorkerIdentity
from baton.rpc.block_feed import HEARTBEAT_S, MAX_KEYS_WAITING, BlockFeed, HeldBlocks
from baton.rpc.hello import PROTOCOL_VERSION, identity_to_proto
from baton.rpc.reports import blocks_to_proto
from baton.rpc.v1 import pool_pb2 as pb

_Context = grpc.aio.ServicerContext[pb.WatchPoolRequest, pb.PoolFrame]


class Watchers:
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

    async def serve(self, context: _Context) -> None:
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
