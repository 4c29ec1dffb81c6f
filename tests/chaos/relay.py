"""Stands between prefill workers and one decode worker and passes their hand-off messages on, whole and unread but for
their kind: a message of a chosen kind can be held, which keeps the transfer in exactly the state before it.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton.rpc.channel import bind, new_server, open_channel
from baton.rpc.v1 import transfer_pb2 as pb
from baton.rpc.v1.common_pb2 import Signed

_SESSION = "/baton.rpc.v1.Transfer/Session"


class SessionRelay(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not subscriptable at run time
    """A `Transfer` service that is the one at another address.

    Attributes:
        seen: Messages that came, by kind.
        holding: Set once a message of the chosen kind is held.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._kind = ""
        self._free = asyncio.Event()
        self.seen: Counter[str] = Counter()
        self.holding = asyncio.Event()

    def hold(self, kind: str) -> None:
        """Holds the next message of this kind, and what comes behind it on its stream (the name of the field in
        `TransferRequest` or `TransferReply`).
        """
        self._kind = kind
        self._free.clear()
        self.holding.clear()

    def release(self) -> None:
        """Lets what is held go on, and holds nothing more."""
        self._kind = ""
        self._free.set()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """How gRPC finds the one method there is."""
        if details.method != _SESSION:
            return None
        return grpc.stream_stream_rpc_method_handler(self._session)

    async def _session(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        async with open_channel(self._target) as channel:
            call: Any = channel.stream_stream(_SESSION)()  # type: ignore[call-arg]
            there = asyncio.create_task(self._forward(requests, call))
            back = asyncio.create_task(self._backward(call, context))
            try:
                await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                there.cancel()
                back.cancel()
                call.cancel()
                await asyncio.gather(there, back, return_exceptions=True)

    async def _forward(self, requests: AsyncIterator[bytes], call: Any) -> None:
        async for data in requests:
            await self._pass(
                pb.TransferRequest.FromString(Signed.FromString(data).content).WhichOneof("request")
            )
            await call.write(data)

    async def _backward(self, call: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        async for data in call:
            await self._pass(
                pb.TransferReply.FromString(Signed.FromString(data).content).WhichOneof("reply")
            )
            await context.write(data)

    async def _pass(self, kind: str | None) -> None:
        assert kind is not None
        self.seen[kind] += 1
        if kind == self._kind:
            self._kind = ""
            self.holding.set()
            await self._free.wait()


@asynccontextmanager
async def session_relay(target: str, address: str):
    """A relay that serves inside."""
    relay, server = SessionRelay(target), new_server()
    server.add_generic_rpc_handlers((relay,))
    bind(server, address)
    await server.start()
    try:
        yield relay
    finally:
        relay.release()
        await server.stop(0)
