"""Who was told to come back, and when: so that those who were refused together do not return together."""

from router.tenants.tenant import TenantId

_SPREAD = 1.5
"""Returns come this much further apart than requests are taken: others of the tenant, told nothing yet, come between them."""

_MAX_DELAY_S = 60.0
_MAX_TENANTS = 4096


class Returns:
    """One tenant's returns are told to come one after the other, a little slower than its requests are taken.

    Pure. Nothing is kept free for them: who does not come back costs nobody anything.
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
        # Bounded: one who asks again and again without waiting must not put off those of its tenant who do wait.
        start_s = max(
            earliest_s,
            min(self._booked_until_s.get(tenant, 0.0), earliest_s + _MAX_DELAY_S),
        )
        if len(self._booked_until_s) >= _MAX_TENANTS:
            self._booked_until_s = {t: s for t, s in self._booked_until_s.items() if s > now_s}
        self._booked_until_s[tenant] = start_s + _SPREAD * turn_s
        return start_s - now_s
