"""Where requests come in: asks the admission controller for each, holds those that wait,
and says which are to be begun.

The shell of `router.admission`, between the generator's calls and the dispatcher's events. Belongs to one event loop.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil

from baton.clock import Clock
from baton.config.schema import RouterConfig
from baton.errors import OverloadedError
from baton.ids import RequestId
from baton.story import StoryEntry
from router.admission.controller import (
    AdmissionController,
    Capacity,
    QueueLimits,
    Refusal,
    RefusalReason,
)
from router.admission.shares import Totals
from router.ports import GenerationRequest
from router.slo import Slo
from router.tenants.tenant import Tenant, TenantId

_UNBOUNDED_TOKENS = 1 << 30
_INITIAL_OUTPUT_TOKENS = 256
_OUTPUT_GAIN = 0.1
_MAX_TENANTS = 4096

_MESSAGES = {
    RefusalReason.TARGET: "It could not be begun in the time promised to its class: too many are waiting.",
    RefusalReason.DEADLINE: "It could not be begun before its deadline: too many are waiting.",
    RefusalReason.QUEUE_FULL: "Too many requests are waiting.",
    RefusalReason.TENANT_QUEUE_FULL: "Too many requests of this tenant are waiting.",
}


def queue_limits(config: RouterConfig, worker_wait_s: float) -> QueueLimits:
    """The configured bounds of the admission queue, and how long a request waits there for a worker."""
    return QueueLimits(
        requests=config.max_waiting_requests,
        tenant_requests=config.max_waiting_requests_per_tenant,
        prompt_tokens=config.max_waiting_prompt_tokens,
        tenant_prompt_tokens=config.max_waiting_prompt_tokens_per_tenant,
        worker_wait_s=worker_wait_s,
    )


class OutputLengths:
    """How long a tenant's outputs usually are, which is the part of a request's cost that is not known when it comes: a
    running mean per tenant, bounded by what each request allows itself.

    Pure. Tenants that have been away longest are forgotten.
    """

    def __init__(self) -> None:
        self._means: OrderedDict[TenantId, float] = OrderedDict()

    def expected(self, tenant: TenantId, max_tokens: int) -> int:
        """What one sample of a request that may generate `max_tokens` will probably generate."""
        mean = self._means.get(tenant, _INITIAL_OUTPUT_TOKENS)
        return max(1, min(max_tokens, round(mean)))

    def observe(self, tenant: TenantId, tokens: int) -> None:
        """One sample of a request ended after `tokens`."""
        mean = self._means.get(tenant)
        self._means[tenant] = tokens if mean is None else mean + _OUTPUT_GAIN * (tokens - mean)
        self._means.move_to_end(tenant)
        if len(self._means) > _MAX_TENANTS:
            self._means.popitem(last=False)


class Admission:
    """Every request that waits to be begun.

    Args:
        capacity: Of the workers.
        limits: Of the queue.
        clock: Monotonic.
    """

    def __init__(self, capacity: Capacity, limits: QueueLimits, clock: Clock) -> None:
        self._controller = AdmissionController(capacity=capacity, limits=limits)
        self._clock = clock
        self._lengths = OutputLengths()

    def waiting(self) -> Mapping[str, int]:
        """Requests that wait, by the name of their class."""
        return self._controller.waiting_per_class()

    def story(self, request_id: RequestId) -> tuple[StoryEntry, ...]:
        """What happened to a request before it was begun."""
        return self._controller.story(request_id)

    def check_capacity(self, tenant: Tenant, slo: Slo) -> None:
        """Whether a request of this tenant may come now, before it is known with what.

        Raises:
            OverloadedError: The queue is full.
        """
        expected = self._lengths.expected(tenant.tenant_id, _UNBOUNDED_TOKENS)
        now_s = self._clock.now_s()
        refusal = self._controller.check_capacity(tenant, slo, expected, now_s)
        if refusal is not None:
            raise _refused(refusal)

    def offer(self, request: GenerationRequest) -> None:
        """Queues a request that came; `admissible` says which queued requests are to be begun now.

        Raises:
            OverloadedError: It is refused.
        """
        now_s, max_tokens = self._clock.now_s(), request.prompt.sampling.max_tokens
        per_sample = self._lengths.expected(request.tenant.tenant_id, max_tokens)
        queued = replace(request, arrived_s=now_s, expected_tokens=per_sample * request.num_samples)
        refusal = self._controller.offer(queued, now_s)
        if refusal is not None:
            raise _refused(refusal)

    def admissible(self) -> Iterator[GenerationRequest]:
        """The requests that there is room for, to be begun. To be called whenever some may have become free; each must
        be placed, and show in the workers' counts, before the next is asked for.
        """
        while self._controller.waiting:
            request = self._controller.next(self._clock.now_s())
            if request is None:
                return
            yield request

    def expire(self) -> list[RequestId]:
        """Gives up the requests whose deadline has passed, or would before their first token."""
        if not self._controller.waiting:
            return []
        return [late.request_id for late in self._controller.expire(self._clock.now_s())]

    def abandon(self) -> list[RequestId]:
        """Gives up the requests that have waited long enough for a worker, where there is none."""
        return [late.request_id for late in self._controller.abandon(self._clock.now_s())]

    def leave(self, request_id: RequestId) -> None:
        """A client went away, or has all it wanted."""
        self._controller.leave(request_id)

    def finished(self, request: GenerationRequest, output_tokens: int) -> None:
        """A request ended after so many tokens over all its samples."""
        per_sample = round(output_tokens / request.num_samples)
        self._lengths.observe(request.tenant.tenant_id, per_sample)

    @property
    def admitted(self) -> Totals:
        """What was admitted since the start, for other routers to hear."""
        return self._controller.admitted

    def hear(self, others: Mapping[str, Totals]) -> None:
        """What other routers admitted since their starts."""
        self._controller.hear(others)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless what waits is what is counted."""
        self._controller.check_integrity()


def _refused(refusal: Refusal) -> OverloadedError:
    after_s = None if refusal.retry_after_s is None else max(1, ceil(refusal.retry_after_s))
    message = _MESSAGES[refusal.reason]
    return OverloadedError(message, retry_after_s=after_s, reason=refusal.reason.value)
