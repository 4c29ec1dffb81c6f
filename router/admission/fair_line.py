"""The waiting line of one priority: deficit round robin between tenants, first come first served within each.

After M. Shreedhar and G. Varghese, "Efficient fair queueing using deficit round robin" (1995), with two changes.

- A tenant may go into debt for its next request and pays before it sends again, as in FQ-CoDel (RFC 8290). A request is
  therefore never held back because it is large, and whoever has been away is let in before those that are always there.
- A debt is remembered until it is paid, even while its tenant has nothing in line. Otherwise one who sends a large request
  at a time, each after the one before, would begin without debt every time and get many times its share.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from math import ceil

from baton.errors import InvariantError
from baton.ids import RequestId
from router.admission.applicant import Applicant
from router.tenants.tenant import TenantId

QUANTUM_TOKENS = 128
"""What a tenant of weight 1 is given in a round: less than most requests cost, so that a turn is mostly one request. Rounds in
which nobody could send anything cost no time."""


@dataclass(slots=True, eq=False)
class _Flow:
    """One tenant's part of the line. `credit` is what it may still send in this round; below 0 it is in debt."""

    tenant_id: TenantId
    weight: float
    credit: float
    cost: int = 0
    waiting: OrderedDict[RequestId, Applicant] = field(default_factory=OrderedDict)

    @property
    def quantum(self) -> float:
        return QUANTUM_TOKENS * self.weight


class FairLine:
    """Everybody of one priority who waits.

    Pure. Over any time in which two tenants always have somebody in line, what they were given, each divided by its
    weight, differs by at most three quanta and the largest cost of each (divided by its weight).
    """

    def __init__(self) -> None:
        self._flows: dict[TenantId, _Flow] = {}
        self._fresh: deque[_Flow] = deque()
        self._ring: deque[_Flow] = deque()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def backlog(self) -> dict[TenantId, tuple[float, int]]:
        """Weight of each tenant with somebody in line, and the cost of all it has there."""
        return {
            flow.tenant_id: (flow.weight, flow.cost)
            for flow in self._flows.values()
            if flow.waiting
        }

    def push(self, applicant: Applicant) -> None:
        """To the end of its tenant's part. A tenant whose weight has changed has the new one from now on."""
        tenant = applicant.tenant
        flow = self._flows.get(tenant.tenant_id)
        if flow is None:
            flow = _Flow(tenant_id=tenant.tenant_id, weight=tenant.weight, credit=0.0)
            flow.credit = flow.quantum
            self._flows[tenant.tenant_id] = flow
            self._fresh.append(flow)
        flow.weight = tenant.weight
        flow.credit = min(flow.credit, flow.quantum)
        flow.waiting[applicant.request_id] = applicant
        flow.cost += applicant.cost
        self._length += 1

    def head(self) -> Applicant | None:
        """Who is next. Stays the same until somebody is taken, leaves, or a tenant that was away comes."""
        flow = self._turn()
        return None if flow is None else next(iter(flow.waiting.values()))

    def pop(self) -> Applicant:
        """Takes the head, of which there must be one."""
        flow = self._turn()
        if flow is None:
            raise InvariantError("nobody is in line")
        _, applicant = flow.waiting.popitem(last=False)
        flow.credit -= applicant.cost
        flow.cost -= applicant.cost
        self._length -= 1
        return applicant

    def remove(self, applicant: Applicant) -> None:
        """Out of the line, from wherever it stands; at no cost."""
        flow = self._flows[applicant.tenant.tenant_id]
        del flow.waiting[applicant.request_id]
        flow.cost -= applicant.cost
        self._length -= 1

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless every tenant is on exactly one list and the count is right."""
        listed = [*self._fresh, *self._ring]
        if len(listed) != len(self._flows) or set(listed) != set(self._flows.values()):
            raise InvariantError("the tenants on the lists are not those that are known")
        if sum(len(flow.waiting) for flow in listed) != self._length:
            raise InvariantError("the line's length is miscounted")
        if any(f.cost != sum(one.cost for one in f.waiting.values()) for f in listed):
            raise InvariantError("a tenant's cost in line is miscounted")
        if any(flow.credit > flow.quantum * (1 + 1e-9) for flow in self._ring if flow.waiting):
            raise InvariantError("a tenant saved up more than a round's worth")

    def _turn(self) -> _Flow | None:
        """Whose turn it is: somebody in line and credit left. Moves on those who cannot go on."""
        if not self._length:
            # Nobody was kept waiting by what the others took: all debts are off.
            self._flows.clear()
            self._fresh.clear()
            self._ring.clear()
            return None
        passed = 0
        while True:
            flows = self._fresh or self._ring
            flow = flows[0]
            if flow.waiting and flow.credit > 0:
                return flow
            flows.popleft()
            if flow.waiting or flow.credit < 0 or flows is self._fresh:
                self._ring.append(flow)
                passed += 1
            else:
                del self._flows[flow.tenant_id]
            if flow.credit <= 0:
                flow.credit += flow.quantum
            if passed > len(self._flows):
                self._skip_rounds()
                passed = 0

    def _skip_rounds(self) -> None:
        """Gives everybody at once what the rounds would in which nobody can send; the last of them is not skipped."""
        rounds = min(ceil(-flow.credit / flow.quantum) for flow in self._ring if flow.waiting)
        for flow in self._ring:
            if rounds > 0 and flow.credit < 0:
                flow.credit = min(flow.credit + rounds * flow.quantum, flow.quantum)
