"""A node's way to the services of other nodes: questions are sealed, answers opened. One channel per address, kept open."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

import grpc

from baton.errors import PoolUnavailableError
from baton.rpc.channel import open_channel
from baton.rpc.reports import failure_from_proto
from baton.rpc.v1 import common_pb2, pool_pb2_grpc
from baton.rpc.v1 import pool_pb2 as pb
from kvpool.peer_seal import PeerSeal

_MAX_CHANNELS = 256


@dataclass(slots=True, eq=False)
class _Line:
    channel: grpc.aio.Channel
    asking: int = 0


class PeerClient:
    """Asks other nodes. For one event loop.

    Args:
        seal: Of the cluster.
        max_channels: That are kept open while nobody asks anything over them.
    """

    def __init__(self, seal: PeerSeal, *, max_channels: int = _MAX_CHANNELS) -> None:
        self._seal = seal
        self._max_channels = max_channels
        self._lines: OrderedDict[str, _Line] = OrderedDict()

    async def ask(self, address: str, request: pb.PeerRequest, timeout_s: float) -> pb.PeerReply:
        """What the node at `address` answers.

        Raises:
            PoolUnavailableError: It does not, or not in time.
            TicketError: Somebody else answered.
            BatonError: What the node refuses with.
        """
        signed = self._seal.seal(request)
        answer = await self._ask(address, signed, timeout_s)
        reply = self._seal.open_reply(answer, signed)
        if reply.failure.code:
            raise failure_from_proto(reply.failure)
        return reply

    async def close(self) -> None:
        """Hangs up everywhere."""
        lines, self._lines = list(self._lines.values()), OrderedDict()
        await asyncio.gather(*(line.channel.close(None) for line in lines))

    async def _ask(
        self, address: str, signed: common_pb2.Signed, timeout_s: float
    ) -> common_pb2.Signed:
        line = self._line(address)
        line.asking += 1
        try:
            return await pool_pb2_grpc.PoolPeersStub(line.channel).Ask(signed, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise PoolUnavailableError(
                f"the pool node at {address} gave no answer: {error.code().name} {error.details()}"
            ) from error
        finally:
            line.asking -= 1
            await self._hang_up()

    def _line(self, address: str) -> _Line:
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = _Line(open_channel(address))
        self._lines.move_to_end(address)
        return line

    async def _hang_up(self) -> None:
        """Where nobody was asked for longest. A channel that is closed would cut off whoever still asks over it."""
        excess = max(0, len(self._lines) - self._max_channels)
        idle = [address for address, line in self._lines.items() if not line.asking][:excess]
        for line in [self._lines.pop(address) for address in idle]:
            await line.channel.close(None)
