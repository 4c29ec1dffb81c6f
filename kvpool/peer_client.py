"""A node's way to the services of other nodes: questions are sealed, answers opened. One channel per address, kept open."""

import asyncio
from collections import OrderedDict

import grpc

from baton.errors import PoolUnavailableError
from baton.rpc.channel import open_channel
from baton.rpc.reports import failure_from_proto
from baton.rpc.v1 import pool_pb2 as pb
from baton.rpc.v1 import pool_pb2_grpc
from kvpool.peer_seal import PeerSeal

_MAX_CHANNELS = 256


class PeerClient:
    """Asks other nodes. For one event loop.

    Args:
        seal: Of the cluster.
    """

    def __init__(self, seal: PeerSeal) -> None:
        self._seal = seal
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    async def ask(self, address: str, request: pb.PeerRequest, timeout_s: float) -> pb.PeerReply:
        """What the node at `address` answers.

        Raises:
            PoolUnavailableError: It does not, or not in time.
            TicketError: Somebody else answered.
            BatonError: What the node refuses with.
        """
        signed = self._seal.seal(request)
        stub = pool_pb2_grpc.PoolPeersStub(await self._channel(address))
        try:
            answer = await stub.Ask(signed, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise PoolUnavailableError(
                f"the pool node at {address} gave no answer: {error.code().name} {error.details()}"
            ) from error
        reply = self._seal.open_reply(answer, signed)
        if reply.failure.code:
            raise failure_from_proto(reply.failure)
        return reply

    async def close(self) -> None:
        """Hangs up everywhere."""
        channels, self._channels = list(self._channels.values()), OrderedDict()
        await asyncio.gather(*(channel.close(None) for channel in channels))

    async def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        self._channels.move_to_end(address)
        if len(self._channels) > _MAX_CHANNELS:
            _, oldest = self._channels.popitem(last=False)
            await oldest.close(None)
        return channel
