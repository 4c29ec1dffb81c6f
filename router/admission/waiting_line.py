"""Everybody who waits, over all priorities, and how much that is for each tenant.

The more urgent go first, but not for ever: for all that they are given, those below them earn a share. So no class starves,
however much the ones above it ask for.
"""

from collections import Counter
from dataclasses import dataclass

from baton.errors import InvariantError
from baton.ids import RequestId
from router.admission.applicant import Applicant
from router.admission.fair_line import FairLine
from router.admission.given import Charge
from router.tenants.tenant import TenantId

RESERVED_SHARE = 0.1
"""What a priority earns for each token that those above it are given, while somebody in it waits."""


@dataclass(slots=True, eq=False)
class _Level:
    """One priority; `earned` is what it may take before its turn."""

    priority: int
    line: FairLine
    earned: float = 0.0


@dataclass(slots=True, eq=False)
class Held:
    """What waits of one tenant, or of all."""

    requests: int = 0
    prompt_tokens: int = 0

    def add(self, applicant: Applicant, sign: int) -> None:
        """Counts one in (1) or out (-1)."""
        self.requests += sign
        self.prompt_tokens += sign * applicant.prompt_tokens

    def exceeded(self, requests: int, prompt_tokens: int, *, by: int) -> bool:
        """Whether one more request with a prompt of `by` tokens is too much beside those that wait."""
        over = self.requests >= requests or self.prompt_tokens + by > prompt_tokens
        return self.requests > 0 and over


class WaitingLine:
    """Pure. While somebody of a priority waits, it is given at least `RESERVED_SHARE` of what those above it are, less one
    request.
    """

    def __init__(self) -> None:
        self.total = Held()
        self._levels: list[_Level] = []
        self._applicants: dict[RequestId, Applicant] = {}
        self._held: dict[TenantId, Held] = {}
        self._per_class: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._applicants)

    def find(self, request_id: RequestId) -> Applicant | None:
        """The one of that name, while it waits."""
        return self._applicants.get(request_id)

    def held(self, tenant: TenantId) -> Held:
        """What waits of one tenant."""
        return self._held.get(tenant, Held())

    def per_class(self) -> dict[str, int]:
        """How many wait, by the name of their class."""
        return dict(self._per_class)

    def push(self, applicant: Applicant) -> None:
        """To the end of its tenant's part of its priority."""
        if applicant.request_id in self._applicants:
            raise InvariantError(f"{applicant.request_id} is in line already")
        self._level(applicant).line.push(applicant)
        self._applicants[applicant.request_id] = applicant
        self._count(applicant, 1)

    def head(self) -> Applicant | None:
        """Who is next."""
        level = self._next_level()
        return None if level is None else level.line.head()

    def pop(self) -> Applicant:
        """Takes the head, of which there must be one."""
        level = self._next_level()
        if level is None:
            raise InvariantError("nobody is in line")
        applicant = level.line.pop()
        level.earned = max(0.0, level.earned - applicant.cost)
        for below in self._levels:
            if below.priority < level.priority and len(below.line):
                below.earned += RESERVED_SHARE * applicant.cost
        self._gone(applicant, level)
        return applicant

    def remove(self, request_id: RequestId) -> Applicant | None:
        """Out of the line; None for one that is not in it."""
        applicant = self._applicants.get(request_id)
        if applicant is not None:
            level = self._level(applicant)
            level.line.remove(applicant)
            self._gone(applicant, level)
        return applicant

    def charge(self, charge: Charge) -> None:
        """A tenant was given something by another router."""
        for level in self._levels:
            if level.priority == charge.priority:
                level.line.charge(charge.tenant_id, charge.tokens)

    def ahead(self, applicant: Applicant, *, more: int = 0) -> float:
        """Cost of what will be let in before somebody who came now, if nobody else came; or before one who came after its
        tenant had put `more` in line.
        """
        cost = 0.0
        for level in self._levels:
            if level.priority > applicant.slo.priority:
                cost += level.line.cost
            elif level.priority == applicant.slo.priority:
                cost += level.line.ahead(applicant.tenant, more=more)
        return cost

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless every count is that of those who wait."""
        for level in self._levels:
            level.line.check_integrity()
            if level.earned and not len(level.line):
                raise InvariantError("a priority in which nobody waits has earned something")
        if sum(len(level.line) for level in self._levels) != len(self._applicants):
            raise InvariantError("somebody is in line and not known, or the other way round")
        tokens = sum(one.prompt_tokens for one in self._applicants.values())
        if (self.total.requests, self.total.prompt_tokens) != (len(self), tokens):
            raise InvariantError("what waits is miscounted")
        if sum(held.requests for held in self._held.values()) != len(self):
            raise InvariantError("what waits per tenant is miscounted")
        if sum(self._per_class.values()) != len(self):
            raise InvariantError("what waits per class is miscounted")

    def _level(self, applicant: Applicant) -> _Level:
        priority = applicant.slo.priority
        for level in self._levels:
            if level.priority == priority:
                return level
        level = _Level(priority=priority, line=FairLine())
        self._levels.append(level)
        self._levels.sort(key=lambda one: -one.priority)
        return level

    def _next_level(self) -> _Level | None:
        """The most urgent that has earned its next request, or else simply the most urgent."""
        busy = [level for level in self._levels if len(level.line)]
        for level in busy[1:]:
            head = level.line.head()
            if head is not None and level.earned >= head.cost:
                return level
        return busy[0] if busy else None

    def _gone(self, applicant: Applicant, level: _Level) -> None:
        del self._applicants[applicant.request_id]
        self._count(applicant, -1)
        if not len(level.line):
            level.earned = 0.0

    def _count(self, applicant: Applicant, sign: int) -> None:
        tenant = applicant.tenant.tenant_id
        held = self._held.setdefault(tenant, Held())
        for tally in (held, self.total):
            tally.add(applicant, sign)
        if not held.requests:
            del self._held[tenant]
        name = applicant.slo.name
        self._per_class[name] += sign
