"""A cluster with vLLM whose workers change their roles, leave, are lost, or whose clients leave, under streams."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from baton_vllm.settings import missing
from tests.baton_engine.tiny_models import make_model
from tests.baton_vllm.engine_run import prompt_tokens
from tests.baton_vllm.test_serving_pairs import FLAGS, PAIR, SETTINGS, Stream
from tests.e2e.reference import Reference
from tests.e2e.served import Served, assert_at_rest, assert_gone, eventually, serve

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", head_dim=32)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One prefill and one decode worker, at whose end every page has to be free;
    each test leaves them as it finds them.
    """
    file = tmp_path_factory.mktemp("pair") / "cluster.yaml"
    file.write_text(SETTINGS)
    with serve(str(model), "-f", str(file), *FLAGS, *PAIR, "--served-model-name", "tiny") as served:
        yield served


def begin(cluster: Served, lengths: Sequence[int], max_tokens: int) -> list[Stream]:
    """Streams that have given some tokens."""
    streams = [Stream(cluster, prompt_tokens(length), max_tokens) for length in lengths]
    for stream in streams:
        stream.start()
    assert all(stream.begun.wait(60) for stream in streams)
    return streams


def check(streams: Sequence[Stream], max_tokens: int, reference: Reference) -> None:
    """All of them end, whole and without a wrong token."""
    for stream in streams:
        stream.join(120)
        assert stream.ended == "data: [DONE]"
        assert len(stream.tokens) == max_tokens
        reference.assert_greedy(stream.prompt, stream.tokens)


def change(cluster: Served, worker: str, role: str) -> None:
    """Has a worker change its role, and waits until the router shows it."""
    assert cluster.told("role", worker, role, "--force") == {"role": role, "left": 0}
    eventually(lambda: roles(cluster)[worker] == role, "the role is shown")


def roles(cluster: Served) -> dict[str, str]:
    return {worker["worker_id"]: worker["role"] for worker in cluster.workers()}


def steps(cluster: Served) -> dict[str, int]:
    return {worker["worker_id"]: worker["load"]["steps"] for worker in cluster.workers()}


def test_workers_exchange_their_roles_under_streams(cluster: Served, reference: Reference):
    incarnations = {worker["incarnation"] for worker in cluster.workers()}
    streams: list[Stream] = []
    for number, (worker, role) in enumerate(
        [
            ("prefill-0", "hybrid"),
            ("decode-0", "prefill"),
            ("prefill-0", "decode"),
            ("decode-0", "hybrid"),
            ("prefill-0", "prefill"),
            ("decode-0", "decode"),
        ]
    ):
        streams += begin(cluster, [40 + number, 100 + number], 60)
        change(cluster, worker, role)
    check(streams, 60, reference)
    assert {worker["incarnation"] for worker in cluster.workers()} == incarnations
    assert_at_rest(cluster)


def test_where_no_worker_decodes_by_its_role_those_that_prefill_do_both(
    cluster: Served, reference: Reference
):
    change(cluster, "decode-0", "prefill")
    try:
        before = steps(cluster)
        check(begin(cluster, [50, 90, 170], 40), 40, reference)
        assert max(steps(cluster)[name] - before[name] for name in before) >= 40
        assert_at_rest(cluster)
    finally:
        change(cluster, "decode-0", "decode")


def test_clients_that_leave_while_others_decode_leave_no_page_behind(
    cluster: Served, reference: Reference
):
    staying = begin(cluster, [60, 61], 150)
    leaving = threading.Barrier(6)

    def leave(length: int) -> None:
        body = {"model": "tiny", "prompt": prompt_tokens(length), "max_tokens": 400}
        body |= {"ignore_eos": True, "stream": True, "n": 2}
        with httpx.stream(
            "POST", f"{cluster.url}/v1/completions", json=body, timeout=60.0
        ) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            for _ in range(8):
                next(lines)
            with suppress(threading.BrokenBarrierError):
                leaving.wait(60)

    threads = [threading.Thread(target=leave, args=(70 + number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    check(staying, 150, reference)
    assert_at_rest(cluster)


def test_a_worker_that_is_drained_ends_what_it_has_and_takes_new_work_once_it_is_told_to(
    cluster: Served, reference: Reference
):
    streams = begin(cluster, [80, 81], 100)
    told = cluster.told("drain", "prefill-0", "--force")
    assert told["left"] == 0
    before = steps(cluster)["prefill-0"]
    streams += begin(cluster, [82, 140], 40)
    assert steps(cluster)["prefill-0"] == before, "a drained worker computes"
    cluster.told("undrain", "prefill-0")
    check(streams[:2], 100, reference)
    check(streams[2:], 40, reference)
    check(begin(cluster, [83], 40), 40, reference)
    eventually(lambda: steps(cluster)["prefill-0"] > before, "it computes again")
    assert_at_rest(cluster)


def test_without_a_decode_worker_streams_go_on_at_the_prefill_worker(
    cluster: Served, reference: Reference
):
    """The last one of the tests here: the decode worker is another incarnation afterwards."""
    streams = begin(cluster, [40, 75, 130], 300)
    victim = cluster.child("decode")
    victim.kill()
    assert_gone([victim])
    streams.append(Stream(cluster, prompt_tokens(90), 300))
    streams[-1].start()
    check(streams, 300, reference)
    eventually(lambda: roles(cluster).get("decode-0") == "decode", "it is back", 120.0)
    check(begin(cluster, [91], 40), 40, reference)
    assert_at_rest(cluster)
