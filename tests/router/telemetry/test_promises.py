"""Whether requests got what their class of service promises, as operators read it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from baton.clock import ManualClock
from baton.config.schema import SloClass
from baton.errors import BatonError, InvalidRequestError, OverloadedError, WorkerLostError
from tests.router.served import MODEL, Served, serve
from tests.waits import soon

PROMISED = {"standard": SloClass(ttft_s=2.0, tbt_s=0.1), "batch": SloClass(priority=0)}


@contextlib.asynccontextmanager
async def promising(clock: ManualClock | None = None) -> AsyncIterator[Served]:
    """Says five tokens and an end."""
    async with serve(clock=clock or ManualClock(), slo_classes=PROMISED) as served:
        served.generator.script = [(1, 2, 3, 4, 5)]
        yield served


def judged(served: Served) -> dict[str, float]:
    """How many requests of which target had which outcome, those that some had."""
    samples = [s for metric in served.registry.collect() for s in metric.samples]
    return {
        f"{s.labels['slo_class']} {s.labels['target']} {s.labels['outcome']}": s.value
        for s in samples
        if s.name == "baton_slo_requests_total"
    }


async def say(served: Served, *, clock: ManualClock, arriving_s: float, pause_s: float) -> None:
    """A request that takes so long to arrive, and waits for so long between two of its five tokens."""
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 5, "ignore_eos": True}
    text = json.dumps(body).encode()

    async def slowly() -> AsyncIterator[bytes]:
        yield text[:9]
        clock.advance(arriving_s)
        yield text[9:]

    served.generator.pause_after = 2
    served.generator.gate.clear()
    served.generator.paused.clear()
    request = asyncio.create_task(served.http.post("/v1/completions", content=slowly()))
    await soon(served.generator.paused.wait())
    clock.advance(pause_s)
    served.generator.gate.set()
    reply = await soon(request)
    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("arriving_s", "pause_s", "ttft", "tbt"),
    [
        (1.9, 0.3, "met", "met"),  # 0.3 seconds over four gaps
        (2.1, 0.3, "missed", "met"),
        (1.9, 0.5, "met", "missed"),
    ],
)
async def test_a_request_met_what_it_was_promised_or_missed_it(
    arriving_s: float, pause_s: float, ttft: str, tbt: str
) -> None:
    clock = ManualClock()
    async with promising(clock) as served:
        await say(served, clock=clock, arriving_s=arriving_s, pause_s=pause_s)
        assert judged(served) == {f"standard ttft {ttft}": 1, f"standard tbt {tbt}": 1}


async def test_a_request_of_a_class_that_promises_nothing_is_not_judged() -> None:
    async with promising() as served:
        assert (await served.complete(service_tier="batch")).status_code == 200
        assert judged(served) == {}


async def test_one_token_has_no_time_between_tokens() -> None:
    async with promising() as served:
        assert (await served.complete(max_tokens=1)).status_code == 200
        assert judged(served) == {"standard ttft met": 1}


@pytest.mark.parametrize(
    ("fault", "after", "expected"),
    [
        (WorkerLostError("gone"), 0, {"standard ttft missed": 1, "standard tbt missed": 1}),
        (WorkerLostError("gone"), 2, {"standard ttft met": 1, "standard tbt missed": 1}),
        (InvalidRequestError("no"), 0, {}),
        (OverloadedError("full", reason="queue_full"), 0, {}),
    ],
    ids=["lost at once", "lost later", "the client's own fault", "refused"],
)
async def test_what_the_cluster_breaks_off_missed_what_had_not_come(
    fault: BatonError, after: int, expected: dict[str, float]
) -> None:
    async with promising() as served:
        served.generator.fault, served.generator.fault_after = fault, after
        assert (await served.complete()).status_code >= 400
        assert judged(served) == expected
