"""A worker's gRPC server in a process of its own, whose memory can be looked at; prints its address.
Its stream is never read.

`python -m tests.security.bounded_server SECRET`
"""

import asyncio
import sys
from dataclasses import replace

from baton.ids import Incarnation, LayerName, Role, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.bounds import worker_bounds
from baton.rpc.channel import bind, new_server
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.hello import WorkerHello
from baton.rpc.identity import PeerRole, ProcessIdentity
from baton.rpc.v1 import control_pb2, control_pb2_grpc, worker_pb2, worker_pb2_grpc

LAYOUT = KvLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=16,
    num_kv_heads=1,
    head_dim=8,
    layers=(LayerName("layers.0"),),
)
HELLO = WorkerHello(
    identity=WorkerIdentity(worker_id=WorkerId("d"), incarnation=Incarnation(1)),
    role=Role.DECODE,
    layout=LAYOUT,
    max_model_len=4096,
    vocab_size=1024,
    num_blocks=64,
    max_num_seqs=8,
)
LONG = replace(HELLO, max_model_len=1 << 20)


class _Deaf(worker_pb2_grpc.WorkerServicer, control_pb2_grpc.ControlServicer):
    async def Serve(self, request_iterator, context):  # type: ignore[override]  # noqa: N802
        await context.write(worker_pb2.Frame())
        await asyncio.Event().wait()

    async def Drain(self, request, context):  # noqa: N802
        return control_pb2.DrainReply()


async def _serve(secret: bytes) -> None:
    own = ClusterCredentials(ProcessIdentity(role=PeerRole.WORKER, name="d"), secret)
    server = new_server(own, worker_bounds(HELLO))
    deaf = _Deaf()  # type: ignore[abstract]  # nobody asks more
    worker_pb2_grpc.add_WorkerServicer_to_server(deaf, server)
    control_pb2_grpc.add_ControlServicer_to_server(deaf, server)
    address = bind(server, "127.0.0.1:0", own)
    await server.start()
    print(address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(bytes.fromhex(sys.argv[1])))
