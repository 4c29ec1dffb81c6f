"""What each tenant was given, here and by other routers, so that shares hold over all of them together.

Every router tells the others its totals, a few times per second and without waiting for them
(`router.admission.share_exchange`). What a tenant is given elsewhere counts here as if it had been given here: its
debts grow, and others go first. Nothing depends on the exchange: without it every router is fair by itself.
"""

import re
from collections import OrderedDict
from collections.abc import Mapping

from router.admission.queue import Charge
from router.ports import GenerationRequest
from router.tenants.tenant import TenantId

MAX_ACCOUNTS = 4096
_PRIORITY = re.compile(r"-?[0-9]{1,9}")
_MAX_TOKENS = 1e8
"""No router admits more between two messages; a message that says so is not believed."""

Totals = Mapping[str, float]
"""Tokens admitted since a router started, by account: a priority and a tenant."""


class AdmittedTotals:
    """The totals of this router, and what was last heard of others'. Pure."""

    def __init__(self) -> None:
        self._totals: OrderedDict[str, float] = OrderedDict()
        self._heard: dict[str, Totals] = {}

    @property
    def totals(self) -> Totals:
        """This router's."""
        return self._totals

    def add(self, request: GenerationRequest) -> None:
        """A request was admitted here."""
        account = f"{request.slo.priority}/{request.tenant.tenant_id}"
        self._totals[account] = self._totals.get(account, 0.0) + request.cost
        self._totals.move_to_end(account)
        if len(self._totals) > MAX_ACCOUNTS:
            self._totals.popitem(last=False)

    def hear(self, others: Mapping[str, Totals]) -> list[Charge]:
        """What others admitted since they were last heard; of one that was never heard, nothing."""
        charges: dict[str, float] = {}
        for router, totals in others.items():
            before = self._heard.get(router)
            if before is None:
                continue
            for account, total in totals.items():
                # An account that its router forgot meanwhile, and began anew, has a lower total.
                more = total - before.get(account, 0.0)
                if 0 < more <= _MAX_TOKENS:
                    charges[account] = charges.get(account, 0.0) + more
        self._heard = dict(others)
        return [
            charge for account, tokens in charges.items() if (charge := _charge(account, tokens))
        ]


def _charge(account: str, tokens: float) -> Charge | None:
    """None for what is no account: Redis is a hint, and may hold anything."""
    priority, slash, tenant_id = account.partition("/")
    if not slash or not _PRIORITY.fullmatch(priority):
        return None
    return Charge(priority=int(priority), tenant_id=TenantId(tenant_id), tokens=tokens)
