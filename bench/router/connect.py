"""How long a connection to a worker of `bench.router_stream` takes until it has greeted:
`python -m bench.router.connect WAY ADDRESS TIMES`.

Prints the median in milliseconds. Channels are opened one after the other; each makes a connection of its own.
"""

import asyncio
import sys
import time
from statistics import median

import grpc

from baton.rpc.channel import open_channel
from baton.rpc.identity import PeerRole
from baton.rpc.v1 import worker_pb2_grpc
from bench.router.stream_workers import Way, own_credentials

_WARM_UP = 5


async def _run(way: Way, address: str, times: int) -> float:
    credentials = own_credentials(way, PeerRole.ROUTER)
    took_s = []
    for _ in range(_WARM_UP + times):
        begun_s = time.perf_counter()
        if way is Way.PLAIN:
            channel = grpc.aio.insecure_channel(address)
        else:
            channel = open_channel(address, credentials)
        async with channel:
            call = worker_pb2_grpc.WorkerStub(channel).Serve()  # type: ignore[call-arg]
            await call.read()
            took_s.append(time.perf_counter() - begun_s)
            call.cancel()
    return median(took_s[_WARM_UP:]) * 1e3


if __name__ == "__main__":
    print(asyncio.run(_run(Way(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
