"""Whether requests got what their class of service promises, as operators read it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from baton.clock import ManualClock
from baton.config.schema import SloClass
from baton.errors import BatonError, InvalidRequestError, OverloadedError, WorkerLostError
from router.dispatch.actions import Emit
from router.fakes.generator import FakeGenerator
from router.inboxes import Inboxes
from router.ports import GenerationEvent, GenerationRequest, Timing
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


async def say(
    served: Served, *, clock: ManualClock, upload_s: float, pause_s: float, after: int
) -> None:
    """A request whose body takes so long to come, and that waits for so long after so many of its five tokens."""
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 5, "ignore_eos": True}
    text = json.dumps(body).encode()

    async def slowly() -> AsyncIterator[bytes]:
        yield text[:9]
        clock.advance(upload_s)
        yield text[9:]

    served.generator.pause_after = after
    served.generator.gate.clear()
    served.generator.paused.clear()
    request = asyncio.create_task(served.http.post("/v1/completions", content=slowly()))
    await soon(served.generator.paused.wait())
    clock.advance(pause_s)
    served.generator.gate.set()
    reply = await soon(request)
    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("pause_s", "after", "ttft", "tbt"),
    [
        (1.9, 0, "met", "met"),
        (2.1, 0, "missed", "met"),
        (0.3, 2, "met", "met"),  # over four gaps
        (0.5, 2, "met", "missed"),
    ],
)
async def test_a_request_met_what_it_was_promised_or_missed_it(
    pause_s: float, after: int, ttft: str, tbt: str
) -> None:
    clock = ManualClock()
    async with promising(clock) as served:
        await say(served, clock=clock, upload_s=0.2, pause_s=pause_s, after=after)
        assert judged(served) == {f"standard ttft {ttft}": 1, f"standard tbt {tbt}": 1}


async def test_what_a_client_takes_to_send_its_request_is_no_missed_promise() -> None:
    clock = ManualClock()
    async with promising(clock) as served:
        await say(served, clock=clock, upload_s=50.0, pause_s=1.0, after=0)
        assert judged(served) == {"standard ttft met": 1, "standard tbt met": 1}
        waited_s = served.metric("vllm:time_to_first_token_seconds_sum", model_name=MODEL)
        assert waited_s == 51.0, "what its client waits for, as ever"


class _SlowlyRead(FakeGenerator):
    """Its tokens are put into an inbox every `step_s`, from which a client reads the first, and then nothing for ten
    seconds.
    """

    clock: ManualClock
    step_s: float

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        inboxes = Inboxes(max_bytes=1 << 20, clock=self.clock)
        inbox = inboxes.open(request.request_id)
        is_first = True
        async for event in super().generate(request):
            if isinstance(event, Timing):
                inboxes.end(request.request_id, event)
                continue
            inboxes.put(Emit(request_id=request.request_id, tokens=event.samples))
            if is_first:
                yield await soon(inbox.next())
            is_first = False
            self.clock.advance(self.step_s)
        self.clock.advance(10.0)
        while not isinstance(event := await soon(inbox.next()), Timing):
            yield event
        yield event


@pytest.mark.parametrize(("step_s", "tbt"), [(0.09, "met"), (0.11, "missed")])
async def test_what_a_client_takes_to_read_its_reply_is_no_missed_promise(
    step_s: float, tbt: str
) -> None:
    generator = _SlowlyRead(script=[(1, 2, 3, 4, 5)])
    generator.clock, generator.step_s = ManualClock(), step_s
    async with serve(generator=generator, clock=generator.clock, slo_classes=PROMISED) as served:
        assert (await served.complete()).status_code == 200
        assert judged(served) == {"standard ttft met": 1, f"standard tbt {tbt}": 1}
        between_s = served.metric("vllm:inter_token_latency_seconds_sum", model_name=MODEL)
        assert between_s == pytest.approx(10.0 + 5 * step_s), "what its client waits for, as ever"


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
