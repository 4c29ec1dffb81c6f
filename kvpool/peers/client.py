"""A node's way to the services of other nodes: questions are sealed, answers opened. One channel per address, kept open."""

import asyncio
import hmac
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, TypeVar

import grpc
from blake3 import blake3
from google.protobuf.message import DecodeError, Message

from baton.errors import PoolUnavailableError, TicketError
from baton.rpc.channel import open_channel
from baton.rpc.reports import failure_from_proto
from baton.rpc.v1 import common_pb2, pool_pb2_grpc
from baton.rpc.v1 import pool_pb2 as pb
from kv_transfer.ticket import TicketFault

_Said = TypeVar("_Said", bound=Message)

_MAX_CHANNELS = 256


@dataclass(slots=True, eq=False)
class _Line:
    channel: grpc.aio.Channel
    asking: int = 0


class PeerSeal:
    """Seals and opens questions and answers.

    Args:
        secret: Of the cluster.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = blake3(secret, derive_key_context="baton 2026 pool peers").digest()

    def seal(self, request: pb.PeerRequest) -> common_pb2.Signed:
        """A question."""
        return self._sealed(_QUESTION, request)

    def open(self, signed: common_pb2.Signed) -> pb.PeerRequest:
        """The same at the other end.

        Raises:
            TicketError: It does not come from a node of this cluster.
        """
        return self._opened(_QUESTION, signed, pb.PeerRequest())

    def seal_reply(self, reply: pb.PeerReply, asked: common_pb2.Signed) -> common_pb2.Signed:
        """The answer to what was `asked`."""
        return self._sealed(_ANSWER + asked.mac, reply)

    def open_reply(self, signed: common_pb2.Signed, asked: common_pb2.Signed) -> pb.PeerReply:
        """The same at the other end.

        Raises:
            TicketError: It is not the answer to this, or not of a node of this cluster.
        """
        return self._opened(_ANSWER + asked.mac, signed, pb.PeerReply())

    def _sealed(self, kind: bytes, message: Message) -> common_pb2.Signed:
        content = message.SerializeToString()
        return common_pb2.Signed(content=content, mac=self._mac(kind, content))

    def _opened(self, kind: bytes, signed: common_pb2.Signed, said: _Said) -> _Said:
        if not hmac.compare_digest(signed.mac, self._mac(kind, signed.content)):
            raise TicketError(
                "a message between pool nodes is not sealed with this cluster's key",
                param=TicketFault.SEAL.value,
            )
        try:
            said.ParseFromString(signed.content)
        except DecodeError as error:
            raise TicketError(
                "a sealed message cannot be read", param=TicketFault.MALFORMED.value
            ) from error
        return said

    def _mac(self, kind: bytes, content: bytes) -> bytes:
        return blake3(kind + content, key=self._key).digest(length=MAC_BYTES)


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


MAC_BYTES: Final = 32
_QUESTION, _ANSWER = b"q", b"a"
