"""The greeting of a worker (its identity and what it holds), between protobuf messages and Baton's own dataclasses."""

from dataclasses import dataclass

from baton.generation import WorkerLoad
from baton.ids import Incarnation, LayerName, Role, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.v1 import common_pb2 as pb

PROTOCOL_VERSION = 7

_ROLES = {
    Role.PREFILL: pb.ROLE_PREFILL,
    Role.DECODE: pb.ROLE_DECODE,
    Role.HYBRID: pb.ROLE_HYBRID,
}
_ROLES_BACK = {number: role for role, number in _ROLES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """What a worker says of itself first on every stream; see the message of the same name."""

    identity: WorkerIdentity
    role: Role
    layout: KvLayout
    max_model_len: int
    vocab_size: int
    num_blocks: int
    max_num_seqs: int
    transfer_address: str = ""
    protocol_version: int = PROTOCOL_VERSION

    @property
    def idle_load(self) -> WorkerLoad:
        """Its load until its engine takes a first step: all pages are free."""
        return WorkerLoad(blocks_total=self.num_blocks, blocks_free=self.num_blocks)


def role_to_proto(role: Role) -> pb.Role.ValueType:
    """Role as its protobuf number."""
    return _ROLES[role]


def role_from_proto(number: int) -> Role:
    """Role of a protobuf number.

    Raises:
        KeyError: The number is none of ours.
    """
    return _ROLES_BACK[number]  # type: ignore[index]  # a plain int from the wire


def identity_to_proto(identity: WorkerIdentity) -> pb.WorkerIdentity:
    """Identity as its message."""
    return pb.WorkerIdentity(worker_id=identity.worker_id, incarnation=identity.incarnation)


def identity_from_proto(message: pb.WorkerIdentity) -> WorkerIdentity:
    """Identity of its message."""
    return WorkerIdentity(
        worker_id=WorkerId(message.worker_id), incarnation=Incarnation(message.incarnation)
    )


def layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    """Layout as its message."""
    return pb.KvLayout(
        model_fingerprint=layout.model_fingerprint,
        dtype=layout.dtype,
        block_tokens=layout.block_tokens,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        layers=list(layout.layers),
        tp_size=layout.tp_size,
        tp_rank=layout.tp_rank,
        kv_head_replicas=layout.kv_head_replicas,
        drafter=layout.drafter,
        windows=list(layout.windows),
    )


def layout_from_proto(message: pb.KvLayout) -> KvLayout:
    """Layout of its message."""
    return KvLayout(
        model_fingerprint=message.model_fingerprint,
        dtype=message.dtype,
        block_tokens=message.block_tokens,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        layers=tuple(LayerName(name) for name in message.layers),
        tp_size=message.tp_size,
        tp_rank=message.tp_rank,
        kv_head_replicas=message.kv_head_replicas,
        drafter=message.drafter,
        windows=tuple(message.windows),
    )


def hello_to_proto(hello: WorkerHello) -> pb.WorkerHello:
    """Greeting as its message."""
    return pb.WorkerHello(
        protocol_version=hello.protocol_version,
        identity=identity_to_proto(hello.identity),
        role=role_to_proto(hello.role),
        layout=layout_to_proto(hello.layout),
        max_model_len=hello.max_model_len,
        vocab_size=hello.vocab_size,
        num_blocks=hello.num_blocks,
        max_num_seqs=hello.max_num_seqs,
        transfer_address=hello.transfer_address,
    )


def hello_from_proto(message: pb.WorkerHello) -> WorkerHello:
    """Greeting of its message."""
    return WorkerHello(
        protocol_version=message.protocol_version,
        identity=identity_from_proto(message.identity),
        role=role_from_proto(message.role),
        layout=layout_from_proto(message.layout),
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        num_blocks=message.num_blocks,
        max_num_seqs=message.max_num_seqs,
        transfer_address=message.transfer_address,
    )
