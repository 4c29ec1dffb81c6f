"""The router's core: carries each job over its legs to exactly one end, whoever dies on the way.

Here events become what is done about them; how a job is tried, and tried again, is decided in `router.attempts`.
"""

from heapq import heappop, heappush

from baton.errors import (
    CancelledByPeerError,
    DeadlineError,
    IncompatibleError,
    InvariantError,
    WorkerLostError,
)
from baton.ids import RequestId, WorkerIdentity
from router.actions import Action, AskForSnapshot, RefuseWorker, WorkerSuspected
from router.attempts import Attempts
from router.events import (
    BlocksReported,
    ClientGone,
    DecodeTokens,
    Event,
    LegEvent,
    LoadReported,
    RoleChanged,
    StepTokens,
    StopSample,
    Submitted,
    TimePassed,
    WorkerJoined,
    WorkerLost,
)
from router.flight import FlightState
from router.legs import LegTable
from router.placement import Placement
from router.progress import FlightProgress
from router.restarts import Patience, Restarts
from router.routing.view import ClusterView
from router.routing.worker_view import WorkerView
from router.steps import Advance, advance

_DEAF_S = 1.0
"""After such a pause between two ticks this router cannot tell who was silent: it heard nobody."""


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
        self._legs = LegTable()
        self._progress = FlightProgress(self._legs)
        self._attempts = Attempts(
            view=view, placement=placement, legs=self._legs, patience=patience
        )
        self._deadlines: list[tuple[float, RequestId]] = []
        self._ticked_s = float("-inf")

    @property
    def in_flight(self) -> int:
        """Jobs accepted and not ended."""
        return self._attempts.num_jobs

    @property
    def restarts(self) -> Restarts:
        """How often attempts were lost and made again."""
        return self._attempts.restarts

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
                return self._attempts.fail(
                    event.request_id, CancelledByPeerError("the client is gone")
                )
            case TimePassed():
                return self._time_passed(now_s)
            case WorkerJoined():
                return self._join(event, now_s)
            case RoleChanged():
                self._view.change_role(event.worker, event.role)
                return self._attempts.place_waiting(now_s)
            case WorkerLost():
                return self._lose(event.worker, event.reason, now_s)
            case LoadReported():
                return self._report(event, now_s)
            case BlocksReported():
                return self._blocks(event)
            case _:
                return self._progressed(event, now_s)

    def advance(self, step: StepTokens, now_s: float) -> Advance:
        """Takes a step's tokens the short way; `others` of what comes back are for `handle`."""
        return advance(self._legs, step, now_s)

    def give_up(self, event: Event, error: InvariantError) -> list[Action]:
        """Ends the job that `event` belongs to, after `handle` raised `error` for it."""
        match event:
            case Submitted():
                return self._attempts.fail(event.job.request_id, error)
            case StopSample() | ClientGone():
                return self._attempts.fail(event.request_id, error)
            case TimePassed() | WorkerJoined() | WorkerLost() | RoleChanged():
                return []
            case LoadReported() | BlocksReported():
                return []
            case _:
                leg = self._legs.find(event)
                return [] if leg is None else self._attempts.fail(leg.flight.job.request_id, error)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless jobs, flights, legs and the workers' counts agree."""
        self._attempts.check_integrity()
        self._view.check_integrity()

    def _submit(self, event: Submitted, now_s: float) -> list[Action]:
        actions = self._attempts.begin(event.job, now_s)
        heappush(self._deadlines, (now_s + event.job.remaining_s, event.job.request_id))
        return actions

    def _progressed(self, event: LegEvent, now_s: float) -> list[Action]:
        actions, verdict = self._progress.handle(event, now_s)
        return actions if verdict is None else actions + self._attempts.conclude(verdict, now_s)

    def _stop_sample(self, event: StopSample, now_s: float) -> list[Action]:
        job = self._attempts.job(event.request_id)
        if job is None or job.finished(event.sample):
            return []
        job.stop(event.sample)
        flight = self._attempts.flight_of(job, event.sample)
        return self._attempts.conclude(self._progress.settle(flight, now_s), now_s)

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
        return actions + self._attempts.place_waiting(now_s)

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
        if gone:
            worker.breaker.failed(now_s)
        for leg in gone:
            self._legs.close(leg)
        actions: list[Action] = []
        for flight in dict.fromkeys(leg.flight for leg in gone):
            if flight.state is FlightState.ENDED:
                continue  # another flight of its job ran out of attempts a moment ago
            verdict = self._progress.legs_gone(flight, error, {identity}, now_s)
            actions += self._attempts.conclude(verdict, now_s)
        return actions

    def _report(self, event: LoadReported, now_s: float) -> list[Action]:
        worker = self._view.find(event.worker.worker_id)
        if worker is None or worker.identity != event.worker:
            return []
        was_away = worker.draining or self._view.suspected(worker, now_s)
        worker.report(event.load, now_s)
        self._view.pools.attach(worker)
        return self._attempts.place_waiting(now_s) if was_away and not worker.draining else []

    def _blocks(self, event: BlocksReported) -> list[Action]:
        if not self._view.report_blocks(event.worker, event.report):
            return []
        return [AskForSnapshot(worker=event.worker)]

    def _time_passed(self, now_s: float) -> list[Action]:
        actions = self._look_for_silent_workers(now_s)
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, request_id = heappop(self._deadlines)
            job = self._attempts.job(request_id)
            if job is not None and job.deadline_s == deadline_s:
                actions += self._attempts.fail(
                    request_id, DeadlineError("the request's deadline passed")
                )
        actions += self._attempts.end_settled(now_s)
        return actions + self._attempts.place_waiting(now_s)

    def _look_for_silent_workers(self, now_s: float) -> list[Action]:
        if now_s - self._ticked_s > _DEAF_S:
            self._view.excuse_silence(now_s)
        self._ticked_s = now_s
        actions: list[Action] = []
        for worker in self._view.workers:
            if worker.legs and self._view.suspected(worker, now_s):
                actions += self._suspect(worker, now_s)
        return actions
