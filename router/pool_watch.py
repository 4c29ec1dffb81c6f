"""The links to the pool's nodes: from each a stream of reports on its blocks, opened again whenever it breaks.

Reports go into the prefix index; commands do not exist, since routers ask nothing of a pool. A node that cannot be
reached, or is silent for a while, holds nothing as far as routing is concerned.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from baton.backoff import Backoff
from baton.clock import Clock, MonotonicClock
from baton.errors import IncompatibleError
from baton.ids import WorkerIdentity
from baton.rpc.channel import open_channel, stranger
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.hello import PROTOCOL_VERSION, identity_from_proto
from baton.rpc.identity import PeerRole
from baton.rpc.reports import blocks_from_proto
from baton.rpc.v1 import pool_pb2 as pb
from baton.rpc.v1 import pool_pb2_grpc
from baton.telemetry.logs import get_logger
from router.discovery.asked import AskedAddresses
from router.discovery.ports import Sighting
from router.routing.pools import PoolNodes

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTiming:
    """How a watch waits.

    Attributes:
        backoff: Waits before connecting again.
        silence_s: A node that is well sends several frames in this time.
    """

    backoff: Backoff = Backoff(first_s=0.1, max_s=2.0)
    silence_s: float = 3.0


class PoolWatch:
    """Keeps one address watched, whichever node is there.

    Args:
        address: gRPC address of a pool node.
        pools: Told of nodes that come and go and what they hold, on the event loop.
        timing: How it waits.
        credentials: Of this process.

    Attributes:
        node: The node that is there now; None while none is.
    """

    def __init__(
        self,
        address: str,
        pools: PoolNodes,
        *,
        timing: WatchTiming | None = None,
        credentials: ClusterCredentials | None = None,
    ) -> None:
        self.address = address
        self.node: WorkerIdentity | None = None
        self._pools = pools
        self._timing = timing or WatchTiming()
        self._credentials = credentials
        self._told = ""

    @property
    def connected(self) -> bool:
        """Whether a node is there."""
        return self.node is not None

    async def run(self) -> None:
        """Watches, and watches anew, until cancelled."""
        failures = 0
        while True:
            was_there = False
            async with open_channel(self.address, self._credentials, PeerRole.POOL) as channel:
                call = pool_pb2_grpc.PoolStub(channel).Watch(pb.WatchPoolRequest())
                try:
                    await self._listen(call)
                except IncompatibleError as error:
                    self._refuse(error)
                except grpc.aio.AioRpcError as error:
                    foreign = stranger(error, self.address, self._credentials)
                    if foreign is not None:
                        self._refuse(foreign)
                    else:
                        _log.debug("pool node is away", address=self.address, reason=repr(error))
                except TimeoutError as error:
                    _log.debug("pool node is away", address=self.address, reason=repr(error))
                finally:
                    call.cancel()
                    was_there = self._part()
            failures = 1 if was_there else failures + 1
            await asyncio.sleep(self._timing.backoff.wait_s(failures))

    def _refuse(self, error: IncompatibleError) -> None:
        if error.message != self._told:  # not at every attempt
            _log.error("pool node cannot be used", address=self.address, reason=error.message)
            self._told = error.message

    async def _listen(
        self, call: "grpc.aio.UnaryStreamCall[pb.WatchPoolRequest, pb.PoolFrame]"
    ) -> None:
        """From the greeting until the stream ends, or has a gap."""
        frames = aiter(call)
        node = self._greeted(await self._next(frames))
        self._pools.join(node, self.address)
        self.node, self._told = node, ""
        _log.info("pool node watched", node=str(node), address=self.address)
        while True:
            frame = await self._next(frames)
            if not frame.HasField("blocks"):
                continue
            try:
                report = blocks_from_proto(frame.blocks)
            except ValueError as error:
                raise IncompatibleError(f"{node} sent a bad frame: {error}") from error
            if self._pools.report_blocks(node, report):
                return  # the next watch begins with a snapshot

    async def _next(self, frames: AsyncIterator[pb.PoolFrame]) -> pb.PoolFrame:
        async with asyncio.timeout(self._timing.silence_s):
            frame = await anext(frames, None)
        if frame is None:
            raise TimeoutError("the node ended its stream")
        return frame

    def _greeted(self, frame: pb.PoolFrame) -> WorkerIdentity:
        hello = frame.hello
        if hello.protocol_version != PROTOCOL_VERSION:
            theirs = hello.protocol_version
            raise IncompatibleError(f"protocol_version: {PROTOCOL_VERSION} here, {theirs} there")
        if not hello.node.worker_id or not hello.node.incarnation:
            raise IncompatibleError("greeting without identity")
        return identity_from_proto(hello.node)

    def _part(self) -> bool:
        """What the node held is void; whether there was one."""
        node, self.node = self.node, None
        if node is None:
            return False
        self._pools.lose(node)
        _log.warning("pool node lost", node=str(node), address=self.address)
        return True


class PoolWatches:
    """All watches: of the addresses that are listed, and of those that discovery names.

    Args:
        addresses: gRPC addresses of nodes that are always watched.
        pools: Told of nodes that come and go and what they hold.
        timing: How watches wait.
        credentials: Of this process.
        clock: Monotonic.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        pools: PoolNodes,
        *,
        timing: WatchTiming | None = None,
        credentials: ClusterCredentials | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._asked = AskedAddresses(
            "pool node",
            addresses,
            lambda address: PoolWatch(address, pools, timing=timing, credentials=credentials),
            clock or MonotonicClock(),
        )

    @property
    def watches(self) -> tuple[PoolWatch, ...]:
        """One per address that is watched."""
        return self._asked.all()

    def addresses(self) -> tuple[str, ...]:
        """All that are watched."""
        return tuple(watch.address for watch in self.watches)

    def start(self) -> None:
        """Begins to watch, in the background."""
        self._asked.start()

    def follow(self, sightings: Collection[Sighting]) -> None:
        """Nodes may be there too."""
        self._asked.follow(sightings)

    async def close(self) -> None:
        """Watches nowhere any more."""
        await self._asked.close()


@asynccontextmanager
async def watching(
    addresses: Sequence[str],
    pools: PoolNodes,
    *,
    timing: WatchTiming | None = None,
    credentials: ClusterCredentials | None = None,
) -> AsyncIterator[PoolWatches]:
    """Watches the nodes at all `addresses`, and where it is told to, while inside."""
    watches = PoolWatches(addresses, pools, timing=timing, credentials=credentials)
    watches.start()
    try:
        yield watches
    finally:
        await watches.close()
