"""Where jobs come in: asks the gate for each, hands those that are let in to the dispatcher, tells the others why not.

The shell of `router.admission`, between the generator's calls and the dispatcher's events. Belongs to one event loop.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil

from baton.clock import Clock
from baton.config.schema import RouterConfig
from baton.errors import BatonError, DeadlineError, OverloadedError
from baton.ids import RequestId
from router.admission.applicant import Applicant
from router.admission.gate import Gate, LineLimits, Reason, Refusal
from router.admission.given import Totals
from router.admission.lengths import OutputLengths
from router.admission.room import WorkerRoom
from router.ports import GenerationJob
from router.slo import Slo
from router.tenants.tenant import Tenant

_UNBOUNDED_TOKENS = 1 << 30

_WHY = {
    Reason.TARGET: "It could not be begun in the time promised to its class: too many are waiting.",
    Reason.DEADLINE: "It could not be begun before its deadline: too many are waiting.",
    Reason.QUEUE_FULL: "Too many requests are waiting.",
    Reason.TENANT_QUEUE_FULL: "Too many requests of this tenant are waiting.",
}


def line_limits(config: RouterConfig) -> LineLimits:
    """The configured bounds of the line."""
    return LineLimits(
        requests=config.max_waiting_requests,
        tenant_requests=config.max_waiting_requests_per_tenant,
        prompt_tokens=config.max_waiting_prompt_tokens,
        tenant_prompt_tokens=config.max_waiting_prompt_tokens_per_tenant,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Where jobs go from here.

    Attributes:
        submit: Begins a job that was let in; where it was placed must show in the workers' counts when this returns.
        refuse: Ends a job that was not.
    """

    submit: Callable[[GenerationJob], None]
    refuse: Callable[[RequestId, BatonError], None]


class Intake:
    """Every job that is in line.

    Args:
        room: Of the workers.
        limits: Of the line.
        doors: Where jobs go from here.
        clock: Monotonic.
    """

    def __init__(self, room: WorkerRoom, limits: LineLimits, doors: Doors, clock: Clock) -> None:
        self._gate = Gate(room=room, limits=limits)
        self._doors = doors
        self._clock = clock
        self._lengths = OutputLengths()
        self._jobs: dict[RequestId, GenerationJob] = {}

    def waiting(self) -> Mapping[str, int]:
        """Jobs in line, by the name of their class."""
        return self._gate.waiting_per_class()

    def offer(self, job: GenerationJob) -> None:
        """A job came: it is begun, put in line, or refused, before this returns."""
        now_s = self._clock.now_s()
        refusal = self._gate.offer(self._applicant(job, now_s), now_s)
        if refusal is not None:
            self._doors.refuse(job.request_id, _refused(refusal))
            return
        self._jobs[job.request_id] = job
        self.let_in()

    def knock(self, tenant: Tenant, slo: Slo) -> None:
        """Whether anybody of this tenant may come now, before it is known with what.

        Raises:
            OverloadedError: The line is full.
        """
        now_s = self._clock.now_s()
        refusal = self._gate.knock(self._unknown(tenant, slo, now_s), now_s)
        if refusal is not None:
            raise _refused(refusal)

    def leave(self, request_id: RequestId) -> None:
        """A client went away, or has all it wanted."""
        if self._jobs.pop(request_id, None) is not None:
            self._gate.leave(request_id)

    def let_in(self) -> None:
        """Begins whatever there is room for. To be called whenever some may have become free."""
        while self._jobs:
            now_s = self._clock.now_s()
            applicant = self._gate.next(now_s)
            if applicant is None:
                return
            job = self._jobs.pop(applicant.request_id)
            self._doors.submit(replace(job, waited_s=now_s - applicant.arrived_s))

    def time_passed(self) -> None:
        """Gives up those that are too late, and looks for room."""
        for applicant in self._gate.expire(self._clock.now_s()) if self._jobs else ():
            del self._jobs[applicant.request_id]
            late = DeadlineError("The request's deadline passed, or was about to, while it waited.")
            self._doors.refuse(applicant.request_id, late)
        self.let_in()

    def finished(self, job: GenerationJob, output_tokens: int) -> None:
        """A job ended after so many tokens over all its samples."""
        per_sample = round(output_tokens / len(job.prompt.samples))
        self._lengths.observe(job.tenant.tenant_id, per_sample)

    @property
    def given(self) -> Totals:
        """What was let in since the start, for other routers to hear."""
        return self._gate.given

    def hear(self, others: Mapping[str, Totals]) -> None:
        """What other routers let in since their starts."""
        self._gate.hear(others)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless what waits is what is counted."""
        self._gate.check_integrity()

    def _unknown(self, tenant: Tenant, slo: Slo, now_s: float) -> Applicant:
        """One of whom no more is known."""
        return Applicant(
            request_id=RequestId(""),
            tenant=tenant,
            slo=slo,
            prompt_tokens=1,
            output_tokens=self._lengths.expected(tenant.tenant_id, _UNBOUNDED_TOKENS),
            samples=1,
            arrived_s=now_s,
            deadline_s=float("inf"),
        )

    def _applicant(self, job: GenerationJob, now_s: float) -> Applicant:
        prompt, tenant = job.prompt, job.tenant
        expected = self._lengths.expected(tenant.tenant_id, prompt.sampling.max_tokens)
        return Applicant(
            request_id=job.request_id,
            tenant=tenant,
            slo=job.slo,
            prompt_tokens=len(prompt.prompt_tokens),
            output_tokens=expected * len(prompt.samples),
            samples=len(prompt.samples),
            arrived_s=now_s,
            deadline_s=now_s + job.deadline_s,
        )


def _refused(refusal: Refusal) -> OverloadedError:
    after_s = None if refusal.retry_after_s is None else max(1, ceil(refusal.retry_after_s))
    return OverloadedError(_WHY[refusal.reason], retry_after_s=after_s, reason=refusal.reason.value)
