"""Calls to the services of other nodes: sealed requests, verified replies. One channel per address, kept open.

Messages between nodes are sealed with the cluster's key: only its nodes are heard, and an answer fits one question.
Sessions, which carry the blocks, have seals of their own (`kv_transfer.session.seal`).
"""

import asyncio
import hmac
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from baton.errors import PoolUnavailableError, TicketError
from baton.keyed_hash import derive_key, keyed_hash
from baton.rpc.channel import open_channel, stranger
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.identity import PeerRole
from baton.rpc.reports import failure_from_proto
from baton.rpc.v1 import common_pb2, pool_pb2_grpc
from baton.rpc.v1 import pool_pb2 as pb
from kv_transfer.ticket import TicketFault

_Said = TypeVar("_Said", bound=Message)

_MAX_CHANNELS = 256


@dataclass(slots=True, eq=False)
class _Channel:
    channel: grpc.aio.Channel
    asking: int = 0


class PeerSeal:
    """Seals and opens questions and answers.

    Args:
        secret: Of the cluster.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = derive_key(secret, "baton 2026 pool peers")

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
        return keyed_hash(kind + content, self._key, MAC_BYTES)


class PeerClient:
    """Asks other nodes. For one event loop.

    Args:
        seal: Of the cluster.
        credentials: Of this process.
        max_channels: That are kept open while no question is pending on them.
    """

    def __init__(
        self,
        seal: PeerSeal,
        credentials: ClusterCredentials | None = None,
        *,
        max_channels: int = _MAX_CHANNELS,
    ) -> None:
        self._seal = seal
        self._credentials = credentials
        self._max_channels = max_channels
        self._certificates = 0 if credentials is None else credentials.version
        self._channels: OrderedDict[str, _Channel] = OrderedDict()

    async def ask(self, address: str, request: pb.PeerRequest, timeout_s: float) -> pb.PeerReply:
        """What the node at `address` answers.

        Raises:
            PoolUnavailableError: It does not, or not in time.
            IncompatibleError: The process there is not of this cluster.
            TicketError: The answer does not carry the cluster's seal.
            BatonError: What the node refuses with.
        """
        signed = self._seal.seal(request)
        answer = await self._ask(address, signed, timeout_s)
        reply = self._seal.open_reply(answer, signed)
        if reply.failure.code:
            raise failure_from_proto(reply.failure)
        return reply

    async def close(self) -> None:
        """Closes every channel."""
        lines, self._channels = list(self._channels.values()), OrderedDict()
        await asyncio.gather(*(line.channel.close(None) for line in lines))

    async def _ask(
        self, address: str, signed: common_pb2.Signed, timeout_s: float
    ) -> common_pb2.Signed:
        await self._forget_old_certificates()
        line = self._channel(address)
        line.asking += 1
        try:
            return await pool_pb2_grpc.PoolPeersStub(line.channel).Ask(signed, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            foreign = stranger(error, address, self._credentials)
            raise foreign or PoolUnavailableError(
                f"the pool node at {address} gave no answer: {error.code().name} {error.details()}"
            ) from error
        finally:
            line.asking -= 1
            if not line.asking and line is not self._channels.get(address):
                await line.channel.close(None)
            await self._close_idle()

    async def _forget_old_certificates(self) -> None:
        """Channels that were opened with another certificate than the present one are not used any more."""
        if self._credentials is None or self._credentials.version == self._certificates:
            return
        self._certificates = self._credentials.version
        lines, self._channels = list(self._channels.values()), OrderedDict()
        for line in lines:
            if not line.asking:
                await line.channel.close(None)

    def _channel(self, address: str) -> _Channel:
        line = self._channels.get(address)
        if line is None:
            line = self._channels[address] = _Channel(
                open_channel(address, self._credentials, PeerRole.POOL)
            )
        self._channels.move_to_end(address)
        return line

    async def _close_idle(self) -> None:
        """Closes the channels that were idle for longest; a channel with a pending question stays open."""
        excess = max(0, len(self._channels) - self._max_channels)
        idle = [address for address, line in self._channels.items() if not line.asking][:excess]
        for line in [self._channels.pop(address) for address in idle]:
            await line.channel.close(None)


MAC_BYTES: Final = 32
_QUESTION, _ANSWER = b"q", b"a"
