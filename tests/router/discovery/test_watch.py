import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from router.discovery.ports import Look, Sighting
from router.discovery.watch import DiscoveryWatch
from router.fakes.discovery import FakeDiscovery
from tests.waits import soon

pytestmark = pytest.mark.timeout(30)

WORKER, NODE = Sighting(address="w:1", source="test"), Sighting(address="n:1", source="test")


@dataclass
class Told:
    """Remembers what it was told last."""

    sightings: Collection[Sighting] = ()
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def follow(self, sightings: Collection[Sighting]) -> None:
        self.sightings = sightings
        self.news.set()


@dataclass
class World:
    discovery: FakeDiscovery = field(default_factory=FakeDiscovery)
    workers: Told = field(default_factory=Told)
    pool_nodes: Told = field(default_factory=Told)
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)

    def watch(self) -> DiscoveryWatch:
        return DiscoveryWatch(
            self.discovery,
            workers=self.workers,
            pool_nodes=self.pool_nodes,
            registry=self.metrics,
        )


async def test_what_is_found_is_told_again_and_again():
    world = World(FakeDiscovery(Look(workers=(WORKER,), pool_nodes=(NODE,))))
    looking = asyncio.create_task(world.watch().run())
    await soon(world.workers.news.wait())
    assert (world.workers.sightings, world.pool_nodes.sightings) == ((WORKER,), (NODE,))
    world.workers.news.clear()
    world.discovery.found = Look()
    await soon(world.workers.news.wait())
    assert world.workers.sightings == ()
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)


async def test_faults_are_counted_each_time_and_logged_once(caplog):
    world = World(FakeDiscovery(Look(workers=(WORKER,), faults=("no answer",))))
    watch = world.watch()
    for _ in range(3):
        await watch.look()
    assert watch.faults == ("no answer",)
    assert world.metrics.get_sample_value("baton_discovery_failures_total") == 3
    assert world.metrics.get_sample_value("baton_discovery_addresses", {"kind": "worker"}) == 1
    world.discovery.found = Look()
    await watch.look()
    assert sum("no answer" in message for message in caplog.messages) == 1
