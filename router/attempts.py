"""The attempts at every job: how each begins, is made again elsewhere, and ends.

A job is flown by one or more flights (`router.flight`). When one breaks, its other leg is cancelled at once and new
flights continue what the samples still want, on other workers, from the token log (`router.job`). The dispatcher says
when; here it is decided how, and for how long it is worth trying.
"""

from dataclasses import dataclass

from baton.errors import BatonError, InvalidRequestError, InvariantError, UnavailableError
from baton.ids import RequestId, WorkerIdentity, new_xfer_id
from router.events import Action, Fail, Finish
from router.flight import Flight, FlightState
from router.job import Job
from router.legs import LegTable
from router.placement import Placement
from router.ports import GenerationJob
from router.routing.policy import Pair, Unavailable
from router.routing.view import ClusterView
from router.verdicts import Broken, Orphaned, Over, Settling, Verdict


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


@dataclass(slots=True, eq=False)
class Restarts:
    """How often attempts were lost and others took their places, counted as it happens, whatever becomes of the job.

    Attributes:
        retries: Before their first token.
        resumptions: After it.
    """

    retries: int = 0
    resumptions: int = 0


class Attempts:
    """All jobs of this router and the flights that carry them.

    Pure, as the dispatcher, its one owner. Every method returns the actions the shell must carry out, in order.

    Args:
        view: The workers.
        placement: Chooses among them.
        legs: The open ones; opened and closed here.
        patience: Bounds of retrying and waiting.

    Attributes:
        restarts: Counted since the start.
    """

    def __init__(
        self, *, view: ClusterView, placement: Placement, legs: LegTable, patience: Patience
    ) -> None:
        self._view = view
        self._placement = placement
        self._legs = legs
        self._patience = patience
        self._jobs: dict[RequestId, Job] = {}
        self._flights: dict[RequestId, list[Flight]] = {}
        self._waiting: dict[Flight, Unavailable] = {}
        self._settling: dict[Flight, None] = {}
        self.restarts = Restarts()

    @property
    def num_jobs(self) -> int:
        """Jobs begun and not ended."""
        return len(self._jobs)

    def job(self, request_id: RequestId) -> Job | None:
        """The job of that name, until it has ended."""
        return self._jobs.get(request_id)

    def flight_of(self, job: Job, sample: int) -> Flight:
        """The flight that carries an unfinished sample."""
        flights = self._flights[job.request_id]
        return next(flight for flight in flights if sample in flight.samples)

    def begin(self, asked: GenerationJob, now_s: float) -> list[Action]:
        """The first attempt at a new job.

        Raises:
            InvariantError: A job of this name is in flight.
        """
        if asked.request_id in self._jobs:
            raise InvariantError(f"{asked.request_id} is in flight already")
        job = Job(
            request_id=asked.request_id,
            prompt=asked.prompt,
            now_s=now_s,
            session=f"{asked.tenant.tenant_id}/{asked.session}" if asked.session else "",
            deadline_s=now_s + asked.remaining_s,
            slo=asked.slo,
            waited_s=asked.waited_s,
            trace_parent=asked.trace_parent,
        )
        self._jobs[job.request_id] = job
        self._flights[job.request_id] = []
        return self._launch(Flight(job=job, samples=job.prompt.samples, since_s=now_s), now_s)

    def conclude(self, verdict: Verdict | None, now_s: float) -> list[Action]:
        """What follows from how a flight went."""
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

    def fail(self, request_id: RequestId, error: BatonError) -> list[Action]:
        """Ends a job with an error; nothing for one that has ended."""
        job = self._jobs.get(request_id)
        if job is None:
            return []
        actions: list[Action] = []
        for flight in tuple(self._flights[request_id]):
            actions += self._ground(flight, flight.since_s)
        self._forget(job)
        return [*actions, Fail(request_id=request_id, error=error)]

    def place_waiting(self, now_s: float) -> list[Action]:
        """Another look at who waits for workers; whoever has waited for too long fails."""
        actions: list[Action] = []
        for flight in tuple(self._waiting):
            actions += self._place(flight, now_s)
        patience_s = self._patience.worker_wait_s
        for flight in [f for f in self._waiting if now_s - f.since_s >= patience_s]:
            # Another sample of the same job may have failed it a moment ago.
            if flight in self._waiting:
                actions += self.fail(flight.job.request_id, self._unavailable(flight))
        return actions

    def end_settled(self, now_s: float) -> list[Action]:
        """Ends what has waited long enough for P's account of the hand-off."""
        settle_s = self._patience.settle_s
        actions: list[Action] = []
        for flight in [f for f in self._settling if now_s - f.since_s >= settle_s]:
            actions += self._end(flight, now_s)
        return actions

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
            return [self._legs.start_local(flight, chosen, now_s)]
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

    def _end(self, flight: Flight, now_s: float) -> list[Action]:
        """Ends a flight, and the job with its last one."""
        actions = self._ground(flight, now_s)
        job = flight.job
        if not job.unfinished and not self._flights[job.request_id]:
            self._forget(job)
            timing = job.timing(now_s)
            self._placement.ended(job, timing)
            actions.append(Finish(request_id=job.request_id, timing=timing))
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
        worth_it = not flight.took_over and flight.attempt < self._patience.max_attempts
        pair = self._placement.another_pair(job, flight.asked, decode, flight.avoid, now_s)
        if pair is not None and worth_it:
            flight.attempt += 1
            flight.took_over = True
            job.watch.placed(pair, now_s)
            self._started_again(job, resumed=False)
            permit = self._placement.permit(
                flight.asked, pair, flight.permit.xfer_id, flight.attempt
            )
            flight.move(FlightState.PREFILLING, now_s)
            return list(self._legs.take_over(flight, pair, permit, now_s))
        # Between these two rungs there is room for a third: D fetches what a pool holds of the prompt.
        short = flight.asked.num_tokens <= self._patience.recompute_tokens
        return self._retry(orphaned, now_s, decode.identity if short or pair is None else None)

    def _retry(
        self, broken: Broken, now_s: float, pinned: WorkerIdentity | None = None
    ) -> list[Action]:
        """Continues what the samples of a failed flight still want, from the token log."""
        flight, error, job = broken.flight, broken.error, broken.flight.job
        actions = self._ground(flight, now_s)
        own_fault = isinstance(error, InvalidRequestError)
        if own_fault or flight.attempt >= self._patience.max_attempts:
            return actions + self.fail(job.request_id, error)
        wanted = tuple(sample for sample in flight.samples if not job.finished(sample))
        resumed = job.has_tokens(wanted)
        self._started_again(job, resumed=resumed)
        groups = [(sample,) for sample in wanted] if resumed else [wanted]
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

    def _started_again(self, job: Job, *, resumed: bool) -> None:
        job.watch.started_again(resumed=resumed)
        self.restarts.resumptions += resumed
        self.restarts.retries += not resumed

    def _ground(self, flight: Flight, now_s: float) -> list[Action]:
        """Cancels every open leg of a flight and takes it off all lists."""
        actions: list[Action] = []
        for leg in flight.legs:
            self._legs.close(leg)
            leg.worker.breaker.abandoned(now_s)
            actions.append(leg.cancel())
        flight.move(FlightState.ENDED, now_s)
        self._waiting.pop(flight, None)
        self._settling.pop(flight, None)
        self._flights[flight.job.request_id].remove(flight)
        return actions

    def _forget(self, job: Job) -> None:
        del self._jobs[job.request_id]
        del self._flights[job.request_id]

    def _unavailable(self, flight: Flight) -> UnavailableError:
        message = self._waiting[flight].reason
        if flight.cause is not None:
            message += f" (earlier: {flight.cause.message})"
        return UnavailableError(message)
