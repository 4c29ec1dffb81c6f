"""A prefill worker's end of a hand-off's session, message by message, for saying what no prefill worker says."""

from typing import Any

import grpc

from baton.ids import Incarnation, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import transfer_pb2 as pb
from baton.rpc.v1 import transfer_pb2_grpc as pb_grpc
from kv_transfer.session.handshake import SessionEndpoint, greet
from kv_transfer.session.seal import SessionSeal
from kv_transfer.ticket import TicketOffice
from tests.waits import soon

PEER = WorkerIdentity(worker_id=WorkerId("raw"), incarnation=Incarnation(7))


class RawPeer:
    """Opens one session with the decode worker `target` at `address`."""

    def __init__(
        self,
        address: str,
        target: WorkerIdentity,
        layout: KvLayout,
        office: TicketOffice,
        number: int = 1,
    ) -> None:
        unlimited = [("grpc.max_send_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(address, options=unlimited)
        stub: Any = pb_grpc.TransferStub(self._channel)
        self.call = stub.Session()
        self.office = office
        here = SessionEndpoint(identity=PEER, layout=layout, office=office)
        self.opening = pb.TransferRequest(open=greet(here, target, ["shm"], number))
        key = office.session_key(PEER, target, number, layout.digest())
        self._seal = SessionSeal(key, prefills=True)

    async def begin(self, opening: common_pb2.Signed | None = None) -> pb.TransferReply:
        """Greets, and hears the answer."""
        await self.call.write(opening or self.office.seal_opening(self.opening))
        return await self.hear()

    async def say(self, **request: Any) -> None:
        """The next message."""
        await self.call.write(self._seal.seal(pb.TransferRequest(**request)))

    async def hear(self) -> pb.TransferReply:
        """The next answer. Raises `grpc.aio.AioRpcError` where the session ends with a fault."""
        signed = await soon(self.call.read())
        if not isinstance(signed, common_pb2.Signed):  # gRPC's end of the stream
            raise EOFError("the worker ended the session")
        return self._seal.open(signed, pb.TransferReply())

    async def close(self) -> None:
        """Hangs up."""
        self.call.cancel()
        await self._channel.close(None)
