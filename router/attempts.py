"""The attempts at every job: how each begins, is made again elsewhere, and ends.

A job is flown by one or more flights (`router.flight`). When one breaks, its other leg is cancelled at once and new
flights continue what the samples still want, on other workers, from the token log (`router.job`). The dispatcher says
when; here it is decided how, and for how long it is worth trying.
"""

from baton.errors import BatonError, InvalidRequestError, InvariantError, UnavailableError
from baton.ids import RequestId, WorkerIdentity, new_xfer_id
from router.actions import Action, Fail, Finish
from router.flight import Flight, FlightState
from router.job import Job
from router.legs import LegTable
from router.placement import Placement
from router.ports import GenerationJob
from router.restarts import Patience, Restarts, Rung
from router.routing.policy import Unavailable
from router.routing.view import ClusterView
from router.verdicts import Broken, Orphaned, Over, Pooled, Settling, Verdict


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
            case Pooled():
                return self._leave_to_pool(verdict, now_s)
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
                self.restarts.rungs[Rung.REFUSED] += 1
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
        pinned = flight.pinned and self._placement.alone(flight.pinned, now_s)
        chosen = pinned or self._placement.choose(job, prompt, flight.avoid, now_s)
        paused = now_s - flight.since_s >= self._patience.pause_s(flight.attempt)
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
        """P is lost and D keeps the pages. Down the ladder (`router.restarts.Rung`): another P onto the same reservation, D
        fetches what the pool has of the prompt and computes the rest if that is short, any other pair of workers, and then
        the error.
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
            self._started_again(job, Rung.ANOTHER_PREFILLER, resumed=False)
            permit = self._placement.permit(
                flight.asked, pair, flight.permit.xfer_id, flight.attempt
            )
            flight.move(FlightState.PREFILLING, now_s)
            return list(self._legs.take_over(flight, pair, permit, now_s))
        pooled = self._placement.pooled_tokens(job, flight.asked, decode, now_s)
        short = flight.asked.num_tokens - pooled <= self._patience.recompute_tokens
        if short or pair is None:
            rung = Rung.POOL if pooled else Rung.RECOMPUTE
            return self._retry(orphaned, now_s, rung, decode.identity)
        return self._retry(orphaned, now_s)

    def _retry(
        self,
        broken: Broken,
        now_s: float,
        rung: Rung = Rung.ELSEWHERE,
        pinned: WorkerIdentity | None = None,
    ) -> list[Action]:
        """Continues what the samples of a failed flight still want, from the token log."""
        flight, error, job = broken.flight, broken.error, broken.flight.job
        actions = self._ground(flight, now_s)
        own_fault = isinstance(error, InvalidRequestError)
        if own_fault or flight.attempt >= self._patience.max_attempts:
            self.restarts.rungs[Rung.REFUSED] += not own_fault
            return actions + self.fail(job.request_id, error)
        self._started_again(job, rung, resumed=job.has_tokens(flight.unfinished))
        avoid = flight.avoid | broken.blamed
        return actions + self._go_on(
            flight, now_s, attempt=flight.attempt + 1, avoid=avoid, cause=error, pinned=pinned
        )

    def _leave_to_pool(self, pooled: Pooled, now_s: float) -> list[Action]:
        """D had no room, and the prompt lies in the pool: D fetches it when it has room, and holds nothing until then. Where it
        cannot, the prompt would be computed among those who decode there: another pair is better, P has it in its cache.
        """
        flight = pooled.flight
        assert flight.decode is not None
        self.restarts.rungs[Rung.NO_ROOM if pooled.in_reach else Rung.ELSEWHERE] += 1
        decode = flight.decode.worker.identity if pooled.in_reach else None
        return self._ground(flight, now_s) + self._go_on(
            flight, now_s, attempt=flight.attempt, avoid=flight.avoid, cause=None, pinned=decode
        )

    def _go_on(
        self,
        flight: Flight,
        now_s: float,
        *,
        attempt: int,
        avoid: frozenset[WorkerIdentity],
        cause: BatonError | None,
        pinned: WorkerIdentity | None,
    ) -> list[Action]:
        """New flights for what the samples of an ended one still want; with tokens each goes its own way."""
        job, wanted = flight.job, flight.unfinished
        actions: list[Action] = []
        for samples in [(sample,) for sample in wanted] if job.has_tokens(wanted) else [wanted]:
            successor = Flight(
                job=job,
                samples=samples,
                since_s=now_s,
                attempt=attempt,
                avoid=avoid,
                cause=cause,
                pinned=pinned,
            )
            actions += self._launch(successor, now_s)
        return actions

    def _started_again(self, job: Job, rung: Rung, *, resumed: bool) -> None:
        self.restarts.rungs[rung] += 1
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
