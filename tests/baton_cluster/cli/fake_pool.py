"""A pool's service that answers operators what it is told to, noted in the runtime directory of a cluster."""

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc

from baton.rpc.v1 import common_pb2, pool_pb2, pool_pb2_grpc
from baton_cluster.launch.runtime_dir import RuntimeDir
from tests.waits import WAIT_S

USAGE = pool_pb2.PoolUsageReply(
    node=common_pb2.WorkerIdentity(worker_id="pool-0", incarnation=0xABC),
    slots_total=1024,
    slots_free=256,
    slot_bytes=1 << 20,
    ssd_blocks=10,
    hit_blocks=3000,
    missed_blocks=1000,
    stored_blocks=1234,
    demoted_blocks=12,
    leases=3,
    directory_reachable=True,
    owners=[
        pool_pb2.OwnerUsage(tenant="small", dram_bytes=1 << 20, blocks=1),
        pool_pb2.OwnerUsage(tenant="large", dram_bytes=2 << 30, blocks=2048),
    ],
    hottest=[
        pool_pb2.HotPrefix(key=bytes(range(16)), hits=5),
        pool_pb2.HotPrefix(key=b"\xff" * 16, hits=50),
    ],
)


class FakePoolService(pool_pb2_grpc.PoolServicer):
    """Args:
    usage: What it says of itself.

    Attributes:
        answers: So often it says it, and then no more.
        flushes: What was to be flushed.
        asked: How many prefixes were asked for.
    """

    def __init__(self, usage: pool_pb2.PoolUsageReply) -> None:
        self._usage = usage
        self.answers = 1000
        self.flushes: list[pool_pb2.FlushPoolRequest] = []
        self.asked: list[int] = []

    def _unused(self, request, context):
        raise NotImplementedError

    Attach = Reserve = Commit = Abandon = Lease = _unused
    Renew = Release = ReportCorrupt = Fetch = Watch = _unused

    def Story(self, request, context):  # noqa: N802
        if request.key != bytes(range(16)):
            return common_pb2.StoryReply()
        entry = common_pb2.StoryEntry(
            at_s=2.0, event="reserved by a-p1", process="pool-0", core="pool"
        )
        return common_pb2.StoryReply(entries=[entry], now_s=3.0)

    def Usage(self, request, context):  # noqa: N802  # as gRPC names it
        if len(self.asked) == self.answers:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        self.asked.append(request.hottest)
        return self._usage

    def Flush(self, request, context):  # noqa: N802
        self.flushes.append(request)
        return pool_pb2.FlushPoolReply(blocks=1500)


@contextmanager
def serving_pool(pool: FakePoolService, runtime: RuntimeDir) -> Iterator[None]:
    """The cluster at `runtime` as one with the pool that `pool` plays."""
    address = runtime.socket_address("pool-0")
    server = grpc.server(futures.ThreadPoolExecutor(1))
    pool_pb2_grpc.add_PoolServicer_to_server(pool, server)
    server.add_insecure_port(address)
    server.start()
    runtime.note_pool(address)
    yield
    assert server.stop(None).wait(WAIT_S)
