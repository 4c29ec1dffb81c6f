"""A cluster of two prefill and two decode workers lives through a storm of faults: no hang, no wrong token,
no lost page.

Two oracles: the same requests again, undisturbed, once the storm is over; and one forward pass of transformers over
each prompt and what came back for it: every token must be the likeliest at its place, in replies that broke off as well
(`tests.e2e.reference` says what counts as a tie).
"""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.baton_engine.tiny_models import make_model
from tests.chaos.process import ProcessFaults
from tests.chaos.storm import Storm, Weather
from tests.chaos.traffic import End, Reply, Traffic, make_requests
from tests.e2e.reference import Reference
from tests.e2e.served import Served, assert_at_rest, eventually, serve

pytestmark = pytest.mark.alone

NUM_WORKERS = 4
FLAGS = (
    *("--dtype", "float32", "--kv-cache-memory", "8MiB", "--log-level", "warning"),
    *("--prefill-workers", "2", "--decode-workers", "2"),
)
DEADLINE_S = 60.0
SETTINGS = {
    "BATON_ROUTER_REQUEST_TIMEOUT_S": str(DEADLINE_S),
    # A request may meet several faults in one life here.
    "BATON_ROUTER_MAX_ATTEMPTS": "10",
    "BATON_CLUSTER_RESTART_BACKOFF_S": "0.1",
    "BATON_CLUSTER_RESTART_BACKOFF_MAX_S": "0.5",
}
COUNTED = re.compile(r"^(baton_prefill_retries_total|baton_migrations_total)\{.*\} (\S+)$", re.M)
CODE = re.compile(r'"code": ?"?(\w+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a storm did, what became of the requests, and what becomes of them in calm weather."""

    replies: list[Reply]
    undisturbed: list[Reply]
    ends: Counter[End]
    faults: Counter[str]
    counted: dict[str, float]

    @property
    def errors(self) -> Counter[str]:
        """What the cluster said of the requests that it did not serve to their end, by code."""
        return Counter(CODE.findall(reply.error)[0] for reply in self.replies if reply.error)

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end.value}" for end, count in self.ends.most_common())
        faults = ", ".join(f"{count} {kind}" for kind, count in self.faults.most_common())
        counted = ", ".join(f"{name} {value:.0f}" for name, value in self.counted.items())
        errors = f"; errors: {dict(self.errors)}" if self.errors else ""
        return f"{len(self.replies)} requests: {ends}; faults: {faults}; {counted}{errors}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `SETTINGS`."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)


def live_through(
    checkpoint: Path,
    *,
    requests: int,
    seed: int,
    weather: Weather,
    flags: Sequence[str] = FLAGS,
) -> Account:
    """Starts a cluster, lets the storm blow until every request has ended, and waits for the cluster to be at rest."""
    with serve(str(checkpoint), *flags) as served:
        traffic, storm = asyncio.run(_blow(served, requests, seed, weather))
        account = Account(
            replies=traffic.replies,
            undisturbed=[],
            ends=traffic.ends(),
            faults=storm.counts(),
            counted=_counted(served),
        )
        print(f"\n{account}")
        eventually(lambda: _joined(served) == NUM_WORKERS, "every worker is back", 120.0)
        assert_at_rest(served)
        account.undisturbed.extend(asyncio.run(_in_calm(served, account)))
        assert_at_rest(served)
    return account


async def _in_calm(served: Served, account: Account) -> list[Reply]:
    """The same requests to the same cluster, and nobody leaves."""
    requests = [replace(reply.request, leaves_after=None) for reply in account.replies]
    traffic = Traffic(served.url, requests, clients=24, timeout_s=DEADLINE_S)
    await traffic.run()
    return traffic.replies


async def _blow(
    served: Served, requests: int, seed: int, weather: Weather
) -> tuple[Traffic, Storm]:
    traffic = Traffic(
        served.url, make_requests(requests, seed=seed), clients=24, timeout_s=DEADLINE_S
    )
    storm = Storm(
        faults=ProcessFaults(served),
        traffic=traffic,
        rng=random.Random(seed),
        weather=weather,
    )
    calm = asyncio.Event()
    blowing = asyncio.create_task(storm.blow(calm))
    try:
        await traffic.run()
    finally:
        calm.set()
        await blowing
    return traffic, storm


def _joined(served: Served) -> int:
    """Workers that the router has; one that it waits for has no name yet."""
    return sum(bool(worker["worker_id"]) for worker in served.workers())


def _counted(served: Served) -> dict[str, float]:
    with served.client() as http:
        found = COUNTED.findall(http.get("/metrics").text)
    return {name: float(value) for name, value in found}


def check(checkpoint: Path, account: Account) -> None:
    """Each request ended in time, nobody was told a wrong token, and nearly all were served to their end."""
    ends = account.ends
    assert ends.total() == len(account.replies)
    assert ends[End.HUNG] == ends[End.BROKEN] == 0, account
    assert ends[End.COMPLETED] >= 0.9 * (ends.total() - ends[End.LEFT]), account
    assert {reply.end for reply in account.undisturbed} == {End.COMPLETED}
    reference = Reference(checkpoint)
    for reply, undisturbed in zip(account.replies, account.undisturbed, strict=True):
        for tokens in filter(None, reply.tokens.values()):
            reference.assert_greedy(list(reply.request.prompt), tokens)
        if reply.end is End.COMPLETED:
            lengths = [len(reply.tokens[index]) for index in range(reply.request.samples)]
            assert lengths == [reply.request.max_tokens] * reply.request.samples
            if reply.tokens != undisturbed.tokens:  # only where two tokens are equally likely
                for tokens in undisturbed.tokens.values():
                    reference.assert_greedy(list(reply.request.prompt), tokens)


@pytest.mark.usefixtures("_patient")
def test_a_short_storm_costs_no_token_and_no_page(checkpoint: Path) -> None:
    weather = Weather(interval_s=0.7, longest_stop_s=2.0)
    account = live_through(checkpoint, requests=80, seed=3, weather=weather)
    assert account.faults["kill"] + account.faults["stop"] > 0
    check(checkpoint, account)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize("seed", [1])
def test_a_thousand_requests_live_through_a_fault_every_second(checkpoint: Path, seed: int) -> None:
    account = live_through(checkpoint, requests=1000, seed=seed, weather=Weather())
    assert all(account.faults[kind] >= 3 for kind in ("kill", "stop", "leave")), account
    assert account.counted["baton_prefill_retries_total"] > 0
    assert account.counted["baton_migrations_total"] > 0
    check(checkpoint, account)
