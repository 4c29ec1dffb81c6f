"""What workers without an engine have in common: where they listen, what they say of themselves, how they are served.

A benchmark's own fakes (`bench.router.stream_workers`, `bench.router.paced_workers`) say how they take prompts and draw tokens.
"""

from pathlib import Path

import grpc

from baton.ids import Incarnation, LayerName, Role, WorkerId, WorkerIdentity, XferId
from baton.layout import KvLayout
from baton.rpc.channel import bind, new_server
from baton.rpc.hello import WorkerHello
from baton.rpc.v1 import common_pb2, transfer_pb2, worker_pb2, worker_pb2_grpc

WorkerContext = grpc.aio.ServicerContext[worker_pb2.Command, worker_pb2.Frame]


def addresses(directory: Path, decoders: int = 1) -> tuple[str, ...]:
    """Where the prefill worker and the decode workers listen."""
    return f"unix:{directory}/prefill", *(f"unix:{directory}/decode-{n}" for n in range(decoders))


def hellos(
    directory: Path, *, vocab_size: int, max_num_seqs: int
) -> tuple[WorkerHello, WorkerHello]:
    """What prefill and decode worker say of themselves."""
    layout = KvLayout(
        model_fingerprint="bench",
        dtype="float32",
        block_tokens=64,
        num_kv_heads=1,
        head_dim=8,
        layers=(LayerName("layers.0"),),
    )

    def hello(role: Role, transfer_address: str) -> WorkerHello:
        return WorkerHello(
            identity=WorkerIdentity(
                worker_id=WorkerId(f"{role.value}-0"), incarnation=Incarnation(1)
            ),
            role=role,
            layout=layout,
            max_model_len=8192,
            vocab_size=vocab_size,
            num_blocks=1 << 20,
            max_num_seqs=max_num_seqs,
            transfer_address=transfer_address,
        )

    return hello(Role.PREFILL, ""), hello(Role.DECODE, addresses(directory)[1])


def first_token(
    leg_id: int, token: int, *, queue_s: float = 0.0, prefill_s: float = 0.0
) -> worker_pb2.Frame:
    """The frame of a prompt that is computed and handed over."""
    return worker_pb2.Frame(
        prefilled=[
            worker_pb2.Prefilled(
                leg_id=leg_id,
                first_tokens=[common_pb2.SampledToken(token=token)],
                queue_s=queue_s,
                prefill_s=prefill_s,
            )
        ],
        handed_off=[worker_pb2.HandedOff(leg_id=leg_id, blocks_sent=1, bytes_sent=1)],
    )


def transfer_of(permit: common_pb2.Signed) -> XferId:
    """The transfer that a router's permit is for; nobody checks signatures here."""
    return XferId(transfer_pb2.Permit.FromString(permit.content).xfer_id)


async def serve_prefill(
    directory: Path, prefill: worker_pb2_grpc.WorkerServicer
) -> grpc.aio.Server:
    """Starts it; it serves for as long as what is returned is kept."""
    server = new_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(prefill, server)
    bind(server, addresses(directory)[0])
    await server.start()
    return server


async def serve_decode(
    directory: Path, decode: worker_pb2_grpc.WorkerServicer, number: int = 0
) -> grpc.aio.Server:
    """The same for the decode worker of that number."""
    server = new_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(decode, server)
    bind(server, addresses(directory, number + 1)[-1])
    await server.start()
    return server
