"""The line ahead of the dispatcher, over real links to fake workers."""

import asyncio
from typing import Any

import pytest

from baton.errors import DeadlineError, OverloadedError
from baton.ids import RequestId, Role
from router.ports import Timing
from router.tenants.tenant import Tenant, TenantId
from tests.router.grpc_workers import running
from tests.router.test_generator import collect, composed, generating, job, model_output
from tests.waits import WAIT_S

pytestmark = pytest.mark.timeout(30)

PLACES = 10
"""A fake hybrid worker has eight seats, and a quarter of that is sent ahead."""


async def settled(condition) -> None:
    """Returns once `condition` holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  # nobody announces what it looks at
            await asyncio.sleep(0.001)


async def full_house(generator, worker, count: int) -> list[asyncio.Task[Any]]:
    """So many jobs, of which `PLACES` run and are held up by the worker."""
    worker.hold_at = 1
    tasks = [asyncio.create_task(collect(generator, job(f"held-{n}"))) for n in range(count)]
    await settled(lambda: len(worker.started) == min(count, PLACES))
    return tasks


async def test_a_worker_is_sent_no_more_than_its_places_and_all_the_others_follow(tmp_path):
    async with running(tmp_path, h0=Role.HYBRID) as workers, composed(workers) as parts:
        generator = parts.generator
        worker = workers["h0"]
        tasks = await full_house(generator, worker, 30)
        await settled(lambda: parts.status.waiting() == {"standard": 20})
        assert generator.in_flight() == 30
        assert len(worker.started) == PLACES
        worker.gate.set()
        results = await asyncio.gather(*tasks)
        assert all(seen[0] == model_output(0, 6) for seen, _ in results)
        waited = sorted(timing.admission_s for _, timing in results)
        assert waited[0] < waited[-1]
        for _, timing in results:
            assert timing.first_token_s >= timing.admission_s


async def test_a_client_that_leaves_the_line_is_forgotten_at_once(tmp_path):
    async with running(tmp_path, h0=Role.HYBRID) as workers, composed(workers) as parts:
        generator = parts.generator
        tasks = await full_house(generator, workers["h0"], PLACES + 1)
        await settled(lambda: parts.status.waiting() == {"standard": 1})
        tasks[-1].cancel()
        await asyncio.gather(tasks[-1], return_exceptions=True)
        assert parts.status.waiting() == {"standard": 0}
        workers["h0"].gate.set()
        await asyncio.gather(*tasks[:-1])
        assert len(workers["h0"].started) == PLACES


async def test_a_deadline_ends_the_wait_in_line(tmp_path):
    async with running(tmp_path, h0=Role.HYBRID) as workers, generating(workers) as generator:
        tasks = await full_house(generator, workers["h0"], PLACES)
        with pytest.raises(DeadlineError):
            await collect(generator, job("late", timeout_s=0.2))
        workers["h0"].gate.set()
        await asyncio.gather(*tasks)


async def test_a_full_line_refuses_with_its_reason_and_the_others_are_served(tmp_path):
    async with (
        running(tmp_path, h0=Role.HYBRID) as workers,
        composed(workers, max_waiting_requests=2) as parts,
    ):
        generator = parts.generator
        tasks = await full_house(generator, workers["h0"], PLACES + 2)
        await settled(lambda: parts.status.waiting() == {"standard": 2})
        with pytest.raises(OverloadedError) as refused:
            await collect(generator, job("one too many"))
        assert refused.value.reason == "queue_full"
        workers["h0"].gate.set()
        await asyncio.gather(*tasks)


async def test_a_tenant_that_floods_does_not_keep_another_waiting(tmp_path):
    async with running(tmp_path, h0=Role.HYBRID) as workers, composed(workers) as parts:
        generator = parts.generator
        worker = workers["h0"]
        tasks = await full_house(generator, worker, PLACES + 200)
        await settled(lambda: parts.status.waiting() == {"standard": 200})
        quiet = job("quiet", tenant=Tenant(tenant_id=TenantId("quiet")))
        asking = asyncio.create_task(collect(generator, quiet))
        await settled(lambda: parts.status.waiting() == {"standard": 201})
        worker.gate.set()
        await asking
        order = [begun.request.request_id for begun in worker.started]
        # The flood has had its turn when the other comes; from then on they alternate.
        assert order.index(RequestId("quiet")) <= PLACES + 2 * PLACES
        await asyncio.gather(*tasks)


async def test_the_last_event_of_a_job_that_did_not_wait_says_so(tmp_path):
    async with running(tmp_path, h0=Role.HYBRID) as workers, generating(workers) as generator:
        events = [event async for event in generator.generate(job())]
        assert isinstance(events[-1], Timing)
        assert events[-1].admission_s < 0.5


async def test_a_router_that_stops_ends_those_in_line_too(tmp_path):
    async with running(tmp_path, h0=Role.HYBRID) as workers, composed(workers) as parts:
        generator = parts.generator
        tasks = await full_house(generator, workers["h0"], PLACES + 5)
        await settled(lambda: parts.status.waiting() == {"standard": 5})
        generator.end_requests()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, Exception) for result in results)
        assert generator.in_flight() == 0
