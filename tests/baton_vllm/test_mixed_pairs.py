"""A worker with vLLM and any other worker whose pages mean something else:
both their session and their router refuse the pair.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.config.schema import EngineConfig, ModelConfig
from baton.errors import IncompatibleError
from baton.ids import Incarnation, Role, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.hello import WorkerHello
from baton.rpc.v1 import transfer_pb2 as pb
from baton_engine.build import build_engine
from baton_vllm.arena import VllmArena
from kv_transfer.memory.arena import WorkerMemory
from kv_transfer.session.handshake import HandshakeServer, SessionEndpoint, greet
from kv_transfer.ticket import TicketOffice
from prefill_worker.sink import TransferSink
from router.routing.index import PrefixIndex
from router.routing.view import ClusterView
from tests.baton_engine.tiny_models import make_model

P = WorkerIdentity(worker_id=WorkerId("p"), incarnation=Incarnation(1))
D = WorkerIdentity(worker_id=WorkerId("d"), incarnation=Incarnation(1))
LAYERS, PAGES, HEADS, HEAD_DIM = 2, 5, 2, 16
FACTS = {
    "model": "0123",
    "vllm": "0.32.0",
    "attention": "CPU_ATTN",
    "processor": "AVX512",
    "pages": "LBHNC",
    "adapters": "4321",
}


def of_vllm(block_tokens: int = 32, **facts: str) -> KvLayout:
    """As its connector registers them."""
    arena = VllmArena(WorkerMemory())
    with arena:
        size = LAYERS * PAGES * HEADS * block_tokens * 2 * HEAD_DIM * 4
        cache = torch.zeros(size, dtype=torch.int8)
    views = cache.view(torch.float32).view(LAYERS, PAGES, HEADS, block_tokens, 2 * HEAD_DIM)
    names = [f"model.layers.{index}" for index in range(LAYERS)]
    arena.register(
        dict(zip(names, views, strict=True)),
        [names],
        block_tokens=block_tokens,
        windows=(),
        facts=FACTS | facts,
    )
    return arena.layout


@pytest.fixture(scope="module")
def of_ours(tmp_path_factory: pytest.TempPathFactory) -> KvLayout:
    """Of a model with pages of the same shape."""
    model = make_model(
        tmp_path_factory.mktemp("model"),
        "llama",
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
    )
    return layout_of(model)


def layout_of(model: Path) -> KvLayout:
    built = build_engine(
        ModelConfig(model=str(model), dtype="float32"),
        EngineConfig(block_size=32, kv_cache_memory_bytes=1 << 20),
        secret=bytes(32),
        memory=WorkerMemory(),
        sink=TransferSink(),
        progress=lambda *_: None,
    )
    return built.layout


def refused(sender: KvLayout, receiver: KvLayout) -> IncompatibleError:
    """What a receiving worker makes of a sending one's greeting."""
    office = TicketOffice(bytes(32))
    here = SessionEndpoint(identity=P, layout=sender, office=office)
    server = HandshakeServer(SessionEndpoint(identity=D, layout=receiver, office=office), ["shm"])
    with pytest.raises(IncompatibleError) as told:
        server.agree(pb.TransferRequest(open=greet(here, D, ["shm"], 1)))
    return told.value


def hello(identity: WorkerIdentity, layout: KvLayout) -> WorkerHello:
    return WorkerHello(
        identity=identity,
        role=Role.HYBRID,
        layout=layout,
        max_model_len=64,
        vocab_size=320,
        num_blocks=4,
        max_num_seqs=4,
    )


def test_workers_of_the_same_vllm_agree():
    server_layout = of_vllm()
    office = TicketOffice(bytes(32))
    server = HandshakeServer(
        SessionEndpoint(identity=D, layout=server_layout, office=office), ["shm"]
    )
    here = SessionEndpoint(identity=P, layout=of_vllm(), office=office)

    assert server.agree(pb.TransferRequest(open=greet(here, D, ["shm"], 1))).peer == P


@pytest.mark.parametrize("is_sender", [True, False])
def test_a_worker_of_our_engine_and_one_with_vllm_refuse_each_other_by_field(of_ours, is_sender):
    layouts = (of_vllm(), of_ours) if is_sender else (of_ours, of_vllm())
    assert layouts[0].page_layer_bytes == layouts[1].page_layer_bytes

    error = refused(*layouts)

    assert error.param == "model_fingerprint"
    assert "vllm=0.32.0" in error.message
    assert of_ours.model_fingerprint in error.message


@pytest.mark.parametrize(
    ("fact", "other"),
    [
        ("model", "4567"),
        ("vllm", "0.32.1"),
        ("attention", "TORCH_SDPA"),
        ("processor", "AVX2"),
        ("pages", "NHD"),
        ("adapters", "89ab"),
    ],
)
def test_two_vllms_that_mean_other_bytes_refuse_each_other_and_both_are_named(fact, other):
    error = refused(of_vllm(), of_vllm(**{fact: other}))

    assert error.param == "model_fingerprint"
    assert f"{fact}={FACTS[fact]}" in error.message
    assert f"{fact}={other}" in error.message


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("block_tokens", {"block_tokens": 16}),
        ("dtype", {"dtype": "bfloat16"}),
        ("total_kv_heads", {"num_kv_heads": 4}),
        ("windows", {"windows": (0, 64)}),
    ],
)
def test_pages_of_another_shape_are_refused_by_field(field, other):
    assert refused(of_vllm(), replace(of_vllm(), **other)).param == field


def test_a_router_takes_no_worker_of_the_other_engine(of_ours):
    view = ClusterView(PrefixIndex())
    view.join(hello(P, of_vllm()), "unix:/p", 0.0)

    with pytest.raises(IncompatibleError, match=r"holds model .*vllm=0\.32\.0"):
        view.join(hello(D, of_ours), "unix:/d", 0.0)
