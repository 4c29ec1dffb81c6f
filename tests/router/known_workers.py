"""What the router's tests know of workers: their greetings, and what a model would draw."""

from typing import Any

from baton.generation import FinishReason, TokenSample
from baton.ids import Incarnation, LayerName, Role, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.hello import WorkerHello

BLOCK_TOKENS = 4


def layout(**changes) -> KvLayout:
    fields: dict[str, Any] = {
        "model_fingerprint": "tiny",
        "dtype": "float32",
        "block_tokens": BLOCK_TOKENS,
        "num_kv_heads": 1,
        "head_dim": 8,
        "layers": (LayerName("layers.0"),),
    }
    return KvLayout(**(fields | changes))


def hello(worker_id: str, role: Role, *, incarnation: int = 1, **changes) -> WorkerHello:
    fields: dict[str, Any] = {
        "identity": WorkerIdentity(
            worker_id=WorkerId(worker_id), incarnation=Incarnation(incarnation)
        ),
        "role": role,
        "layout": layout(),
        "max_model_len": 4096,
        "vocab_size": 1000,
        "num_blocks": 64,
        "max_num_seqs": 8,
        "transfer_address": f"unix:/{worker_id}" if role.decodes else "",
    }
    return WorkerHello(**(fields | changes))


def drawn(sample: int, position: int, max_tokens: int) -> TokenSample:
    """What the model draws at a position: never depends on who draws it."""
    last = position == max_tokens - 1
    token = sample * 100 + position
    return TokenSample(sample=sample, token=token, finish=FinishReason.LENGTH if last else None)
