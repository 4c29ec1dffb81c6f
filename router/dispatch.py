"""The router's core: carries each job over its legs to exactly one end, whoever dies on the way.

A job is flown by one or more flights (`router.flight`). When a leg fails, the other leg is cancelled at once and new
flights continue what the samples still want, on other workers, from the token log (`router.job`).
"""

from dataclasses import dataclass
from heapq import heappop, heappush

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    DeadlineError,
    IncompatibleError,
    InvalidRequestError,
    InvariantError,
    UnavailableError,
    WorkerLostError,
)
from baton.ids import RequestId, WorkerIdentity, new_xfer_id
from router.events import (
    Action,
    AskForSnapshot,
    BlocksReported,
    ClientGone,
    DecodeTokens,
    Event,
    Fail,
    Finish,
    LegEvent,
    LoadReported,
    RefuseWorker,
    Service,
    StopSample,
    Submitted,
    TimePassed,
    WorkerJoined,
    WorkerLost,
    WorkerSuspected,
)
from router.flight import Flight, FlightState
from router.job import Job
from router.legs import LegTable
from router.placement import Placement
from router.progress import Broken, FlightProgress, Orphaned, Over, Settling, Verdict
from router.routing.policy import Pair, Unavailable
from router.routing.view import ClusterView, WorkerView

_DEAF_S = 1.0
"""After such a pause between two ticks this router cannot tell who was silent: it heard nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How hard a job is tried.

    Attributes:
        max_attempts: How often a sample's legs may be started.
        worker_wait_s: How long a job waits for a worker to appear: about what a restart takes.
        retry_pause_s: How long workers that failed a job are avoided when there are no others.
        recompute_tokens: Prompts up to this length are computed by D itself once P was lost twice.
        settle_s: How long a job whose tokens are all out waits for P's account of the hand-off.
    """

    max_attempts: int = 3
    worker_wait_s: float = 15.0
    retry_pause_s: float = 0.2
    recompute_tokens: int = 2048
    settle_s: float = 1.0


class Dispatcher:
    """All jobs of this router and their legs.

    Pure: no sockets, no clock. Time comes in as `now_s` (monotonic seconds). `handle` returns the actions the shell must
    carry out, in order. Not thread-safe: one owner.

    Args:
        view: The workers; the dispatcher adds and removes them and counts its legs there.
        placement: Chooses among them.
        patience: Bounds of retrying and waiting.
    """

    def __init__(self, *, view: ClusterView, placement: Placement, patience: Patience) -> None:
        self._view = view
        self._placement = placement
        self._patience = patience
        self._jobs: dict[RequestId, Job] = {}
        self._flights: dict[RequestId, list[Flight]] = {}
        self._legs = LegTable()
        self._progress = FlightProgress(self._legs)
        self._waiting: dict[Flight, Unavailable] = {}
        self._settling: dict[Flight, None] = {}
        self._deadlines: list[tuple[float, RequestId]] = []
        self._ticked_s = float("-inf")

    @property
    def in_flight(self) -> int:
        """Jobs accepted and not ended."""
        return len(self._jobs)

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """What to do about `event`.

        Raises:
            InvariantError: A bug of ours; `give_up` ends the job it belongs to.
        """
        match event:
            case DecodeTokens():  # first, for there is one for every token
                return self._progressed(event, now_s)
            case Submitted():
                return self._submit(event, now_s)
            case StopSample():
                return self._stop_sample(event, now_s)
            case ClientGone():
                return self._fail(event.request_id, CancelledByPeerError("the client is gone"))
            case TimePassed():
                return self._time_passed(now_s)
            case WorkerJoined():
                return self._join(event, now_s)
            case WorkerLost():
                return self._lose(event.worker, event.reason, now_s)
            case LoadReported():
                return self._report(event, now_s)
            case BlocksReported():
                return self._blocks(event)
            case _:
                return self._progressed(event, now_s)

    def give_up(self, event: Event, error: InvariantError) -> list[Action]:
        """Ends the job that `event` belongs to, after `handle` raised `error` for it."""
        match event:
            case Submitted():
                return self._fail(event.job.request_id, error)
            case StopSample() | ClientGone():
                return self._fail(event.request_id, error)
            case TimePassed() | WorkerJoined() | WorkerLost() | LoadReported() | BlocksReported():
                return []
            case _:
                leg = self._legs.find(event)
                return [] if leg is None else self._fail(leg.flight.job.request_id, error)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless jobs, flights, legs and the workers' counts agree."""
        flights = [flight for group in self._flights.values() for flight in group]
        if self._jobs.keys() != self._flights.keys() or not all(self._flights.values()):
            raise InvariantError("a job without a flight, or the other way round")
        for state, members in (
            (FlightState.WAITING, self._waiting),
            (FlightState.SETTLING, self._settling),
        ):
            if {flight for flight in flights if flight.state is state} != members.keys():
                raise InvariantError(f"flights that are {state} are not those on the list")
        self._legs.check_integrity(flights, self._view.workers)
        self._view.check_integrity()

    def _submit(self, event: Submitted, now_s: float) -> list[Action]:
        request_id = event.job.request_id
        if request_id in self._jobs:
            raise InvariantError(f"{request_id} is in flight already")
        job = Job(
            request_id=request_id,
            prompt=event.job.prompt,
            now_s=now_s,
            deadline_s=now_s + event.job.deadline_s,
        )
        self._jobs[request_id] = job
        self._flights[request_id] = []
        heappush(self._deadlines, (job.deadline_s, request_id))
        return self._launch(Flight(job=job, samples=job.prompt.samples, since_s=now_s), now_s)

    def _launch(self, flight: Flight, now_s: float) -> list[Action]:
        self._flights[flight.job.request_id].append(flight)
        return self._place(flight, now_s)

    def _place(self, flight: Flight, now_s: float) -> list[Action]:
        """Starts the legs of a waiting flight, or leaves it waiting."""
        job = flight.job
        prompt = flight.prompt()
        chosen = self._pinned(flight, now_s) or self._placement.choose(
            job, prompt, flight.avoid, now_s
        )
        paused = now_s - flight.since_s >= self._patience.retry_pause_s
        if isinstance(chosen, Unavailable) and flight.avoid and paused:
            chosen = self._placement.choose(job, prompt, frozenset(), now_s)
        if isinstance(chosen, Unavailable):
            self._waiting[flight] = chosen
            return []
        self._waiting.pop(flight, None)
        job.watch.placed(chosen, now_s)
        if chosen.local:
            flight.decoding = set(flight.samples)
            flight.move(FlightState.LOCAL, now_s)
            return [self._legs.start_local(flight, chosen.decode, now_s)]
        flight.move(FlightState.PREFILLING, now_s)
        permit = self._placement.permit(prompt, chosen, new_xfer_id(), flight.attempt)
        return list(self._legs.start_pair(flight, chosen, permit, now_s))

    def _pinned(self, flight: Flight, now_s: float) -> Pair | None:
        """The worker that is to do all of it itself, while it can be used."""
        if flight.pinned is None:
            return None
        worker = self._view.find(flight.pinned.worker_id)
        if worker is None or worker.identity != flight.pinned:
            return None
        return Pair(prefill=worker, decode=worker) if worker in self._view.usable(now_s) else None

    def _progressed(self, event: LegEvent, now_s: float) -> list[Action]:
        actions, verdict = self._progress.handle(event, now_s)
        return actions if verdict is None else actions + self._conclude(verdict, now_s)

    def _conclude(self, verdict: Verdict | None, now_s: float) -> list[Action]:
        match verdict:
            case Over(flight=flight):
                return self._end(flight, now_s)
            case Settling(flight=flight):
                self._settling[flight] = None
                return []
            case Orphaned():
                return self._take_over(verdict, now_s)
            case Broken():
                return self._retry(verdict, now_s)
            case None:
                return []

    def _end(self, flight: Flight, now_s: float) -> list[Action]:
        """Ends a flight, and the job with its last one."""
        actions = self._ground(flight, now_s)
        job = flight.job
        if not job.unfinished and not self._flights[job.request_id]:
            self._forget(job)
            actions.append(Finish(request_id=job.request_id, timing=job.timing(now_s)))
        return actions

    def _ground(self, flight: Flight, now_s: float) -> list[Action]:
        """Cancels every open leg of a flight and takes it off all lists."""
        actions: list[Action] = []
        for leg in flight.legs:
            self._legs.close(leg)
            actions.append(leg.cancel())
        flight.move(FlightState.ENDED, now_s)
        self._waiting.pop(flight, None)
        self._settling.pop(flight, None)
        self._flights[flight.job.request_id].remove(flight)
        return actions

    def _take_over(self, orphaned: Orphaned, now_s: float) -> list[Action]:
        """P is lost and D keeps the pages. Down the ladder: another P onto the same reservation, D computes the prompt
        itself, any other pair of workers, and then the error.
        """
        flight, job = orphaned.flight, orphaned.flight.job
        assert flight.decode is not None
        assert flight.asked is not None
        assert flight.permit is not None
        decode = flight.decode.worker
        flight.avoid |= orphaned.blamed
        other = self._placement.another_prefiller(job, flight.asked, decode, flight.avoid, now_s)
        if (
            other is not None
            and not flight.took_over
            and flight.attempt < self._patience.max_attempts
        ):
            pair = Pair(prefill=other, decode=decode)
            flight.attempt += 1
            flight.took_over = True
            job.watch.placed(pair, now_s)
            job.watch.started_again(resumed=False)
            permit = self._placement.permit(
                flight.asked, pair, flight.permit.xfer_id, flight.attempt
            )
            flight.move(FlightState.PREFILLING, now_s)
            return list(self._legs.take_over(flight, pair, permit, now_s))
        # Between these two rungs there is room for a third: D fetches what a pool holds of the prompt.
        short = len(flight.asked.tokens) <= self._patience.recompute_tokens
        broken = Broken(flight=flight, error=orphaned.error, blamed=orphaned.blamed)
        return self._retry(broken, now_s, decode.identity if short or other is None else None)

    def _retry(
        self, broken: Broken, now_s: float, pinned: WorkerIdentity | None = None
    ) -> list[Action]:
        """Continues what the samples of a failed flight still want, from the token log."""
        flight, error, job = broken.flight, broken.error, broken.flight.job
        actions = self._ground(flight, now_s)
        own_fault = isinstance(error, InvalidRequestError)
        if own_fault or flight.attempt >= self._patience.max_attempts:
            return actions + self._fail(job.request_id, error)
        wanted = tuple(sample for sample in flight.samples if not job.finished(sample))
        job.watch.started_again(resumed=job.has_tokens(wanted))
        groups = [(sample,) for sample in wanted] if job.has_tokens(wanted) else [wanted]
        for group in groups:
            successor = Flight(
                job=job,
                samples=group,
                since_s=now_s,
                attempt=flight.attempt + 1,
                avoid=flight.avoid | broken.blamed,
                cause=error,
                pinned=pinned,
            )
            actions += self._launch(successor, now_s)
        return actions

    def _fail(self, request_id: RequestId, error: BatonError) -> list[Action]:
        """Ends a job with an error; nothing for one that has ended."""
        job = self._jobs.get(request_id)
        if job is None:
            return []
        actions: list[Action] = []
        for flight in tuple(self._flights[request_id]):
            actions += self._ground(flight, flight.since_s)
        self._forget(job)
        return [*actions, Fail(request_id=request_id, error=error)]

    def _forget(self, job: Job) -> None:
        del self._jobs[job.request_id]
        del self._flights[job.request_id]

    def _stop_sample(self, event: StopSample, now_s: float) -> list[Action]:
        job = self._jobs.get(event.request_id)
        if job is None or job.finished(event.sample):
            return []
        job.stop(event.sample)
        flights = self._flights[event.request_id]
        flight = next(flight for flight in flights if event.sample in flight.samples)
        return self._conclude(self._progress.settle(flight, now_s), now_s)

    def _join(self, event: WorkerJoined, now_s: float) -> list[Action]:
        identity = event.hello.identity
        actions: list[Action] = []
        older = self._view.find(identity.worker_id)
        if older is not None and older.identity != identity:
            actions += self._lose(older.identity, "it was started anew", now_s)
        try:
            self._view.join(event.hello, event.address, now_s)
        except IncompatibleError as error:
            return [*actions, RefuseWorker(address=event.address, error=error)]
        return actions + self._place_waiting(now_s)

    def _lose(self, identity: WorkerIdentity, reason: str, now_s: float) -> list[Action]:
        worker = self._view.lose(identity)
        if worker is None:
            return []
        return self._go_on_without(worker, reason, now_s)

    def _suspect(self, worker: WorkerView, now_s: float) -> list[Action]:
        """Goes on without a worker that stands still. It stays a member, takes nothing new until it is heard from, and
        finds the end of its legs among the commands that wait for it.
        """
        silent_s = now_s - worker.heard_s
        cancels = [leg.cancel() for leg in self._legs.on_worker(worker)]
        told = WorkerSuspected(worker=worker.identity, silent_s=silent_s)
        reason = f"silent for {silent_s:.1f} s"
        return [told, *cancels, *self._go_on_without(worker, reason, now_s)]

    def _go_on_without(self, worker: WorkerView, reason: str, now_s: float) -> list[Action]:
        """Closes every leg on `worker` and continues their flights elsewhere."""
        identity = worker.identity
        error = WorkerLostError(f"worker {identity} was lost: {reason}")
        gone = self._legs.on_worker(worker)
        for leg in gone:
            self._legs.close(leg)
        actions: list[Action] = []
        for flight in dict.fromkeys(leg.flight for leg in gone):
            if flight.state is FlightState.ENDED:
                continue  # another flight of its job ran out of attempts a moment ago
            verdict = self._progress.legs_gone(flight, error, {identity}, now_s)
            actions += self._conclude(verdict, now_s)
        return actions

    def _report(self, event: LoadReported, now_s: float) -> list[Action]:
        worker = self._view.find(event.worker.worker_id)
        if worker is None or worker.identity != event.worker:
            return []
        was_away = worker.draining or self._view.suspected(worker, now_s)
        worker.report(event.load, now_s)
        return self._place_waiting(now_s) if was_away and not worker.draining else []

    def _blocks(self, event: BlocksReported) -> list[Action]:
        worker = self._view.find(event.worker.worker_id)
        if not self._view.report_blocks(event.worker, event.report) or worker is None:
            return []
        service = Service.DECODE if worker.hello.role.decodes else Service.PREFILL
        return [AskForSnapshot(worker=event.worker, service=service)]

    def _time_passed(self, now_s: float) -> list[Action]:
        actions = self._look_for_silent_workers(now_s)
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, request_id = heappop(self._deadlines)
            job = self._jobs.get(request_id)
            if job is not None and job.deadline_s == deadline_s:
                actions += self._fail(request_id, DeadlineError("the request's deadline passed"))
        for flight in [f for f in self._settling if now_s - f.since_s >= self._patience.settle_s]:
            actions += self._end(flight, now_s)
        return actions + self._place_waiting(now_s)

    def _look_for_silent_workers(self, now_s: float) -> list[Action]:
        if now_s - self._ticked_s > _DEAF_S:
            self._view.excuse_silence(now_s)
        self._ticked_s = now_s
        actions: list[Action] = []
        for worker in self._view.workers:
            if worker.legs and self._view.suspected(worker, now_s):
                actions += self._suspect(worker, now_s)
        return actions

    def _place_waiting(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for flight in tuple(self._waiting):
            actions += self._place(flight, now_s)
        patience_s = self._patience.worker_wait_s
        for flight in [f for f in self._waiting if now_s - f.since_s >= patience_s]:
            # Another sample of the same job may have failed it a moment ago.
            if flight in self._waiting:
                actions += self._fail(flight.job.request_id, self._unavailable(flight))
        return actions

    def _unavailable(self, flight: Flight) -> UnavailableError:
        message = self._waiting[flight].reason
        if flight.cause is not None:
            message += f" (earlier: {flight.cause.message})"
        return UnavailableError(message)
