"""A cluster of two prefill and two decode workers lives through a storm of faults without a hang, a wrong token or a lost page."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from tests.chaos.process import ProcessFaults
from tests.chaos.storm import Storm, Weather
from tests.chaos.traffic import End, Reply, Traffic, make_requests
from tests.e2e.reference import Reference
from tests.e2e.served import Served, assert_at_rest, eventually, serve
from tests.engine.tiny_models import make_model

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "8MiB")
FLAGS += ("--prefill-workers", "2", "--decode-workers", "2")
DEADLINE_S = 60.0

SETTINGS = {
    "BATON_ROUTER_REQUEST_TIMEOUT_S": str(DEADLINE_S),
    "BATON_ROUTER_MAX_ATTEMPTS": "8",
    "BATON_CLUSTER_RESTART_BACKOFF_S": "0.1",
    "BATON_CLUSTER_RESTART_BACKOFF_MAX_S": "0.5",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


async def _through(served: Served, count: int, seed: int) -> tuple[Traffic, Storm]:
    requests = make_requests(count, seed=seed)
    traffic = Traffic(served.url, requests, clients=24, deadline_s=DEADLINE_S)
    storm = Storm(
        faults=ProcessFaults(served),
        workers=WORKERS,
        traffic=traffic,
        rng=random.Random(seed),
        weather=Weather(),
    )
    calm = asyncio.Event()
    blowing = asyncio.create_task(storm.blow(calm))
    try:
        await traffic.run()
    finally:
        calm.set()
        await blowing
    return traffic, storm


def _check_tokens(checkpoint: Path, replies: list[Reply]) -> int:
    """Every token of every reply is the likeliest one, also of those that broke off; returns how many there were."""
    reference, checked = Reference(checkpoint), 0
    for reply in replies:
        for tokens in reply.tokens.values():
            if tokens:
                reference.assert_greedy(list(reply.request.prompt), tokens)
                checked += len(tokens)
        if reply.end is End.COMPLETED:
            lengths = [len(reply.tokens[index]) for index in range(reply.request.samples)]
            assert lengths == [reply.request.max_tokens] * reply.request.samples
    return checked


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_thousand_requests_live_through_a_fault_every_second(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    began_s = time.monotonic()
    with serve(str(checkpoint), *FLAGS) as served:
        traffic, storm = asyncio.run(_through(served, 1000, seed=1))
        print(f"\n{len(traffic.replies)} requests in {time.monotonic() - began_s:.0f} s")
        print(dict(storm.counts()))
        print({end.value: n for end, n in traffic.ends().items()})
        for reply in traffic.replies:
            if reply.error:
                print(reply.end, reply.error[:200])
        print("".join(served.output)[-6000:])
        eventually(lambda: len(served.workers()) == len(WORKERS), "everyone is back", 60.0)
        try:
            assert_at_rest(served)
        except AssertionError:
            for w in served.workers(): print(w)
            import subprocess
            print(subprocess.run("ls "+str(served.runtime_dir), shell=True, capture_output=True, text=True).stdout)
            print("".join(served.output)[-3000:])
            raise
    print(_check_tokens(checkpoint, traffic.replies), "tokens checked")
    ends = traffic.ends()
    assert ends[End.HUNG] == ends[End.BROKEN] == 0
