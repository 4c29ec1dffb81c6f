"""Asking many nodes over few channels."""

import asyncio
from pathlib import Path

import grpc
import pytest

from baton.errors import PoolUnavailableError
from baton.rpc.channel import bind, new_server
from baton.rpc.v1 import common_pb2, pool_pb2_grpc
from baton.rpc.v1 import pool_pb2 as pb
from kvpool.peers.client import PeerClient, PeerSeal
from tests.waits import soon

SEAL = PeerSeal(bytes(32))


class Slow(pool_pb2_grpc.PoolPeersServicer):
    """Answers once it may."""

    def __init__(self) -> None:
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def Ask(  # noqa: N802  # the stub's name
        self,
        request: common_pb2.Signed,
        context: grpc.aio.ServicerContext[common_pb2.Signed, common_pb2.Signed],
    ) -> common_pb2.Signed:
        del context
        self.asked.set()
        await self.may.wait()
        return SEAL.seal_reply(pb.PeerReply(coming=pb.BlocksComing(held=1)), request)


async def test_nobodys_question_is_cut_off_because_others_are_asked_too(tmp_path: Path) -> None:
    server, slow = new_server(), Slow()
    pool_pb2_grpc.add_PoolPeersServicer_to_server(slow, server)
    address = bind(server, f"unix:{tmp_path}/slow.sock")
    await server.start()
    client = PeerClient(SEAL, max_channels=1)
    try:
        asking = asyncio.create_task(client.ask(address, pb.PeerRequest(), 30.0))
        await soon(slow.asked.wait())
        for number in range(3):
            with pytest.raises(PoolUnavailableError):
                await client.ask(f"unix:{tmp_path}/{number}.sock", pb.PeerRequest(), 5.0)
        slow.may.set()
        assert (await asking).coming.held == 1
    finally:
        await client.close()
        await server.stop(0)
