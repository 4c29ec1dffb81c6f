"""The admission controller: a request is begun now, queued, or refused at once with a word on when to come back.

The shell (`router.admission.admission`) offers every request here before the dispatcher sees it, and takes out one at a
time, for what one takes up is seen by the next. Nothing is admitted while the workers have no capacity, so that what
waits, waits here, where it is ordered, bounded, and leaves at once with its client.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import exp
from typing import Protocol

from baton.errors import InvariantError
from baton.ids import RequestId
from baton.story import StoryEntry, StoryLog
from router.admission.queue import AdmissionQueue
from router.admission.shares import AdmittedTotals, Totals
from router.deadlines import Deadlines
from router.ports import GenerationRequest
from router.slo import Slo
from router.tenants.tenant import Tenant, TenantId

_WAIT_MARGIN = 1.25
"""A queue that is always filled up to what may wait ends half of its waits above the mean: promises are made on more
than that.
"""

_SLACK_S = 1.0
"""A client that was told to come back finds the queue this much shorter than it may be, or half of what it may be: with
none, the first that came meanwhile would have it refused again.
"""

_RATE_MIN_S = 0.5
"""Below this the first few requests admitted would count for more than they tell."""

_RETURN_SPREAD = 1.5
"""Returns come this much further apart than requests are taken: others of the tenant, told nothing yet,
come between them.
"""

_MAX_RETURN_DELAY_S = 60.0
_MAX_TENANTS = 4096


class RefusalReason(Enum):
    """Why a request was refused; the values are those of the metrics' `reason` label."""

    TARGET = "slo_target"
    DEADLINE = "deadline"
    QUEUE_FULL = "queue_full"
    TENANT_QUEUE_FULL = "tenant_queue_full"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """What may wait, in all and of one tenant.

    Attributes:
        requests: Requests.
        tenant_requests: Requests of one tenant.
        prompt_tokens: Tokens of their prompts, which is what they take in memory.
        tenant_prompt_tokens: The same of one tenant.
        worker_wait_s: How long a request waits while no worker is there.
    """

    requests: int
    tenant_requests: int
    prompt_tokens: int
    tenant_prompt_tokens: int
    worker_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Not now.

    Attributes:
        reason: Why.
        retry_after_s: When a request like it is expected to be taken; None when there is nothing to go by.
    """

    reason: RefusalReason
    retry_after_s: float | None


class Capacity(Protocol):
    """What the workers have left."""

    def has_room(self, request: GenerationRequest, now_s: float) -> bool:
        """Whether `request` could be placed without overfilling a worker or breaking what others were promised."""

    def has_workers(self, now_s: float) -> bool:
        """Whether there is any worker that may be given new work."""

    def first_token_s(self, request: GenerationRequest, now_s: float) -> float:
        """Predicted time from admission to the first token; 0 while nothing is known."""


class AdmissionController:
    """Which requests wait, and which is next.

    Pure: no sockets, no clock. Time comes in as `now_s`. A request that was accepted by `offer` leaves in exactly one
    way: taken by `next`, given up by `expire` or `abandon`, or gone by `leave`.

    Args:
        capacity: Says whether the next one fits.
        limits: Bounds of the queue.
    """

    def __init__(self, *, capacity: Capacity, limits: QueueLimits) -> None:
        self._capacity = capacity
        self._limits = limits
        self._queue = AdmissionQueue()
        self._rate = AdmissionRate()
        self._returns = ReturnSchedule()
        self._admitted = AdmittedTotals()
        self._story = StoryLog("admission")
        self._deadlines = Deadlines(self._queue.find, lambda: len(self._queue))
        self._without_workers_s: float | None = None  # since when

    @property
    def waiting(self) -> int:
        """How many requests are queued."""
        return len(self._queue)

    def waiting_per_class(self) -> dict[str, int]:
        """How many are queued, by the name of their class; classes that were seen once stay, at 0."""
        return self._queue.per_class()

    def story(self, request_id: RequestId) -> tuple[StoryEntry, ...]:
        """What happened to a request here, as far as it is remembered."""
        return self._story.story(request_id)

    def offer(self, request: GenerationRequest, now_s: float) -> Refusal | None:
        """Queues a request, unless that would be a promise that cannot be kept."""
        refusal = self._refusal(request, now_s)
        if refusal is None:
            if self._queue.find(request.request_id) is not None:
                story = self.story(request.request_id)
                raise InvariantError(f"{request.request_id} is queued already", story=story)
            self._queue.push(request)
            self._deadlines.add(request.deadline_s, request.request_id)
        outcome = "queued" if refusal is None else refusal
        what = f"offered: prompt_tokens={request.num_prompt_tokens}, expected_tokens={request.expected_tokens}"
        self._story.record(request.request_id, now_s, what, (outcome,))
        return refusal

    def check_capacity(
        self, tenant: Tenant, slo: Slo, expected_tokens: int, now_s: float
    ) -> Refusal | None:
        """What `offer` would refuse whatever the prompt, whose length is not known yet: the queue is full. The client
        is told to come back as one with a prompt like those that wait.
        """
        full = self._full(tenant.tenant_id, 1)
        if full is None:
            return None
        total = self._queue.total
        likely_tokens = max(1, total.prompt_tokens // total.requests)
        return self._refused(full, tenant, slo, likely_tokens + expected_tokens, 0.0, now_s)

    def next(self, now_s: float) -> GenerationRequest | None:
        """Takes the next request, if the workers have room. Ask again once it is placed.

        No request overtakes a head for which there is no room, or large requests would wait for ever.
        """
        head = self._queue.head()
        if head is None:
            return None
        if not self._capacity.has_room(head, now_s):
            # Time without workers says nothing of how fast they are.
            self._rate.observe(0, waiting=self._capacity.has_workers(now_s), now_s=now_s)
            return None
        self._queue.pop()
        self._deadlines.forget_ended()
        self._admitted.add(head)
        self._rate.observe(head.cost, waiting=bool(self._queue), now_s=now_s)
        self._story.record(head.request_id, now_s, "admitted")
        return head

    def expire(self, now_s: float) -> list[GenerationRequest]:
        """Gives up the requests whose first token could not come before their deadline even if they were admitted now.
        Looks at the earliest deadlines only.
        """
        late: list[GenerationRequest] = []
        while (first := self._deadlines.earliest()) is not None and self._too_late(first, now_s):
            self._queue.remove(first.request_id)
            self._story.record(first.request_id, now_s, "expired")
            late.append(first)
        self._deadlines.forget_ended()
        return late

    def abandon(self, now_s: float) -> list[GenerationRequest]:
        """Gives up the requests that have waited long enough for a worker, where there is none. To be called several
        times per second.
        """
        if self._capacity.has_workers(now_s):
            self._without_workers_s = None
            return []
        if self._without_workers_s is None:
            self._without_workers_s = now_s
        since_s = now_s - self._limits.worker_wait_s
        if self._without_workers_s > since_s:
            return []
        late = [request for request in self._queue if request.arrived_s <= since_s]
        for request in late:
            self._queue.remove(request.request_id)
            self._story.record(request.request_id, now_s, "given up: no worker came")
        self._deadlines.forget_ended()
        return late

    def leave(self, request_id: RequestId) -> bool:
        """The client of a request went away; whether the request was still queued."""
        if self._queue.remove(request_id) is None:
            return False
        self._deadlines.forget_ended()
        return True

    def wait_s(self, tenant: Tenant, slo: Slo) -> float:
        """Predicted time in the queue of a request that came now, at the most; 0 while nothing is known."""
        rate = self._rate.tokens_per_s
        return 0.0 if rate is None else _WAIT_MARGIN * self._queue.ahead(tenant, slo) / rate

    @property
    def admitted(self) -> Totals:
        """What was admitted since the start, by account."""
        return self._admitted.totals

    def hear(self, others: Mapping[str, Totals]) -> None:
        """What other routers admitted since their starts: it counts as if it had been admitted here."""
        for charge in self._admitted.hear(others):
            self._queue.charge(charge)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless what waits is counted right and within bounds."""
        self._queue.check_integrity()
        if len(self._queue) > self._limits.requests:
            raise InvariantError(f"{len(self._queue)} wait, {self._limits.requests} may")
        self._deadlines.check_integrity()

    def _refusal(self, request: GenerationRequest, now_s: float) -> Refusal | None:
        tenant, slo, cost = request.tenant, request.slo, request.cost
        full = self._full(tenant.tenant_id, request.num_prompt_tokens)
        if full is not None:
            return self._refused(full, tenant, slo, cost, 0.0, now_s)
        if not self._queue:
            return None
        wait_s = self.wait_s(tenant, slo)
        first_s = self._capacity.first_token_s(request, now_s)
        target_s = slo.ttft_s
        # A prompt that is too long for its target on idle workers is not refused for it: it would be for ever.
        if target_s is not None and first_s < target_s < wait_s + first_s:
            sooner_s = target_s - first_s
            return self._refused(RefusalReason.TARGET, tenant, slo, cost, sooner_s, now_s)
        spare_s = request.deadline_s - now_s - first_s
        if 0 < spare_s < wait_s:
            return self._refused(RefusalReason.DEADLINE, tenant, slo, cost, spare_s, now_s)
        return None

    def _full(self, tenant: TenantId, tokens: int) -> RefusalReason | None:
        """Why no prompt of so many tokens is queued; None where it is."""
        limits, own = self._limits, self._queue.queued_of(tenant)
        # A queue that is empty takes any prompt: how long one may be is not decided here.
        if own.exceeded(limits.tenant_requests, limits.tenant_prompt_tokens, by=tokens):
            return RefusalReason.TENANT_QUEUE_FULL
        if self._queue.total.exceeded(limits.requests, limits.prompt_tokens, by=tokens):
            return RefusalReason.QUEUE_FULL
        return None

    def _refused(
        self,
        reason: RefusalReason,
        tenant: Tenant,
        slo: Slo,
        cost: int,
        sooner_s: float,
        now_s: float,
    ) -> Refusal:
        """To come back when its turn would have come, less what it may wait in the queue,
        and after those told so before it.
        """
        rate = self._rate.tokens_per_s
        if rate is None:
            return Refusal(reason=reason, retry_after_s=None)
        ahead = self._queue.ahead(tenant, slo)
        turn_s = (self._queue.ahead(tenant, slo, more=cost) - ahead) / rate
        wait_s = max(0.0, self.wait_s(tenant, slo) - max(sooner_s / 2, sooner_s - _SLACK_S))
        after_s = self._returns.book(tenant.tenant_id, wait_s, turn_s, now_s)
        return Refusal(reason=reason, retry_after_s=after_s)

    def _too_late(self, request: GenerationRequest, now_s: float) -> bool:
        return request.deadline_s <= now_s + self._capacity.first_token_s(request, now_s)


class AdmissionRate:
    """Tokens of cost admitted per second while requests wait, as an average that forgets.

    Pure. Time in which nothing waits says nothing of what the workers could do, and is left out.

    Args:
        memory_s: How long back the average looks, in seconds with a queue.
    """

    def __init__(self, *, memory_s: float = 10.0) -> None:
        self._memory_s = memory_s
        self._tokens = 0.0
        self._seconds = 0.0
        self._since_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """The rate; None while too little was seen to say."""
        if self._seconds < _RATE_MIN_S or self._tokens <= 0:
            return None
        return self._tokens / self._seconds

    def observe(self, cost: int, *, waiting: bool, now_s: float) -> None:
        """A request was admitted, or (with cost 0) time passed; `waiting` tells whether another still waits."""
        if self._since_s is not None:
            passed_s = max(0.0, now_s - self._since_s)
            faded = exp(-passed_s / self._memory_s)
            self._tokens = self._tokens * faded + cost
            self._seconds = self._seconds * faded + passed_s
        self._since_s = now_s if waiting else None


class ReturnSchedule:
    """When refused clients were told to come back, so that those that were refused together do not return together.

    One tenant's returns come one after the other, a little slower than its requests are taken. Pure. Nothing is kept
    free for them: a client that does not come back costs nothing.
    """

    def __init__(self) -> None:
        self._booked_until_s: dict[TenantId, float] = {}

    def book(self, tenant: TenantId, wait_s: float, turn_s: float, now_s: float) -> float:
        """When to come back, in seconds from now.

        Args:
            tenant: Whose request it is.
            wait_s: When it would be taken if no other came back.
            turn_s: How long the tenant's next one has to wait for this one.
            now_s: The time.
        """
        earliest_s = now_s + wait_s
        # Bounded: a client that asks again and again without waiting must not put off those of its tenant that do wait.
        start_s = max(
            earliest_s,
            min(self._booked_until_s.get(tenant, 0.0), earliest_s + _MAX_RETURN_DELAY_S),
        )
        if len(self._booked_until_s) >= _MAX_TENANTS:
            self._booked_until_s = {t: s for t, s in self._booked_until_s.items() if s > now_s}
        self._booked_until_s[tenant] = start_s + _RETURN_SPREAD * turn_s
        return start_s - now_s
