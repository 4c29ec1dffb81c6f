"""Asks the pool's nodes for operators: how they are used, and that they forget blocks."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import grpc

from baton.ids import BlockKey
from baton.rpc.channel import open_channel, stranger
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.identity import PeerRole
from baton.rpc.v1 import common_pb2, pool_pb2_grpc
from baton.rpc.v1 import pool_pb2 as pb

if TYPE_CHECKING:
    from baton.rpc.v1.pool_pb2_grpc import PoolAsyncStub  # exists for type checkers only

_USAGE_WAIT_S = 2.0
_FLUSH_WAIT_S = 30.0

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNodeAnswer(Generic[Reply]):
    """One node's.

    Attributes:
        address: Where it was asked.
        reply: What it said; None where it did not answer.
        why: It did not.
    """

    address: str
    reply: Reply | None
    why: str = ""


class PoolAdminClient:
    """All nodes that a router knows, asked at once. Each call has a connection of its own: operators ask seldom.

    Args:
        addresses: Tells the gRPC addresses of the nodes, which may change.
        credentials: Of this process.
    """

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        credentials: ClusterCredentials | None = None,
    ) -> None:
        self.addresses = addresses
        self._credentials = credentials

    async def usage(self) -> list[PoolNodeAnswer[pb.PoolUsageReply]]:
        """What each node holds, and for which tenants."""
        asked = pb.PoolUsageRequest()
        return await self._ask_all(lambda node: node.Usage(asked, timeout=_USAGE_WAIT_S))

    async def flush(self, asked: pb.FlushPoolRequest) -> list[PoolNodeAnswer[pb.FlushPoolReply]]:
        """Has every node give up what `asked` covers, while serving."""
        return await self._ask_all(lambda node: node.Flush(asked, timeout=_FLUSH_WAIT_S))

    async def story(self, key: BlockKey) -> list[PoolNodeAnswer[common_pb2.StoryReply]]:
        """What each node remembers of a block."""
        asked = pb.BlockStoryRequest(key=key)
        return await self._ask_all(lambda node: node.Story(asked, timeout=_USAGE_WAIT_S))

    async def _ask_all(
        self, question: Callable[["PoolAsyncStub"], Awaitable[Reply]]
    ) -> list[PoolNodeAnswer[Reply]]:
        return await asyncio.gather(*(self._ask(address, question) for address in self.addresses()))

    async def _ask(
        self, address: str, question: Callable[["PoolAsyncStub"], Awaitable[Reply]]
    ) -> PoolNodeAnswer[Reply]:
        async with open_channel(address, self._credentials, PeerRole.POOL) as channel:
            try:
                reply = await question(pool_pb2_grpc.PoolStub(channel))
            except grpc.aio.AioRpcError as error:
                foreign = stranger(error, address, self._credentials)
                why = foreign.message if foreign else f"{error.code().name}: {error.details()}"
                return PoolNodeAnswer(address=address, reply=None, why=why)
        return PoolNodeAnswer(address=address, reply=reply)
