"""A prefill and a decode worker on two hosts between which packets are swallowed: requests go on, before,
during and after.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.baton_engine.tiny_models import make_model
from tests.chaos.hosts import HostedCluster, hosted, why_not
from tests.waits import eventually

pytest.importorskip("ucxx", reason="pages between hosts need a transport: make transports")
pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(240)]

ROLES = {"router": "router", "p": "prefill", "d": "decode"}
CONFIG = """\
model: {{model: {model}, served_model_name: [m], dtype: float32}}
engine: {{kv_cache_memory_bytes: 8MiB}}
transfer: {{backends: [ucx]}}
router: {{policy: prefix_affinity}}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedCluster]:
    if reason := why_not():
        pytest.skip(reason)
    model = make_model(tmp_path_factory.mktemp("llama"), "llama")
    with (
        tempfile.TemporaryDirectory(prefix="bp-") as folder,
        hosted(
            Path(folder), ROLES, config=CONFIG.format(model=model), settings={"UCX_TLS": "tcp,self"}
        ) as cluster,
    ):
        yield cluster


def ask(cluster: HostedCluster, first: int) -> list[int]:
    body = {
        "model": "m",
        "prompt": [first, *range(6, 206)],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=40.0)
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


@pytest.mark.parametrize("before_s", [0.0, 8.0])
def test_requests_go_on_while_and_after_packets_between_p_and_d_are_swallowed(
    cluster: HostedCluster, before_s: float
) -> None:
    hosts, asked = cluster.hosts, range(10, 14)
    calm = [ask(cluster, first) for first in asked]
    hosts.swallow("p", "d")
    hosts.swallow("d", "p")
    try:
        assert hosts.swallows("p", "d")
        time.sleep(before_s)  # not for anything to happen: the length of the partition is the fault
        cut = [ask(cluster, first) for first in asked]
    finally:
        hosts.let_pass("p", "d")
        hosts.let_pass("d", "p")
    healed = [ask(cluster, first) for first in asked]
    assert calm == cut == healed


def metric(cluster: HostedCluster, name: str) -> float:
    lines = httpx.get(f"{cluster.url}/metrics", timeout=10.0).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_broken_link_is_tried_without_requests_and_none_waits_for_it_again(
    cluster: HostedCluster,
) -> None:
    hosts, broken = cluster.hosts, "baton_broken_pairs"
    eventually(lambda: metric(cluster, broken) == 0)
    handed_off = 'baton_route_decisions_total{kind="pair"}'
    carries = 'baton_link_probes_total{outcome="carries"}'
    failed = 'baton_link_probes_total{outcome="failed"}'
    before = metric(cluster, carries), metric(cluster, failed)
    calm = ask(cluster, 20)
    hosts.swallow("p", "d")
    hosts.swallow("d", "p")
    try:
        assert ask(cluster, 20) == calm
        assert metric(cluster, broken) == 1
        pairs = metric(cluster, handed_off)
        eventually(lambda: metric(cluster, failed) > before[1])
        for _ in range(3):
            assert ask(cluster, 20) == calm
        assert metric(cluster, handed_off) == pairs  # nobody has tried the link but the probe
    finally:
        hosts.let_pass("p", "d")
        hosts.let_pass("d", "p")
    eventually(lambda: metric(cluster, broken) == 0)
    assert metric(cluster, carries) == before[0] + 1
    assert ask(cluster, 20) == calm
    assert metric(cluster, handed_off) == pairs + 1
