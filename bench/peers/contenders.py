"""The servers in `bench.cpu_vs_peers`, how each is started, and with what it is measured."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.harness.server import WITH_HAND_OFF, serving
from bench.peers.gguf_model import write_gguf
from bench.peers.servers import llamacpp, transformers, vllm

NAMES = (
    "hybrid",
    "hybrid_paced",
    "pd",
    "int8",
    "vllm",
    "vllm_float32",
    "transformers",
    "transformers_float32",
    "llamacpp",
    "llamacpp_f16",
    "llamacpp_f32",
    "llamacpp_q8_0",
)
OURS = NAMES[:4]

_HYBRID = ("--hybrid-workers", "1")
_PAIR = ("--prefill-workers", "1", "--decode-workers", "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One server.

    Attributes:
        start: Starts it and yields its URL; raises what it takes to be absent.
        clients: Numbers of clients to measure it with.
        under_prompts: Whether it is also measured while long prompts keep arriving.
    """

    start: Callable[[], AbstractContextManager[str]]
    clients: Sequence[int]
    under_prompts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On what terms they meet.

    Attributes:
        dtype: Of ours, as in `baton serve --dtype`.
        tbt_target_s: That the paced hybrid worker keeps while it computes prompts.
        clients: Numbers of clients.
        vllm_python: Python of vLLM's environment; empty if there is none.
        llamacpp_server: Path of `llama-server`; empty if there is none.
    """

    dtype: str
    tbt_target_s: float
    clients: Sequence[int]
    vllm_python: str
    llamacpp_server: str


def contenders(model: Path, terms: Terms) -> dict[str, Contender]:
    """All of them by name (`NAMES`), serving the model in directory `model`.

    Peers without a suffix hold the weights in bfloat16, as the checkpoint does. What is only there for a comparison at
    one client is measured with one.
    """
    one = [count for count in terms.clients if count == 1]
    ours = partial(serving, str(model), "--dtype", terms.dtype)
    paced = partial(ours, "--tbt-target", str(terms.tbt_target_s))
    entries = {
        "hybrid": Contender(
            start=partial(ours, *_HYBRID), clients=terms.clients, under_prompts=True
        ),
        "hybrid_paced": Contender(start=partial(paced, *_HYBRID), clients=(), under_prompts=True),
        "pd": Contender(
            start=partial(ours, *_PAIR, settings=WITH_HAND_OFF), clients=one, under_prompts=True
        ),
        "int8": Contender(start=partial(ours, "--quantization", "int8", *_HYBRID), clients=one),
    }
    for suffix, dtype in (("", "bfloat16"), ("_float32", "float32")):
        with_vllm = partial(_vllm, terms.vllm_python, model, dtype)
        with_transformers = partial(transformers, str(model), dtype)
        entries[f"vllm{suffix}"] = Contender(start=with_vllm, clients=terms.clients)
        entries[f"transformers{suffix}"] = Contender(start=with_transformers, clients=terms.clients)
    for suffix, precision in (("", "bf16"), ("_f16", "f16"), ("_f32", "f32"), ("_q8_0", "q8_0")):
        clients = terms.clients if precision == "bf16" else one
        slots = max(clients, default=1)
        start = partial(_llamacpp, terms.llamacpp_server, model, precision, slots)
        entries[f"llamacpp{suffix}"] = Contender(start=start, clients=clients)
    return {name: entries[name] for name in NAMES}


@contextmanager
def _vllm(python: str, model: Path, dtype: str) -> Iterator[str]:
    if not python:
        raise RuntimeError("no --vllm-python was named")
    with vllm(python, str(model), dtype) as url:
        yield url


@contextmanager
def _llamacpp(server: str, model: Path, precision: str, slots: int) -> Iterator[str]:
    if not server:
        raise RuntimeError("no --llamacpp-server was named")
    file = model / "gguf" / f"{precision}.gguf"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        write_gguf(model, file, precision)
    with llamacpp(server, str(file), slots) as url:
        yield url
