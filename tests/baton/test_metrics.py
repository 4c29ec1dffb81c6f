import asyncio

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from baton.telemetry.metrics import new_registry, render, render_in_turns


@pytest.fixture
def registry() -> CollectorRegistry:
    """Metrics of each kind: small, large, of several names, and without a sample."""
    registry = new_registry()
    gauge = Gauge("load", "What a worker\nhas.", ["worker"], registry=registry)
    counter = Counter("hits", "Found.", ["worker"], registry=registry)
    histogram = Histogram("ttft", "Seconds.", ["worker"], registry=registry)
    for number in range(300):
        gauge.labels(f"w{number}").set(number)
        counter.labels(f'"w{number}"').inc()
        histogram.labels(f"w{number}").observe(0.1)
    Gauge("none", "Of nobody.", ["worker"], registry=registry)
    Info("build", "What this is.", registry=registry).info({"version": "1"})
    return registry


async def test_what_is_written_in_turns_is_what_is_written_at_once(registry):
    assert await render_in_turns(registry) == render(registry)


async def test_while_many_samples_are_written_others_have_their_turn():
    registry, turns = new_registry(), 0
    gauge = Gauge("load", "Of a worker.", ["worker"], registry=registry)
    for number in range(1000):
        gauge.labels(f"w{number}").set(number)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await render_in_turns(registry)
    task.cancel()
    assert turns > 5
