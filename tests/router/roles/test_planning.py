"""The planner's shell: who plans, what is carried out, and what operators are told."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.config.schema import RolesConfig
from baton.errors import InvalidRequestError
from baton.generation import WorkerLoad
from baton.ids import Role
from baton.redis_link import open_redis
from baton.telemetry.metrics import render
from router.attainment import Attainment, Target
from router.roles.election import Alone, RedisElection
from router.roles.planning import RolePlanning
from router.routing.index import PrefixIndex
from router.routing.view import ClusterView
from tests.redis_servers import KINDS, a_redis
from tests.router.known_workers import hello

pytestmark = pytest.mark.timeout(60)


class Workers:
    """Change their roles as they are told to, or say why not."""

    def __init__(self, refusal: str = "") -> None:
        self.asked: list[tuple[str, Role]] = []
        self.refusal = refusal

    async def __call__(self, address: str, role: Role, timeout_s: float) -> str:
        assert timeout_s == RolesConfig().drain_timeout_s
        self.asked.append((address, role))
        return self.refusal


class Another:
    """Another router plans."""

    async def standing_by(self) -> str:
        return "another router plans"

    async def leave(self) -> None:
        return


class Planned:
    """A planner over two prefill workers with nothing to do and two decode workers,
    with requests in the router's line.
    """

    def __init__(
        self,
        *,
        mode: str = "on",
        workers: Workers | None = None,
        election=None,
        config: RolesConfig | None = None,
        counts=None,
    ) -> None:
        self.clock, self.registry = ManualClock(), CollectorRegistry()
        self.attainment = Attainment()
        self.workers = workers or Workers()
        self.view = ClusterView(PrefixIndex(max_blocks=100))
        for name, role in (
            ("prefill-0", Role.PREFILL),
            ("prefill-1", Role.PREFILL),
            ("decode-0", Role.DECODE),
            ("decode-1", Role.DECODE),
        ):
            self.view.join(hello(name, role, transfer_address=f"unix:/{name}"), f"unix:{name}", 0.0)
        self.planning = RolePlanning(
            config or RolesConfig(planner=mode),
            view=self.view,
            waiting=lambda: 20,
            election=election or Alone(),
            change_role=self.workers,
            clock=self.clock,
            registry=self.registry,
            attainment=self.attainment,
            counts=counts,
        )

    async def look(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(1.0)
            for worker in self.view.workers:
                worker.report(WorkerLoad(), self.clock.now_s())
            await self.planning.look()
            await asyncio.sleep(0)

    def told(self) -> str:
        return "\n".join(entry.event for entry in self.planning.story())

    def metrics(self) -> str:
        return render(self.registry)[0].decode()


async def test_a_worker_is_told_to_change_its_role_and_operators_why():
    planned = Planned()
    await planned.look(60)
    [(address, role)] = planned.workers.asked
    assert address in ("unix:prefill-0", "unix:prefill-1")
    assert role is Role.DECODE
    assert "becomes a decode worker: pressure" in planned.told()
    assert "a decode worker now" in planned.told()
    assert 'baton_planner_flips_total{outcome="changed",role="decode"} 1.0' in planned.metrics()


async def test_what_became_of_promises_is_looked_at_and_shown():
    planned = Planned()
    for kept in (True, False) * 5:
        planned.attainment.note("chat", Target.TTFT, kept=kept)
    await planned.look(1)
    assert 'baton_planner_missed_share{target="ttft"} 0.5' in planned.metrics()
    assert 'baton_planner_missed_share{target="tbt"} 0.0' in planned.metrics()


async def test_a_dry_run_changes_nothing():
    planned = Planned(mode="dry_run")
    await planned.look(60)
    assert planned.workers.asked == []
    assert "still what it was: this is a dry run" in planned.told()
    assert 'baton_planner_flips_total{outcome="dry_run",role="decode"} 1.0' in planned.metrics()


async def test_a_refusal_is_told_and_counted():
    planned = Planned(workers=Workers("3 legs did not end in time"))
    await planned.look(60)
    assert len(planned.workers.asked) == 1, "it cools down"
    assert "still what it was: 3 legs did not end in time" in planned.told()
    assert 'outcome="failed"' in planned.metrics()


async def test_an_operators_decision_stands():
    planned = Planned()
    for worker in planned.view.workers:
        planned.planning.pin(worker.identity)
    await planned.look(60)
    assert planned.workers.asked == []


async def test_a_planner_that_is_held_does_nothing_until_it_may_go_on():
    planned = Planned()
    await planned.look(1)
    assert planned.planning.hold(True, by="kim") == ""
    await planned.look(60)
    assert planned.workers.asked == []
    assert planned.told().endswith("held by kim")
    planned.planning.hold(False, by="kim")
    await planned.look(60)
    assert len(planned.workers.asked) == 1


async def test_who_stands_by_cannot_be_held():
    planned = Planned(election=Another())
    await planned.look(1)
    assert planned.planning.hold(True, by="kim") == "another router plans"


async def test_who_was_not_elected_does_nothing():
    planned = Planned(election=Another())
    await planned.look(60)
    assert planned.workers.asked == []
    assert planned.told().endswith("another router plans")


async def test_the_state_of_the_pools_is_told_and_can_be_scraped():
    planned = Planned()
    await planned.look(5)
    last = planned.told().splitlines()[-1]
    assert last.startswith("now: pressure 0.")
    assert "on 2 prefill workers" in last
    assert 'baton_planner_workers{pool="decode"} 2.0' in planned.metrics()
    assert 'baton_planner_pressure{pool="decode"}' in planned.metrics()


@pytest.mark.parametrize("kind", KINDS)
async def test_of_two_routers_one_plans_and_the_other_takes_over_when_it_leaves(kind, tmp_path):
    async with a_redis(kind, tmp_path) as url:
        first, second = (
            RedisElection(open_redis(url, 1.0), key="baton:planner", router_id=name)
            for name in ("one", "two")
        )
        assert await first.standing_by() == ""
        assert await second.standing_by() == "another router plans"
        assert await first.standing_by() == ""
        await second.leave()
        assert await first.standing_by() == ""
        await first.leave()
        third = RedisElection(open_redis(url, 1.0), key="baton:planner", router_id="three")
        assert await third.standing_by() == ""
        await third.leave()


async def test_a_lease_that_never_ends_is_nobodys(tmp_path):
    async with a_redis("fakeredis", tmp_path) as url:
        redis = open_redis(url, 1.0)
        await redis.set("baton:planner", "forged")
        election = RedisElection(redis, key="baton:planner", router_id="one")
        assert await election.standing_by() == ""
        await election.leave()


async def test_while_redis_is_away_nobody_plans():
    redis = open_redis("redis://127.0.0.1:1", 0.2)
    election = RedisElection(redis, key="baton:planner", router_id="one")
    assert (await election.standing_by()).startswith("nobody plans: Redis gave no answer")
    await election.leave()


class Counts:
    """A launcher's numbers of workers; says why not, where it is to."""

    def __init__(self, refusal: str = "") -> None:
        self.wanted = {"prefill": 2, "decode": 2, "hybrid": 0}
        self.refusal = refusal
        self.asked: list[dict[str, int]] = []

    def pools(self):
        return self.wanted

    def follow(self, told):
        raise NotImplementedError

    async def scale(self, pools, *, by):
        assert by == "planner"
        self.asked.append(dict(pools))
        if self.refusal:
            raise InvalidRequestError(self.refusal)
        self.wanted = self.wanted | pools
        return self.wanted


def sized(counts: Counts, mode: str = "on") -> Planned:
    """One whose roles rest, so that only the number of workers may change."""
    config = RolesConfig(
        planner=mode,
        scale=True,
        sustained_s=10_000.0,
        gain=0.99,
        max_workers=5,
        scale_sustained_s=30.0,
    )
    return Planned(config=config, counts=counts)


async def test_a_worker_more_is_asked_for_and_operators_are_told_why():
    counts = Counts()
    planned = sized(counts)
    await planned.look(120)
    assert counts.asked == [{"decode": 3}]
    assert (
        'baton_planner_resizes_total{direction="up",outcome="changed",pool="decode"} 1.0'
        in planned.metrics()
    )
    story = [entry.event for entry in planned.planning.story()]
    assert any(event.startswith("one decode worker more: pressure") for event in story), story
    assert "4 of 5 workers are there" in story[-1]


async def test_a_dry_run_asks_for_no_workers():
    counts = Counts()
    planned = sized(counts, mode="dry_run")
    await planned.look(120)
    assert counts.asked == []
    assert 'outcome="dry_run",pool="decode"' in planned.metrics()


async def test_what_the_launcher_refuses_is_told():
    planned = sized(Counts(refusal="cluster.max_workers is 4"))
    await planned.look(120)
    assert 'outcome="failed",pool="decode"' in planned.metrics()
    assert any("cluster.max_workers is 4" in entry.event for entry in planned.planning.story())


async def test_a_held_planner_asks_for_no_workers():
    counts = Counts()
    planned = sized(counts)
    assert planned.planning.hold(True, by="uid 0") == ""
    await planned.look(120)
    assert counts.asked == []
