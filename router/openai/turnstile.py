"""Lets each tenant's requests through as its limits and its record allow, and settles them when they end."""

import secrets
from itertools import count

from baton.clock import Clock
from baton.errors import RateLimitedError
from router.limits.ports import GrantId, Limiter, Refused
from router.metrics import RouterMetrics
from router.openai.limit_headers import refusal
from router.openai.visit import Visit
from router.tenants.breakers import TenantBreakers
from router.tenants.tenant import Caller


class Turnstile:
    """Opens a visit for every request that may be worked on, and closes it.

    Args:
        limiter: Keeps the tenants' counts.
        suspects: Knows whose requests break workers.
        clock: Of the suspects' circuits.
        metrics: Counts what is refused.
        keep_content: Whether every tenant's content is kept for the audit; those that ask for it have theirs kept anyway.
    """

    def __init__(
        self,
        limiter: Limiter,
        suspects: TenantBreakers,
        clock: Clock,
        metrics: RouterMetrics,
        *,
        keep_content: bool = False,
    ) -> None:
        self._limiter = limiter
        self._keep_content = keep_content
        self._suspects = suspects
        self._clock = clock
        self._metrics = metrics
        self._router = secrets.token_hex(8)
        self._numbers = count()

    def open(self, caller: Caller, name: str) -> Visit:
        """The visit of a request of `caller`; nothing is counted yet."""
        grant = GrantId(f"{self._router}-{next(self._numbers)}")
        return Visit(
            caller=caller,
            name=name,
            limiter=self._limiter,
            grant=grant,
            arrived_s=self._clock.now_s(),
            keeps_content=self._keep_content or caller.tenant.audit_content,
        )

    async def enter(self, visit: Visit) -> None:
        """Counts the request. `leave` must follow.

        Raises:
            RateLimitedError: Its tenant has to wait.
        """
        try:
            self._check_record(visit)
            decision = await self._limiter.enter(visit.tenant, visit.grant)
            visit.levels = decision.levels
            if isinstance(decision, Refused):
                raise refusal(decision)
        except RateLimitedError as error:
            self._metrics.rejected(visit.tenant.tenant_class, error.reason)
            raise
        self._suspects.started(visit.tenant.tenant_id, self._clock.now_s())
        visit.entered = True

    async def leave(self, visit: Visit) -> None:
        """Settles what the request used."""
        if not visit.entered:
            return
        self._suspects.finished(visit.tenant.tenant_id, visit.error, self._clock.now_s())
        await self._limiter.leave(visit.tenant, visit.grant, visit.used_tokens)

    def _check_record(self, visit: Visit) -> None:
        wait_s = self._suspects.wait_s(visit.tenant.tenant_id, self._clock.now_s())
        if wait_s > 0:
            raise RateLimitedError(
                "Requests of this tenant keep failing workers; it is slowed for a while.",
                retry_after_s=wait_s,
                reason="tenant_circuit",
            )


def counts(method: str) -> bool:
    """Whether requests of this method are limited: those that make work."""
    return method == "POST"
