"""Random interleavings of everything that can happen to jobs, against a model that only knows what each sample draws.

Workers are simulated down to their outgoing streams: what they say waits in order until the test delivers it, so that
messages overtake each other between streams, come late for cancelled legs, and die with their worker.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.backoff import Backoff
from baton.errors import (
    BatonError,
    CancelledByPeerError,
    EngineError,
    TransferError,
    WorkerLostError,
)
from baton.generation import FinishReason, Prompt, SamplingParams, WorkerLoad, plain_token
from baton.ids import LegId, LegKind, RequestId, Role, WorkerIdentity
from kv_transfer.ticket import Permit
from router.dispatch.actions import Emit, Fail, Finish, SendCancel, SendLeg, SendReassign
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.events import (
    ClientGone,
    DecodeTokens,
    HandedOff,
    LegFailed,
    LegWriterLost,
    LoadReported,
    Prefilled,
    SampleFinished,
    StepTokens,
    StopSample,
    TimePassed,
    WorkerJoined,
    WorkerLost,
)
from router.dispatch.placement import Placement
from router.dispatch.retry import RetryPolicy
from router.ports import GenerationRequest
from router.routing.index import PrefixIndex
from router.routing.policies import policy_named
from router.routing.view import ClusterView
from tests.router.known_workers import drawn, hello

GONE = WorkerLostError("the prefill worker is gone")
ROLES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
ROLES["h0"] = Role.HYBRID


@dataclass
class FakeLeg:
    """A leg on a simulated worker: `positions` says what each running sample draws next."""

    prompt: Prompt
    command: SendLeg
    positions: dict[int, int] = field(default_factory=dict)
    started: bool = False
    prefilled: bool = False


@dataclass
class FakeWorker:
    identity: WorkerIdentity
    legs: dict[LegId, FakeLeg] = field(default_factory=dict)
    outbox: dict[LegKind, deque[Any]] = field(
        default_factory=lambda: {kind: deque() for kind in LegKind}
    )


@dataclass
class Expected:
    """What the client of one job may see."""

    prompt: Prompt
    seen: dict[int, int]
    stopped: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    terminal: Finish | Fail | None = None
    gone: bool = False


def permit_of(command: SendLeg) -> Permit:
    assert command.permit is not None
    return command.permit


class Interleavings(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        index = PrefixIndex(max_blocks=50)
        self.view = ClusterView(index)
        placement = Placement(
            view=self.view,
            index=index,
            policy=policy_named("predictive"),
            secret=b"s" * 32,
            rng=Random(0),
        )
        self.core = Dispatcher(
            view=self.view,
            placement=placement,
            policy=RetryPolicy(
                max_attempts=4,
                worker_wait_s=5.0,
                retry_backoff=Backoff(first_s=0.2, max_s=5.0, factor=4.0),
                report_wait_s=1.0,
            ),
        )
        self.now_s = 0.0
        self.workers: dict[str, FakeWorker] = {}
        self.jobs: dict[RequestId, Expected] = {}
        self.started: set[LegId] = set()
        self.starts = 0
        self.short_way = Random(0)

    @initialize(seed=st.integers(0, 2**16))
    def everyone_joins(self, seed: int) -> None:
        self.short_way = Random(seed)
        for name in ROLES:
            self.join(name)

    # What the router does.

    def feed(self, event) -> None:
        plain = isinstance(event, DecodeTokens) and not any(t.finish for t in event.tokens)
        if plain and self.short_way.random() < 0.5:
            self.feed_step(event)
        else:
            self.handle(event)

    def feed_step(self, event: DecodeTokens) -> None:
        step = StepTokens(
            worker=event.worker,
            leg_ids=[event.leg_id] * len(event.tokens),
            samples=[token.sample for token in event.tokens],
            tokens=[token.token for token in event.tokens],
        )
        moved = self.core.advance(step, self.now_s)
        rows = zip(moved.request_ids, moved.samples, moved.tokens, strict=True)
        for request_id, sample, token in rows:
            self.see(Emit(request_id=request_id, tokens=(plain_token(sample, token),)))
        for other in moved.others:
            self.handle(other)

    def handle(self, event) -> None:
        for action in self.core.handle(event, self.now_s):
            self.perform(action)

    def perform(self, action) -> None:
        match action:
            case Emit():
                self.see(action)
            case Finish() | Fail():
                job = self.jobs[action.request_id]
                assert job.terminal is None
                job.terminal = action
            case SendCancel():
                worker = self.alive(action.worker)
                if worker is not None:
                    worker.legs.pop(action.leg_id, None)
            case SendReassign():
                worker = self.alive(action.worker)
                assert worker is not None, "sent to a worker that is not connected"
                self.reassign(worker, action)
            case SendLeg():
                assert action.leg_id not in self.started
                self.started.add(action.leg_id)
                worker = self.alive(action.worker)
                assert worker is not None, "sent to a worker that is not connected"
                worker.legs[action.leg_id] = FakeLeg(prompt=action.prompt, command=action)

    def reassign(self, worker: FakeWorker, action: SendReassign) -> None:
        leg = worker.legs.get(action.leg_id)
        if leg is not None and not leg.started and leg.command.kind is LegKind.RECEIVE:
            assert permit_of(leg.command).xfer_id == action.permit.xfer_id
            assert permit_of(leg.command).attempt < action.permit.attempt
            leg.command = replace(leg.command, permit=action.permit)

    def see(self, action: Emit) -> None:
        job = self.jobs[action.request_id]
        assert job.terminal is None
        for token in action.tokens:
            position = job.seen[token.sample]
            assert token == drawn(token.sample, position, job.prompt.sampling.max_tokens)
            assert token.sample not in job.stopped | job.finished
            job.seen[token.sample] = position + 1
            if token.finish is not None:
                job.finished.add(token.sample)

    def alive(self, identity: WorkerIdentity) -> FakeWorker | None:
        worker = self.workers.get(identity.worker_id)
        return worker if worker is not None and worker.identity == identity else None

    # What clients do.

    @rule(samples=st.integers(1, 3), max_tokens=st.integers(1, 6), blocks=st.integers(1, 4))
    def submit(self, samples: int, max_tokens: int, blocks: int) -> None:
        request_id = RequestId(f"job-{len(self.jobs)}")
        prompt = Prompt(
            prompt_tokens=tuple(range(4 * blocks + 1)),
            samples=tuple(range(samples)),
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        self.jobs[request_id] = Expected(prompt=prompt, seen=dict.fromkeys(range(samples), 0))
        job = GenerationRequest(
            request_id=request_id, prompt=prompt, timeout_s=60.0, arrived_s=self.now_s
        )
        self.feed(job)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), sample=st.integers(0, 2))
    def stop_sample(self, data: st.DataObject, sample: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.jobs)))
        if self.jobs[request_id].terminal is None:
            self.jobs[request_id].stopped.add(sample)
        self.feed(StopSample(request_id=request_id, sample=sample))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.jobs)))
        if self.jobs[request_id].terminal is None:
            self.jobs[request_id].gone = True
        self.feed(ClientGone(request_id=request_id))

    # What workers do.

    @rule(name=st.sampled_from(sorted(ROLES)))
    def join(self, name: str) -> None:
        if name in self.workers:
            return
        self.starts += 1
        greeting = hello(name, ROLES[name], incarnation=self.starts)
        self.workers[name] = FakeWorker(identity=greeting.identity)
        self.feed(WorkerJoined(hello=greeting, address=f"unix:{name}"))

    @precondition(lambda self: any(worker.legs for worker in self.workers.values()))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        worker = self.workers.pop(name)
        for leg in worker.legs.values():
            self.peer_notices(leg)
        self.feed(WorkerLost(worker=worker.identity, reason="killed"))

    def peer_notices(self, leg: FakeLeg) -> None:
        match leg.command:
            case SendLeg(kind=LegKind.PREFILL, permit=Permit() as permit):
                worker = self.alive(permit.target)
            case SendLeg(kind=LegKind.RECEIVE, permit=Permit() as permit):
                worker = self.alive(permit.source)
            case _:
                return
        if worker is None:
            return
        for leg_id, other in list(worker.legs.items()):
            same = getattr(other.command, "permit", None) == permit
            if same and not other.started:
                if leg.command.kind is LegKind.PREFILL:
                    self.lose_writer(worker, leg_id, permit.attempt)
                else:
                    self.fail_leg(worker, leg_id, WorkerLostError("the decode worker is gone"))

    def lose_writer(
        self,
        worker: FakeWorker,
        leg_id: LegId,
        attempt: int,
        error: BatonError = GONE,
    ) -> None:
        event = LegWriterLost(worker=worker.identity, leg_id=leg_id, attempt=attempt, error=error)
        worker.outbox[LegKind.RECEIVE].append(event)

    @precondition(lambda self: any(worker.legs for worker in self.workers.values()))
    @rule(data=st.data(), overloaded=st.booleans())
    def leg_fails(self, data: st.DataObject, overloaded: bool) -> None:
        worker, leg_id = self.some_leg(data)
        error = CancelledByPeerError("peer") if overloaded else EngineError("a step failed")
        self.fail_leg(worker, leg_id, error)

    def fail_leg(self, worker: FakeWorker, leg_id: LegId, error) -> None:
        leg = worker.legs.pop(leg_id)
        event = LegFailed(worker=worker.identity, leg_id=leg_id, error=error)
        worker.outbox[leg.command.kind].append(event)

    def some_leg(self, data: st.DataObject) -> tuple[FakeWorker, LegId]:
        choices = [
            (name, leg_id) for name in sorted(self.workers) for leg_id in self.workers[name].legs
        ]
        name, leg_id = data.draw(st.sampled_from(choices))
        return self.workers[name], leg_id

    @precondition(lambda self: any(worker.legs for worker in self.workers.values()))
    @rule(data=st.data())
    def writer_is_suspected(self, data: st.DataObject) -> None:
        worker, leg_id = self.some_leg(data)
        leg = worker.legs[leg_id]
        if leg.command.kind is LegKind.RECEIVE and not leg.started:
            self.lose_writer(worker, leg_id, permit_of(leg.command).attempt)

    @precondition(lambda self: any(worker.legs for worker in self.workers.values()))
    @rule(data=st.data(), steps=st.integers(1, 3))
    def work(self, data: st.DataObject, steps: int) -> None:
        worker, leg_id = self.some_leg(data)
        for _ in range(steps):
            if leg_id in worker.legs:
                self.advance(worker, leg_id)

    @precondition(lambda self: any(worker.legs for worker in self.workers.values()))
    @rule(rounds=st.integers(1, 4), order=st.permutations(sorted(ROLES)))
    def everything_moves(self, rounds: int, order: list[str]) -> None:
        """A stretch without accidents, so that they strike jobs of every age."""
        for _ in range(rounds):
            for name in order:
                self.move(name)

    def move(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is None:
            return
        for leg_id in list(worker.legs):
            if leg_id in worker.legs:
                self.advance(worker, leg_id)
        for kind in LegKind:
            if worker.outbox[kind]:
                self.feed(worker.outbox[kind].popleft())

    def advance(self, worker: FakeWorker, leg_id: LegId) -> None:
        leg = worker.legs[leg_id]
        if leg.command.kind is LegKind.PREFILL:
            self.advance_prefill(worker, leg_id, leg, leg.command)
        elif leg.command.kind is LegKind.GENERATE and not leg.started:
            leg.started = True
            position = len(leg.prompt.output_tokens)
            leg.positions = dict.fromkeys(leg.prompt.samples, position)
        elif leg.started:
            self.advance_decode(worker, leg_id, leg)

    def advance_prefill(
        self, worker: FakeWorker, leg_id: LegId, leg: FakeLeg, command: SendLeg
    ) -> None:
        max_tokens = leg.prompt.sampling.max_tokens
        position = len(leg.prompt.output_tokens)
        tokens = tuple(drawn(sample, position, max_tokens) for sample in leg.prompt.samples)
        if len(tokens) > 2:
            tokens = ()  # as an engine does that leaves them to the decode worker
        out = worker.outbox[LegKind.PREFILL]
        if not leg.prefilled:
            leg.prefilled = True
            out.append(
                Prefilled(
                    worker=worker.identity,
                    leg_id=leg_id,
                    first_tokens=tokens,
                    cached_tokens=0,
                    queue_s=0.0,
                    prefill_s=0.0,
                )
            )
            if tokens and all(token.finish for token in tokens):
                del worker.legs[leg_id]
                self.give_up(permit_of(command))
            return
        decoder = self.alive(permit_of(command).target)
        for other in [] if decoder is None else decoder.legs.values():
            if getattr(other.command, "permit", None) == command.permit:
                other.started = True
                running = [token.sample for token in tokens if token.finish is None]
                other.positions = (
                    dict.fromkeys(running, position + 1)
                    if tokens
                    else dict.fromkeys(leg.prompt.samples, position)
                )
                del worker.legs[leg_id]
                out.append(
                    HandedOff(
                        worker=worker.identity,
                        leg_id=leg_id,
                        blocks_sent=1,
                        bytes_sent=1,
                        reserve_wait_s=0.0,
                        unhidden_s=0.0,
                    )
                )
                return
        self.fail_leg(worker, leg_id, TransferError("the decode worker does not know it"))

    def give_up(self, permit: Permit) -> None:
        """Nothing is left to decode: P says so to D, too, which may be heard first."""
        decoder = self.alive(permit.target)
        for leg_id, leg in [] if decoder is None else list(decoder.legs.items()):
            if decoder is not None and getattr(leg.command, "permit", None) == permit:
                self.lose_writer(decoder, leg_id, permit.attempt, CancelledByPeerError("given up"))

    def advance_decode(self, worker: FakeWorker, leg_id: LegId, leg: FakeLeg) -> None:
        max_tokens = leg.prompt.sampling.max_tokens
        tokens = tuple(drawn(s, position, max_tokens) for s, position in leg.positions.items())
        leg.positions = {t.sample: leg.positions[t.sample] + 1 for t in tokens if not t.finish}
        out = worker.outbox[leg.command.kind]
        if tokens:
            out.append(DecodeTokens(worker=worker.identity, leg_id=leg_id, tokens=tokens))
        for sample in leg.prompt.samples if not leg.positions else ():
            out.append(
                SampleFinished(
                    worker=worker.identity,
                    leg_id=leg_id,
                    sample=sample,
                    reason=FinishReason.LENGTH,
                )
            )
        if not leg.positions:
            del worker.legs[leg_id]

    @precondition(lambda self: self.streams())
    @rule(data=st.data(), most=st.integers(1, 4))
    def deliver(self, data: st.DataObject, most: int) -> None:
        name, kind = data.draw(st.sampled_from(self.streams()))
        stream = self.workers[name].outbox[kind]
        for _ in range(min(most, len(stream))):
            self.feed(stream.popleft())

    def streams(self) -> list[tuple[str, LegKind]]:
        return [
            (name, kind)
            for name in sorted(self.workers)
            for kind, stream in self.workers[name].outbox.items()
            if stream
        ]

    @rule(name=st.sampled_from(sorted(ROLES)))
    def stand_still(self, name: str) -> None:
        """A worker is stopped for longer than the router's patience; what it had sent arrives afterwards."""
        for _ in range(8):
            self.now_s += 0.8
            self.hear(set(ROLES) - {name})
            self.feed(TimePassed())

    @rule(name=st.sampled_from(sorted(ROLES)))
    def give_a_sign(self, name: str) -> None:
        self.hear({name})

    def hear(self, names: set[str]) -> None:
        for name in names & self.workers.keys():
            self.feed(LoadReported(worker=self.workers[name].identity, load=WorkerLoad()))

    @rule(seconds=st.floats(0.1, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(TimePassed())

    @invariant()
    def counts_agree(self) -> None:
        self.core.check_integrity()

    def teardown(self) -> None:
        """With workers that work and time that passes, every job ends, rightly, and nothing is left."""
        for name in ROLES:
            self.join(name)
        for _ in range(200):
            self.hear(set(ROLES))
            for name in ROLES:
                self.move(name)
            for name, kind in self.streams():
                while self.workers[name].outbox[kind]:
                    self.feed(self.workers[name].outbox[kind].popleft())
            self.now_s += 0.1
            self.feed(TimePassed())
            self.core.check_integrity()
        assert self.core.in_flight == 0
        for job in self.jobs.values():
            self.check_end(job)
        for view in self.view.workers:
            assert (view.legs, view.prefill_tokens, view.decode_tokens) == (0, 0, 0)
        assert not any(worker.legs for worker in self.workers.values())

    def check_end(self, job: Expected) -> None:
        match job.terminal:
            case Finish(timing=timing):
                assert set(job.prompt.samples) <= job.finished | job.stopped
                assert timing.output_tokens == sum(job.seen.values())
            case Fail():
                assert not set(job.prompt.samples) <= job.finished | job.stopped or job.gone
            case None:
                raise AssertionError("a job without an end")


Interleavings.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    phases=[Phase.generate],  # a run of this length takes minutes to shrink
    suppress_health_check=[HealthCheck.too_slow],
)
TestInterleavings = Interleavings.TestCase
