"""One tenant's part of the waiting line: who of it waits, and what it may take before others have had theirs."""

from collections import OrderedDict
from dataclasses import dataclass, field

from baton.ids import RequestId
from router.admission.applicant import Applicant
from router.tenants.tenant import TenantId

QUANTUM_TOKENS = 128
"""What a tenant of weight 1 is given in a round: less than most requests cost, so that a turn is mostly one request. Rounds in
which nobody could send anything cost no time."""

SAVED_TOKENS = 32 * 1024
"""What is saved for a tenant of weight 1 at most; who was never seen has saved all of it."""


@dataclass(slots=True, eq=False)
class Flow:
    """What `router.admission.fair_line` remembers of one tenant.

    Attributes:
        tenant_id: Whose it is.
        weight: Its share, relative to the others'.
        saved: What it may take without waiting for the round.
        credit: What it may send before its turn is over; below 0 it is in debt.
        left_at: The round in which it last left the line.
        listed: Whether it is on one of the line's lists.
        cost: Of all that it has in line.
        waiting: Its requests in line, in the order in which they came.
    """

    tenant_id: TenantId
    weight: float
    saved: float = 0.0
    credit: float = 0.0
    left_at: float = 0.0
    listed: bool = False
    cost: int = 0
    waiting: OrderedDict[RequestId, Applicant] = field(default_factory=OrderedDict)

    @property
    def quantum(self) -> float:
        """Its part of a round."""
        return QUANTUM_TOKENS * self.weight

    @property
    def most_saved(self) -> float:
        """What is saved for it at most."""
        return SAVED_TOKENS * self.weight

    @property
    def balance(self) -> float:
        """What it may take before it has to wait for the round; below 0 it is in debt."""
        return self.saved + self.credit

    def reweigh(self, weight: float) -> None:
        """It has this weight from now on."""
        self.weight = weight
        self.saved = min(self.saved, self.most_saved)

    def put(self, applicant: Applicant) -> None:
        """Somebody of it comes, behind the others."""
        self.waiting[applicant.request_id] = applicant
        self.cost += applicant.cost

    def first(self) -> Applicant:
        """Who of it came first; there must be somebody."""
        return next(iter(self.waiting.values()))

    def drop(self, applicant: Applicant) -> None:
        """Somebody of it is no longer in line."""
        del self.waiting[applicant.request_id]
        self.cost -= applicant.cost

    def use_savings(self) -> None:
        """A new turn, or as much of one as there is."""
        taken = min(self.saved, self.quantum - self.credit)
        self.credit += taken
        self.saved -= taken

    def save(self, tokens: float) -> None:
        """Puts something by."""
        self.saved = min(self.saved + tokens, self.most_saved)
