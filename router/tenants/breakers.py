"""Tenants whose requests keep breaking workers are slowed: all others pay for each worker that starts again.

Only what a worker died or failed of counts, not what a client did wrong; and only while enough requests of others
fare clearly better. When the requests of all tenants fail, the cluster is at fault. A tenant alone on a cluster that
loses workers gets the error of each failed request, but is not slowed: there is no other tenant to protect.
"""

from baton.errors import BatonError, EngineError, WorkerLostError
from baton.story import StoryEntry, StoryLog
from router.breaker import Breaker, BreakerPolicy, Circuit, Outcomes
from router.tenants.tenant import TenantId

TENANT_POLICY = BreakerPolicy(min_failures=5, failure_share=0.5, half_life_s=60.0)
_TIMES_WORSE = 2.0
_SWEEP_AT = 4096
"""With so many tenants those without recent requests are forgotten, and again at twice as many as are left."""


def breaks_workers(error: BatonError) -> bool:
    """Whether a request that ended in `error` may be what its workers failed of."""
    return isinstance(error, WorkerLostError | EngineError)


class TenantBreakers:
    """The circuit of each tenant.

    Pure: time comes in as `now_s`. Every `started` is followed by exactly one `finished`.

    Args:
        policy: When a tenant is slowed, and for how long.
    """

    def __init__(self, policy: BreakerPolicy = TENANT_POLICY) -> None:
        self._policy = policy
        self._everybody = Outcomes(policy.half_life_s)
        self._tenants: dict[TenantId, tuple[Breaker, Outcomes]] = {}
        self._sweep_at = _SWEEP_AT
        self._story = StoryLog("circuit")

    def wait_s(self, tenant_id: TenantId, now_s: float) -> float:
        """How long this tenant has to wait before it may try again; 0 for all but a few."""
        known = self._tenants.get(tenant_id)
        return 0.0 if known is None else known[0].wait_s(now_s)

    def circuit(self, tenant_id: TenantId, now_s: float) -> Circuit:
        """Where its circuit stands."""
        known = self._tenants.get(tenant_id)
        return Circuit.CLOSED if known is None else known[0].circuit(now_s)

    def started(self, tenant_id: TenantId, now_s: float) -> None:
        """A request of this tenant was let in."""
        if (known := self._tenants.get(tenant_id)) is not None:
            known[0].started(now_s)

    def finished(
        self,
        tenant_id: TenantId,
        error: BatonError | None,
        now_s: float,
        *,
        served: bool = True,
    ) -> None:
        """It ended: well, where workers `served` it to its end, or with an error that may say something of it."""
        failed = error is not None and breaks_workers(error)
        if not failed and not served:
            if (known := self._tenants.get(tenant_id)) is not None:
                known[0].abandoned(now_s)
            return
        self._everybody.add(now_s, failed=failed)
        breaker, outcomes = self._tenants.get(tenant_id) or self._meet(tenant_id, now_s)
        outcomes.add(now_s, failed=failed)
        if error is None:
            breaker.succeeded(now_s)
        elif failed and self._stands_out(outcomes):
            breaker.failed(now_s)
        else:
            breaker.abandoned(now_s)

    def story(self, tenant_id: TenantId) -> tuple[StoryEntry, ...]:
        """Failures of this tenant that counted, and changes of its circuit, as far as they are remembered."""
        return self._story.story(tenant_id)

    def check_integrity(self) -> None:
        """Raises `InvariantError` when a circuit is in no possible state."""
        for breaker, _ in self._tenants.values():
            breaker.check_integrity()

    def _meet(self, tenant_id: TenantId, now_s: float) -> tuple[Breaker, Outcomes]:
        """A tenant's record, from its first request on: what went well before the first failure would else count for
        the others.
        """
        if len(self._tenants) >= self._sweep_at:
            self._forget_old(now_s)
        breaker = Breaker(self._policy, name=tenant_id, story=self._story)
        met = (breaker, Outcomes(self._policy.half_life_s))
        self._tenants[tenant_id] = met
        return met

    def _forget_old(self, now_s: float) -> None:
        self._tenants = {
            tenant_id: (breaker, outcomes)
            for tenant_id, (breaker, outcomes) in self._tenants.items()
            if outcomes.is_recent(now_s) or not breaker.is_spotless(now_s)
        }
        self._sweep_at = max(_SWEEP_AT, 2 * len(self._tenants))

    def _stands_out(self, outcomes: Outcomes) -> bool:
        """Whether the others' requests fail clearly less often, of as many as it takes failures to be slowed."""
        others = self._everybody.total - outcomes.total
        if others < self._policy.min_failures - 0.5:  # they have faded a little
            return False
        others_failed = max(0.0, self._everybody.failures - outcomes.failures)
        return outcomes.share > _TIMES_WORSE * others_failed / others
