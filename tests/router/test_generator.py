import asyncio
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baton.backoff import Backoff
from baton.clock import ManualClock
from baton.config.schema import RouterConfig
from baton.errors import (
    DeadlineError,
    DrainingError,
    OverloadedError,
    PromptTooLongError,
    UnavailableError,
    UnreachableError,
)
from baton.generation import FinishReason, Prompt, SamplingParams, TokenSample, WorkerLoad
from baton.ids import RequestId, Role
from baton.rpc.generation import prompt_from_proto
from router.admission.admission import Admission, queue_limits
from router.dispatch.actions import Action, SendLeg
from router.dispatch.events import DecodeTokens, LoadReported, WorkerJoined
from router.dispatch.retry import Fallback, RetryPolicy
from router.generator import ClusterGenerator
from router.inboxes import Inboxes
from router.ports import GenerationRequest, ServedModel, Timing, Tokens
from router.service import RouterParts, compose
from router.service import running as running_parts
from router.slo import STANDARD
from router.tenants.tenant import ANONYMOUS
from router.workers.links import LinkTiming
from tests.router.grpc_workers import FakeWorker, running
from tests.router.known_workers import drawn, hello
from tests.waits import WAIT_S, soon

pytestmark = pytest.mark.timeout(30)


@asynccontextmanager
async def generating(workers: dict[str, FakeWorker], *, all_here: bool = True, **router):
    """A generator over `workers`; at the end nothing may be left in flight."""
    async with composed(workers, all_here=all_here, **router) as parts:
        yield parts.generator


@asynccontextmanager
async def composed(workers: dict[str, FakeWorker], *, all_here: bool = True, **router):
    """A router's parts over `workers`; at the end nothing may be left in flight."""
    policy = RetryPolicy(
        max_attempts=3,
        worker_wait_s=router.pop("worker_wait_s", 10.0),
        retry_backoff=Backoff(first_s=0.01, max_s=5.0, factor=4.0),
    )
    parts = compose(
        RouterConfig(**router),
        [worker.address for worker in workers.values()],
        b"s" * 32,
        retry_policy=policy,
        link_timing=LinkTiming(backoff=Backoff(first_s=0.01, max_s=0.05)),
    )
    async with running_parts(parts):
        while all_here and len(parts.view.workers) < len(workers):
            await parts.discovery.next_worker()
        yield parts
        assert parts.generator.in_flight() == 0
        parts.generator.check_integrity()
        assert all(worker.legs == 0 for worker in parts.view.workers)


def job(
    name="cmpl-1", *, max_tokens=6, samples=(0,), timeout_s=20.0, tenant=ANONYMOUS
) -> GenerationRequest:
    prompt = Prompt(
        prompt_tokens=tuple(range(10)),
        samples=samples,
        sampling=SamplingParams(max_tokens=max_tokens),
    )
    return GenerationRequest(
        request_id=RequestId(name), prompt=prompt, timeout_s=timeout_s, tenant=tenant
    )


async def collect(generator, a_job) -> tuple[dict[int, list[TokenSample]], Timing]:
    """Everything of a job, by sample."""
    seen: dict[int, list[TokenSample]] = {sample: [] for sample in a_job.prompt.samples}
    timing = None
    async for event in generator.generate(a_job):
        assert timing is None, "the timing comes last"
        if isinstance(event, Timing):
            timing = event
        else:
            for token in event.samples:
                seen[token.sample].append(token)
    assert timing is not None
    return seen, timing


def model_output(sample: int, max_tokens: int) -> list[TokenSample]:
    return [drawn(sample, position, max_tokens) for position in range(max_tokens)]


async def test_a_pair_of_workers_answers_with_all_tokens_and_the_timing(tmp_path):
    async with (
        running(tmp_path, p0=Role.PREFILL, d0=Role.DECODE) as workers,
        generating(workers) as generator,
    ):
        seen, timing = await collect(generator, job(samples=(0, 1)))
        assert seen == {0: model_output(0, 6), 1: model_output(1, 6)}
        assert (timing.prefill_worker, timing.decode_worker) == ("p0", "d0")
        assert (timing.queue_s, timing.prefill_s, timing.blocks_sent) == (0.25, 0.5, 2)
        assert timing.output_tokens == 12


async def test_a_hybrid_worker_answers_alone(tmp_path):
    async with running(tmp_path, h0=Role.HYBRID) as workers, generating(workers) as generator:
        seen, timing = await collect(generator, job())
        assert seen[0] == model_output(0, 6)
        assert (timing.prefill_worker, timing.decode_worker) == ("h0", "h0")
        assert timing.cached_tokens == 4


async def test_many_jobs_at_once_keep_their_tokens_apart(tmp_path):
    async with (
        running(tmp_path, p0=Role.PREFILL, d0=Role.DECODE, d1=Role.DECODE) as workers,
        generating(workers) as generator,
    ):
        jobs = [job(f"cmpl-{n}", max_tokens=1 + n % 5) for n in range(40)]
        results = await asyncio.gather(*(collect(generator, a_job) for a_job in jobs))
        for a_job, (seen, _) in zip(jobs, results, strict=True):
            assert seen[0] == model_output(0, a_job.prompt.sampling.max_tokens)
        assert workers["d0"].started
        assert workers["d1"].started


async def test_a_decode_worker_killed_in_mid_stream_is_continued_without_a_gap(tmp_path):
    async with (
        running(tmp_path, p0=Role.PREFILL, d0=Role.DECODE, d1=Role.DECODE) as workers,
        generating(workers) as generator,
    ):
        workers["d0"].hold_at = workers["d1"].hold_at = 4
        kill = asyncio.create_task(_kill_when_holding(workers, ("d0", "d1")))
        seen, timing = await collect(generator, job(max_tokens=8))
        killed = await kill
        assert workers[killed].server is None
        assert seen[0] == model_output(0, 8)
        assert timing.decode_worker == ({"d0", "d1"} - {killed}).pop()


async def _kill_when_holding(workers, names) -> str:
    """Kills whichever worker holds a leg in the middle of its stream, and lets the others run."""
    waits: dict[asyncio.Future[Any], str] = {
        asyncio.create_task(workers[name].holding.wait()): name for name in names
    }
    done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    killed = waits[done.pop()]
    for name in names:
        if name != killed:
            workers[name].hold_at = None
    await workers[killed].kill()
    return killed


async def test_a_prefill_worker_killed_before_the_first_token_is_replaced(tmp_path):
    async with (
        running(tmp_path, p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE) as workers,
        generating(workers) as generator,
    ):
        for name in ("p0", "p1"):
            workers[name].hold_at = 0
        kill = asyncio.create_task(_kill_when_holding(workers, ("p0", "p1")))
        seen, timing = await collect(generator, job())
        assert seen[0] == model_output(0, 6)
        assert timing.prefill_worker != await kill


async def test_the_only_worker_killed_and_restarted_goes_on_where_it_was(tmp_path):
    async with running(tmp_path, h0=Role.HYBRID) as workers, generating(workers) as generator:
        workers["h0"].hold_at = 3
        seen: list[TokenSample] = []
        async for event in generator.generate(job()):
            if isinstance(event, Tokens):
                seen += event.samples
            if len(seen) == 3 and workers["h0"].hold_at is not None:
                await workers["h0"].restart()
        assert seen == model_output(0, 6)
        (again,) = [s for s in workers["h0"].started if s.request.output_tokens]
        assert prompt_from_proto(again.request).output_tokens == (0, 1, 2)


async def test_a_refusal_of_the_request_itself_reaches_the_client_as_it_is(tmp_path):
    async with (
        running(tmp_path, p0=Role.PREFILL, d0=Role.DECODE) as workers,
        generating(workers) as generator,
    ):
        workers["p0"].refusal = PromptTooLongError("too long for here", param="prompt")
        with pytest.raises(PromptTooLongError, match="too long for here") as refused:
            await collect(generator, job())
        assert refused.value.param == "prompt"
        await soon(workers["d0"].cancelled.get())


async def test_a_link_that_broke_is_tried_by_its_worker_before_it_gets_a_request_again(tmp_path):
    async with (
        running(tmp_path, p0=Role.PREFILL, d0=Role.DECODE) as workers,
        composed(workers) as parts,
    ):
        p0, pairs = workers["p0"], parts.view.broken_pairs
        p0.refusal = UnreachableError("nothing passes")
        _, timing = await collect(parts.generator, job("cmpl-1"))
        assert (timing.prefill_worker, timing.decode_worker) == ("d0", "d0")
        p0.refusal = None
        probe = await soon(p0.probes.get())
        assert probe.transfer_address == workers["d0"].hello.transfer_address
        async with asyncio.timeout(WAIT_S):
            while len(pairs):  # noqa: ASYNC110  # the answer is on its way through a socket
                await asyncio.sleep(0.005)
        _, timing = await collect(parts.generator, job("cmpl-2"))
        assert (timing.prefill_worker, timing.decode_worker) == ("p0", "d0")


async def test_without_any_worker_the_job_fails_as_unavailable(tmp_path):
    worker = FakeWorker("h0", Role.HYBRID, tmp_path, {})
    async with composed({"h0": worker}, all_here=False, worker_wait_s=0.1) as parts:
        generator = parts.generator
        assert not parts.status.ready()
        assert await generator.model() is None
        assert await generator.model(wait=True) is None
        with pytest.raises(UnavailableError):
            await collect(generator, job())
        assert parts.dispatcher.retry_counters.fallbacks[Fallback.REFUSED] == 1


async def test_those_who_waited_for_a_worker_go_to_it_as_fast_as_it_takes_them(tmp_path):
    worker = FakeWorker("h0", Role.HYBRID, tmp_path, {}, hold_at=0)
    async with composed({"h0": worker}, all_here=False) as parts:
        waiting = [
            asyncio.create_task(collect(parts.generator, job(f"cmpl-{number}")))
            for number in range(30)
        ]
        await asyncio.sleep(0)
        assert parts.dispatcher.in_flight == 0
        await worker.start()
        await soon(worker.holding.wait())
        assert 0 < parts.dispatcher.in_flight < 30, "the others wait where they are ordered"
        worker.gate.set()
        await soon(asyncio.gather(*waiting))
        await worker.kill()


@dataclass
class SlowToSay:
    """Workers without room; to find that takes a millisecond."""

    clock: ManualClock
    looks: int = 0

    def has_room(self, request: GenerationRequest, now_s: float) -> bool:
        self.looks += 1
        self.clock.advance(0.001)
        return False

    def has_workers(self, now_s: float) -> bool:
        return True

    def first_token_s(self, request: GenerationRequest, now_s: float) -> float:
        return 0.0


async def test_with_a_queue_a_tenth_of_the_time_goes_into_looks_for_room_however_much_is_reported():
    clock = ManualClock()
    parts = compose(RouterConfig(), [], b"s" * 32, clock=clock)
    capacity = SlowToSay(clock)
    generator = ClusterGenerator(
        dispatcher=parts.dispatcher,
        admission=Admission(capacity, queue_limits(RouterConfig(), 10.0), clock),
        commands=parts.membership,
        hasher=None,
        inboxes=Inboxes(max_bytes=1 << 20, clock=clock),
        discovery=parts.discovery,
        clock=clock,
    )
    greeting = hello("h0", Role.HYBRID)
    generator.hear(WorkerJoined(hello=greeting, address="unix:h0"))
    waiting = asyncio.create_task(collect(generator, job()))
    await asyncio.sleep(0)
    before, began_s = capacity.looks, clock.now_s()
    for _ in range(1000):
        generator.hear(LoadReported(worker=greeting.identity, load=WorkerLoad(running=8)))
        clock.advance(0.0001)
    assert capacity.looks - before <= 0.1 * (clock.now_s() - began_s) / 0.001 + 1
    before = capacity.looks
    generator.tick()
    assert capacity.looks == before + 1, "a tick looks whatever was looked for before"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_what_was_begun_and_waits_for_room_goes_before_what_waits_in_the_queue(monkeypatch):
    clock = ManualClock()
    commands: list[Action] = []
    parts = compose(RouterConfig(policy="least_loaded"), [], b"s" * 32, clock=clock)
    monkeypatch.setattr(parts.membership, "send", commands.append)
    generator = parts.generator
    greetings = [hello(name, Role.HYBRID, transfer_address="") for name in ("h0", "h1")]
    workers = [greeting.identity for greeting in greetings]

    def hear(*heard) -> list[SendLeg]:
        """What these workers are sent up to the next tick, which hears them."""
        commands.clear()
        for worker in heard:
            generator.hear(LoadReported(worker=worker, load=WorkerLoad()))
        clock.advance(0.05)
        generator.tick()
        return [command for command in commands if isinstance(command, SendLeg)]

    for greeting in greetings:
        generator.hear(WorkerJoined(hello=greeting, address=str(greeting.identity)))
    prompts = [
        Prompt(prompt_tokens=(number,) * 4000, sampling=SamplingParams(max_tokens=6))
        for number in range(5)
    ]
    asking = [
        asyncio.create_task(collect(generator, replace(job(f"cmpl-{number}"), prompt=prompt)))
        for number, prompt in enumerate(prompts)
    ]
    async with asyncio.timeout(WAIT_S):
        while parts.generator.in_flight() < 5:  # noqa: ASYNC110  # the tasks begin
            await asyncio.sleep(0)
    assert parts.dispatcher.in_flight == 4
    while clock.now_s() < 7.0:
        hear()
    assert not any(worker.legs for worker in parts.view.workers)
    begun = hear(workers[0])
    assert len(begun) == 2
    assert parts.dispatcher.waits_for_room
    generator.hear(
        DecodeTokens(
            worker=workers[0],
            leg_id=begun[0].leg_id,
            tokens=(TokenSample(sample=0, token=1, finish=FinishReason.STOP),),
        )
    )
    for _ in range(5):
        await asyncio.sleep(0)
    assert parts.dispatcher.in_flight == 3, "none has taken the place of the one that is over"
    (following,) = hear(workers[0])
    assert following.request_id not in {leg.request_id for leg in begun}
    assert parts.dispatcher.in_flight == 3
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_who_asks_for_the_model_before_any_worker_is_here_waits_for_the_first(tmp_path):
    worker = FakeWorker("h0", Role.HYBRID, tmp_path, {})
    async with generating({"h0": worker}, all_here=False) as generator:
        asking = asyncio.create_task(generator.model(wait=True))
        assert await generator.model() is None
        await worker.start()
        assert await asking == ServedModel(max_model_len=4096, max_samples=8, vocab_size=1000)
        await worker.kill()


async def test_before_any_worker_was_here_no_more_wait_for_the_first_than_may_wait(tmp_path):
    worker = FakeWorker("h0", Role.HYBRID, tmp_path, {})
    async with generating({"h0": worker}, all_here=False, max_waiting_requests=2) as generator:
        asking = [asyncio.create_task(generator.model(wait=True)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="Too many requests are waiting"):
            await generator.model(wait=True)
        asking[0].cancel()
        await asyncio.wait(asking[:1])
        asking.append(asyncio.create_task(generator.model(wait=True)))
        await worker.start()
        served = ServedModel(max_model_len=4096, max_samples=8, vocab_size=1000)
        assert await soon(asyncio.gather(*asking[1:])) == [served, served]
        await worker.kill()


async def test_a_router_that_stops_lets_nobody_wait_for_a_worker(tmp_path):
    worker = FakeWorker("h0", Role.HYBRID, tmp_path, {})
    async with generating({"h0": worker}, all_here=False, worker_wait_s=3600.0) as generator:
        asking = asyncio.create_task(generator.model(wait=True))
        await asyncio.sleep(0)
        assert await generator.drain(1.0)
        assert await asking is None
        assert await generator.model(wait=True) is None


async def test_closing_the_stream_cancels_both_legs(tmp_path):
    async with (
        running(tmp_path, p0=Role.PREFILL, d0=Role.DECODE) as workers,
        generating(workers) as generator,
    ):
        workers["p0"].hold_at = 0
        stream = generator.generate(job())
        reading = asyncio.create_task(anext(stream))
        await soon(workers["p0"].holding.wait())
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await stream.aclose()
        await soon(workers["p0"].cancelled.get())
        await soon(workers["d0"].cancelled.get())


async def test_the_deadline_cancels_both_legs(tmp_path):
    async with (
        running(tmp_path, p0=Role.PREFILL, d0=Role.DECODE) as workers,
        generating(workers) as generator,
    ):
        workers["d0"].hold_at = 1
        with pytest.raises(DeadlineError):
            await collect(generator, job(timeout_s=0.2))
        await soon(workers["d0"].cancelled.get())


async def test_stopping_the_sample_ends_the_stream_with_its_timing(tmp_path):
    async with running(tmp_path, h0=Role.HYBRID) as workers, generating(workers) as generator:
        workers["h0"].hold_at = 2
        events = []
        async for event in generator.generate(job()):
            events.append(event)
            generator.stop_sample(RequestId("cmpl-1"), 0)
        assert isinstance(events[-1], Timing)
        assert 1 <= events[-1].output_tokens <= 2
        await soon(workers["h0"].cancelled.get())


async def test_a_client_that_does_not_read_is_given_up(tmp_path):
    async with (
        running(tmp_path, h0=Role.HYBRID) as workers,
        generating(workers, max_queued_bytes_per_client=1000) as generator,
        aclosing(generator.generate(job(max_tokens=100))) as stream,
    ):
        await anext(stream)
        await soon(workers["h0"].cancelled.get())
        with pytest.raises(OverloadedError):
            await anext(stream)


async def test_a_draining_generator_finishes_what_it_has_and_takes_nothing_new(tmp_path):
    async with running(tmp_path, h0=Role.HYBRID) as workers, composed(workers) as parts:
        generator = parts.generator
        workers["h0"].hold_at = 2
        running_job = asyncio.create_task(collect(generator, job()))
        await soon(workers["h0"].holding.wait())
        draining = asyncio.create_task(generator.drain(10.0))
        await asyncio.sleep(0)
        assert not parts.status.ready()
        with pytest.raises(DrainingError):
            await collect(generator, job("late"))
        with pytest.raises(DrainingError):
            generator.check_capacity(ANONYMOUS, STANDARD)
        workers["h0"].gate.set()
        assert await draining
        assert (await running_job)[0][0] == model_output(0, 6)


async def test_the_served_model_is_what_all_workers_can_take(tmp_path):
    async with running(tmp_path, h0=Role.HYBRID) as workers, composed(workers) as parts:
        generator = parts.generator
        assert await generator.model() == ServedModel(
            max_model_len=4096, max_samples=8, vocab_size=1000
        )
        assert parts.status.ready()
        assert parts.status.healthy()


async def lose(worker: FakeWorker, parts: RouterParts) -> None:
    """Kills a worker; returns once the router knows."""
    left = len(parts.view.workers) - 1
    await worker.kill()
    async with asyncio.timeout(WAIT_S):
        while len(parts.view.workers) > left:  # noqa: ASYNC110  # nobody announces it
            await asyncio.sleep(0.005)


async def test_what_a_worker_cannot_serve_is_served_once_it_is_lost(tmp_path):
    async with running(tmp_path, h1=Role.HYBRID) as workers:
        changes = {"max_model_len": 512}
        small = FakeWorker("h0", Role.HYBRID, tmp_path, peers=workers, changes=changes)
        workers["h0"] = small
        await small.start()
        async with composed(workers) as parts:
            model = parts.generator.model
            assert await model() == ServedModel(max_model_len=512, max_samples=8, vocab_size=1000)
            await lose(small, parts)
            assert await model() == ServedModel(max_model_len=4096, max_samples=8, vocab_size=1000)


async def test_how_long_texts_may_be_is_up_to_those_that_decode(tmp_path):
    """A prefill worker with few pages has prompts alone to hold, until it changes its role."""
    async with running(tmp_path, d0=Role.DECODE) as workers:
        changes = {"max_model_len": 512}
        small = FakeWorker("p0", Role.PREFILL, tmp_path, peers=workers, changes=changes)
        workers["p0"] = small
        await small.start()
        async with composed(workers) as parts:
            assert (await parts.generator.model()).max_model_len == 4096
            small.greet_again(role=Role.DECODE)
            async with asyncio.timeout(WAIT_S):
                while (await parts.generator.model()).max_model_len != 512:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)


async def test_without_workers_the_served_model_is_that_of_the_last_one(tmp_path):
    async with running(tmp_path, h0=Role.HYBRID) as workers, composed(workers) as parts:
        await lose(workers["h0"], parts)
        assert await parts.generator.model() == ServedModel(
            max_model_len=4096, max_samples=8, vocab_size=1000
        )
