"""What crosses a process boundary arrives as it was sent."""

from hypothesis import given
from hypothesis import strategies as st

from baton.ids import Incarnation, LayerName, Role, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.hello import WorkerHello, hello_from_proto, hello_to_proto
from baton.rpc.v1 import common_pb2 as pb

COUNT = st.integers(0, 2**32 - 1)
TOKENS = st.lists(COUNT, max_size=5).map(tuple)


@given(st.sampled_from(Role), TOKENS)
def test_a_greeting(role: Role, numbers: tuple[int, ...]) -> None:
    hello = WorkerHello(
        identity=WorkerIdentity(worker_id=WorkerId("w"), incarnation=Incarnation(2**48 - 1)),
        role=role,
        layout=KvLayout(
            model_fingerprint="m",
            dtype="float16",
            block_tokens=16,
            num_kv_heads=2,
            head_dim=64,
            layers=tuple(LayerName(str(number)) for number in numbers),
            tp_size=8,
            tp_rank=5,
            kv_head_replicas=4,
            drafter="d",
            windows=(0, 64),
        ),
        max_model_len=1,
        vocab_size=2,
        num_blocks=3,
        max_num_seqs=4,
        transfer_address="unix:/x",
    )
    wire = pb.WorkerHello.FromString(hello_to_proto(hello).SerializeToString())
    assert hello_from_proto(wire) == hello
