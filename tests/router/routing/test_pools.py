"""Nodes of the pool as holders: who comes, goes and starts again, and who can fetch from whom."""

from dataclasses import replace

import pytest

from baton.blocks import BlockReport, joined
from baton.errors import IncompatibleError
from baton.generation import WorkerLoad
from baton.ids import BlockKey, Incarnation, Role, WorkerId, WorkerIdentity
from router.routing.index import PrefixIndex
from router.routing.table import fingerprints_of
from router.routing.view import ClusterView
from tests.router.known_workers import BLOCK_TOKENS, hello

KEYS = [BlockKey(bytes([number]) * 16) for number in range(1, 7)]
CHAIN = fingerprints_of(joined(KEYS))


def node(incarnation: int, name: str = "pool-0") -> WorkerIdentity:
    return WorkerIdentity(worker_id=WorkerId(name), incarnation=Incarnation(incarnation))


def attached(incarnation: int, **changes) -> WorkerLoad:
    return WorkerLoad(pool_node="pool-0", pool_incarnation=incarnation, **changes)


def snapshot(*keys: BlockKey) -> BlockReport:
    return BlockReport(seq=1, stored=joined(keys), snapshot=True, first=True, last=True)


class World:
    """One prefill worker, and nodes that come and go."""

    def __init__(self) -> None:
        self.index = PrefixIndex(max_blocks=1000)
        self.view = ClusterView(self.index, silence_timeout_s=1e9)
        self.pools = self.view.pools
        self.worker = self.view.join(hello("p0", Role.PREFILL), "unix:p0", 0.0)

    def report(self, load: WorkerLoad) -> None:
        self.worker.report(load, 0.0)
        self.pools.attach(self.worker)

    def depth(self) -> int:
        """Blocks that the worker can fetch."""
        return self.index.held_blocks(CHAIN, 0.0).get(self.worker.pool_slot)

    def check(self) -> None:
        self.view.check_integrity()
        self.index.check_integrity()


@pytest.fixture
def world():
    made = World()
    yield made
    made.check()


def test_a_worker_can_fetch_what_the_node_that_it_maps_holds(world):
    world.pools.join(node(1), "host:1")
    world.report(attached(1))
    world.pools.report_blocks(node(1), snapshot(*KEYS[:3]))
    assert world.depth() == 3


def test_a_node_at_two_addresses_is_watched_at_the_first(world):
    world.pools.join(node(1), "host:1")
    world.report(attached(1))
    world.pools.report_blocks(node(1), snapshot(*KEYS[:3]))
    with pytest.raises(IncompatibleError, match="pool at host:1 already"):
        world.pools.join(node(1), "alias:1")
    assert (len(world.pools), world.depth()) == (1, 3)


def test_a_worker_of_another_host_can_fetch_nothing(world):
    world.pools.join(node(1), "host:1")
    world.pools.report_blocks(node(1), snapshot(*KEYS))
    world.report(attached(2))
    assert world.depth() == 0


def test_a_worker_may_say_so_before_its_node_is_watched(world):
    world.report(attached(1))
    world.pools.join(node(1), "host:1")
    world.pools.report_blocks(node(1), snapshot(*KEYS))
    assert world.depth() == len(KEYS)


def test_what_comes_after_a_hole_is_not_counted(world):
    world.pools.join(node(1), "host:1")
    world.report(attached(1))
    world.pools.report_blocks(node(1), snapshot(*KEYS))
    world.pools.report_blocks(node(1), BlockReport(seq=2, removed=KEYS[2]))
    assert world.depth() == 2


def test_the_blocks_of_a_node_that_is_gone_are_gone_at_once(world):
    world.pools.join(node(1), "host:1")
    world.report(attached(1))
    world.pools.report_blocks(node(1), snapshot(*KEYS))
    world.pools.lose(node(1))
    assert world.depth() == 0
    assert len(world.pools) == 0


def test_a_node_that_started_again_voids_what_it_held_before(world):
    world.pools.join(node(1), "host:1")
    world.report(attached(1))
    world.pools.report_blocks(node(1), snapshot(*KEYS))
    world.pools.join(node(2), "host:1")
    assert world.depth() == 0
    assert not world.pools.report_blocks(node(1), snapshot(*KEYS))
    world.report(attached(2))
    assert world.depth() == 0
    world.pools.report_blocks(node(2), snapshot(*KEYS[:1]))
    assert world.depth() == 1


def test_a_missing_report_is_a_gap_and_a_snapshot_mends_it(world):
    world.pools.join(node(1), "host:1")
    world.report(attached(1))
    world.pools.report_blocks(node(1), snapshot(*KEYS[:2]))
    assert world.pools.report_blocks(node(1), BlockReport(seq=3, stored=KEYS[2]))
    world.pools.report_blocks(node(1), snapshot(*KEYS[:3]))
    assert world.depth() == 3


def test_nodes_of_two_hosts_may_have_one_name(world):
    for number, keys in ((1, KEYS[:1]), (2, KEYS[:4])):
        world.pools.join(node(number), f"host{number}:1")
        world.pools.report_blocks(node(number), snapshot(*keys))
    for number, depth in ((1, 1), (2, 4)):
        world.report(attached(number))
        assert world.depth() == depth


def test_a_slot_that_another_worker_takes_over_is_no_longer_fetched_from(world):
    world.pools.join(node(1), "host:1")
    world.report(attached(1))
    world.pools.lose(node(1))
    other = world.view.join(hello("p1", Role.PREFILL), "unix:p1", 0.0)
    world.index.apply(other.identity, snapshot(*KEYS))
    assert world.depth() == 0


def test_what_fetching_takes_is_learned_from_what_a_worker_reports(world):
    load = attached(1)
    for _ in range(20):
        load = replace(
            load,
            pool_fetches=load.pool_fetches + 2,
            pool_fetched_blocks=load.pool_fetched_blocks + 500,
            pool_fetch_s=load.pool_fetch_s + 4.0,
        )
        world.report(load)
    tokens = 500 * BLOCK_TOKENS
    assert world.worker.forecast.fetching_s(tokens) == pytest.approx(4.0, rel=0.1)


def test_a_report_without_news_of_fetching_teaches_nothing(world):
    before = world.worker.forecast.fetching_s(1000)
    world.report(attached(1, pool_fetch_s=5.0))
    assert world.worker.forecast.fetching_s(1000) == before
