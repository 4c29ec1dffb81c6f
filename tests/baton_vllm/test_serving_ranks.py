"""`baton serve --engine vllm` with workers whose heads lie on two ranks, each a process: what they answer is what vLLM
answers by itself, and when a rank dies its worker comes back.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from baton_vllm.settings import missing
from tests.baton_engine.tiny_models import make_model, make_tokenizer
from tests.baton_vllm.engine_run import prompt_tokens
from tests.baton_vllm.families import make_model as make_family
from tests.baton_vllm.test_serving_pairs import (
    FLAGS,
    PLAIN,
    SETTINGS,
    Stream,
    ask,
    loads,
    tokens,
)
from tests.baton_vllm.vllm_alone import tokens_of_vllm
from tests.e2e.reference import Reference
from tests.e2e.served import Served, assert_gone, eventually, serve

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

RANKS = SETTINGS.replace("  vllm:\n", "  vllm:\n    tensor_parallel_size: 2\n")
SECRET = "5e" * 32
NAMED = ("--served-model-name", "tiny", "--block-size", "32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", head_dim=32)


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    return tokens_of_vllm(model, PLAIN)


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """At its end every page of both workers has to be free."""
    file = tmp_path_factory.mktemp("ranks") / "cluster.yaml"
    file.write_text(RANKS + "transfer: {backends: [shm]}\n")
    workers = ("--prefill-workers", "1", "--decode-workers", "1")
    with serve(str(model), "-f", str(file), *FLAGS, *NAMED, *workers) as served:
        yield served


def ranks_of(served: Served, worker: str) -> list[psutil.Process]:
    """The processes of a worker's ranks: all that its own has begun, but for the one that multiprocessing keeps."""
    (own,) = [child for child in served.children() if worker in child.cmdline()]
    begun = [child for child in own.children() if "resource_tracker" not in str(child.cmdline())]
    assert len(begun) == 2, [child.cmdline() for child in own.children()]
    return begun


def test_a_pair_of_two_ranks_each_draws_the_tokens_of_vllm_alone(
    pair: Served, wanted: list[list[int]]
) -> None:
    with ThreadPoolExecutor(len(PLAIN)) as pool:
        first = [*pool.map(lambda asked: tokens(ask(pair, asked[0])), PLAIN)]
    again = [tokens(ask(pair, prompt)) for prompt, _ in PLAIN]

    assert first == again == wanted
    workers = loads(pair)
    assert workers["decode"]["prefix_query_tokens"] == 0, "the decode worker computed a prompt"
    assert workers["prefill"]["prefix_hit_tokens"] > 0


def test_ranks_keep_windows_and_hand_off_what_they_keep(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("windows")
    tokenizer = make_tokenizer()
    make_family("gemma3", folder, vocab_size=320, eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    file = folder / "cluster.yaml"
    file.write_text(RANKS + "transfer: {backends: [shm]}\n")
    workers = ("--prefill-workers", "1", "--decode-workers", "1")
    with serve(str(folder), "-f", str(file), *FLAGS, *NAMED, *workers) as served:
        with ThreadPoolExecutor(len(PLAIN)) as pool:
            first = [*pool.map(lambda asked: tokens(ask(served, asked[0])), PLAIN)]
        again = [tokens(ask(served, prompt)) for prompt, _ in PLAIN]
        assert loads(served)["decode"]["prefix_query_tokens"] == 0, "it computed a prompt"
    assert first == again == tokens_of_vllm(folder, PLAIN)


def free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        listeners = [
            opened.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
            for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in listeners]


class Cluster:
    """A router, a prefill and a decode worker that were started one by one, each with settings of its own."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._directory = directory
        prefill, decode, http = free_ports(3)
        self._ports = {"prefill": prefill, "decode": decode}
        self.url = f"http://127.0.0.1:{http}"
        self._flags = (*FLAGS, *NAMED)
        self.started: list[subprocess.Popen[bytes]] = []
        self._common = os.environ | {
            "BATON_CLUSTER_SECRET": SECRET,
            "BATON_MODEL_MODEL": str(model),
            "BATON_ENGINE_NUM_THREADS": "1",  # two workers share the machine, and do not know it
            "BATON_CLUSTER_WORKERS": f"127.0.0.1:{prefill},127.0.0.1:{decode}",
            "BATON_ROUTER_PORT": str(http),
            "BATON_ROUTER_LOCAL_PREFILL_TOKENS": "0",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, role: str, ranks: int = 1) -> None:
        file = self._directory / f"{role}.yaml"
        file.write_text(
            SETTINGS.replace("  vllm:\n", f"  vllm:\n    tensor_parallel_size: {ranks}\n")
        )
        listen = () if role == "router" else ("--listen", f"127.0.0.1:{self._ports[role]}")
        command = [sys.executable, "-m", "baton_cluster.cli.main", "run", role, *self._flags]
        self.started.append(
            subprocess.Popen(
                [*command, "-f", str(file), *listen],
                env=self._common | {"BATON_CLUSTER_RUNTIME_DIR": str(self._directory / role)},
            )
        )

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0)

    def serves(self) -> bool:
        with suppress(httpx.TransportError), self.client() as client:
            return client.get("/metrics").text.count("vllm:cache_config_info{") == 2
        return False


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1)])
def test_workers_of_different_numbers_of_ranks_hand_off_to_each_other(
    model: Path, wanted: list[list[int]], tmp_path: Path, prefill_ranks: int, decode_ranks: int
) -> None:
    cluster = Cluster(model, tmp_path)
    try:
        cluster.start("prefill", prefill_ranks)
        cluster.start("decode", decode_ranks)
        cluster.start("router")
        eventually(cluster.serves, "the cluster serves", timeout_s=90.0)
        told = [tokens(ask(cluster, prompt)) for prompt, _ in PLAIN]
        with cluster.client() as client:
            metrics = client.get("/metrics").text
        for process in reversed(cluster.started):
            process.send_signal(signal.SIGTERM)
        ends = [process.wait(timeout=60) for process in cluster.started]
    finally:
        for process in cluster.started:
            process.kill()
            process.wait(timeout=60)
    assert told == wanted
    pairs = f'baton_route_decisions_total{{kind="pair"}} {float(len(PLAIN))}'
    assert pairs in metrics, "the KV was handed off"
    assert ends == [0, 0, 0]


def incarnations(served: Served) -> dict[str, str]:
    return {worker["worker_id"]: worker["incarnation"] for worker in served.workers()}


def is_back(served: Served, worker: str, before: dict[str, str]) -> bool:
    """Whether a worker, of which nothing may be told while it is away, serves as a new incarnation."""
    return incarnations(served).get(worker, before[worker]) != before[worker]


def test_a_worker_whose_rank_dies_comes_back_and_its_streams_go_on_elsewhere(
    model: Path, tmp_path: Path
) -> None:
    """A rank that computes and one that is idle; and the ranks of a worker that is killed end with it."""
    (tmp_path / "cluster.yaml").write_text(RANKS)
    shared = {*os.listdir("/dev/shm")}
    flags = ("-f", str(tmp_path / "cluster.yaml"), *FLAGS, *NAMED, "--hybrid-workers", "2")
    reference = Reference(model)
    with serve(str(model), *flags) as served:
        before = incarnations(served)
        stream = Stream(served, prompt_tokens(60), 400)
        stream.start()
        assert stream.begun.wait(60)
        (victim,) = [w["worker_id"] for w in served.workers() if w["load"]["running"]]
        (other,) = before.keys() - {victim}
        ranks = ranks_of(served, victim)
        ranks[1].kill()
        assert_gone(ranks)
        stream.join(180)
        assert stream.ended == "data: [DONE]"
        assert len(stream.tokens) == 400
        reference.assert_greedy(stream.prompt, stream.tokens)
        back = "the worker is back"
        eventually(lambda: is_back(served, victim, before), back, 120)

        idle = ranks_of(served, other)
        idle[0].kill()
        assert_gone(idle)
        eventually(lambda: is_back(served, other, before), back, 120)

        ranks = ranks_of(served, other)
        (own,) = [child for child in served.children() if other in child.cmdline()]
        own.kill()
        assert_gone([own, *ranks])
        drawn = tokens(ask(served, prompt_tokens(40), max_tokens=8))
        reference.assert_greedy(prompt_tokens(40), drawn)
    eventually(lambda: {*os.listdir("/dev/shm")} <= shared, "no shared memory is left behind")
