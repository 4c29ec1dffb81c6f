"""The waiting line of one priority: deficit round robin between tenants, first come first served within each.

After M. Shreedhar and G. Varghese, "Efficient fair queueing using deficit round robin" (1995), with three changes.

- A tenant may go into debt for its next request and pays before it sends again, as in FQ-CoDel (RFC 8290). So a request is
  never held back because it is large.
- A debt is remembered until it is paid, even while its tenant has nothing in line. Otherwise one who sends a large request
  at a time, each after the one before, would begin without debt every time and get many times its share.
- What a tenant is not there to take is saved for it, up to a bound, and goes first when it comes; of several, whoever has
  saved most. So whoever stays below its share hardly notices a flood: its requests do not wait for those of the flood, only
  for what is being computed.

All of it ends with the line: once nobody waits, nobody has a debt or savings to show for the past.
"""

from collections import deque
from heapq import heappop, heappush
from itertools import count
from math import ceil

from baton.errors import InvariantError
from router.admission.applicant import Applicant
from router.admission.flow import SAVED_TOKENS, Flow
from router.tenants.tenant import Tenant, TenantId

_MAX_FLOWS = 4096


class FairLine:
    """Everybody of one priority who waits.

    Pure. Over any time in which two tenants always have somebody in line, what they were given, each divided by its
    weight, differs by at most `SAVED_TOKENS`, three quanta, and the largest cost of each (divided by its weight).
    """

    def __init__(self) -> None:
        self._flows: dict[TenantId, Flow] = {}
        self._savers: list[tuple[float, int, Flow]] = []
        """Those who have savings left, as a heap: they go before the round, who has most (for its weight) first."""
        self._entries = count()
        self._ring: deque[Flow] = deque()
        self._rounds = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def cost(self) -> int:
        """Of everybody in line."""
        return sum(flow.cost for flow in self._listed())

    def ahead(self, tenant: Tenant, *, more: int = 0) -> float:
        """Cost of what goes before a request that `tenant` sent now, if nobody else came; or before one that it sends after
        `more` of its own.

        The round robin as a fluid: everybody's balance, by its weight, sinks to the level at which the tenant's own requests
        are through; others are given what lies above it, as far as they have something in line.
        """
        if not self._length:
            return float(more)
        flow = self._flows.get(tenant.tenant_id)
        own = more if flow is None else flow.cost + more
        level = (self._balance(tenant) - own) / tenant.weight
        others = (other for other in self._listed() if other is not flow)
        return own + sum(
            min(other.cost, max(0.0, other.balance - level * other.weight)) for other in others
        )

    def push(self, applicant: Applicant) -> None:
        """To the end of its tenant's part. A tenant whose weight has changed has the new one from now on."""
        if not self._length:
            self._begin_anew()
        self._flow(applicant.tenant).put(applicant)
        self._length += 1

    def head(self) -> Applicant | None:
        """Who is next. Stays the same until somebody is taken, leaves, or a tenant that was away comes."""
        flow = self._turn()
        return None if flow is None else flow.first()

    def pop(self) -> Applicant:
        """Takes the head, of which there must be one."""
        flow = self._turn()
        if flow is None:
            raise InvariantError("nobody is in line")
        applicant = flow.first()
        flow.drop(applicant)
        flow.credit -= applicant.cost
        self._length -= 1
        return applicant

    def remove(self, applicant: Applicant) -> None:
        """Out of the line, from wherever it stands; at no cost."""
        self._flows[applicant.tenant.tenant_id].drop(applicant)
        self._length -= 1

    def charge(self, tenant_id: TenantId, tokens: float) -> None:
        """A tenant was given something elsewhere. It counts here, as long as anybody waits here, and the tenant was seen."""
        flow = self._flows.get(tenant_id) if self._length else None
        if flow is None:
            return
        if flow.listed:
            flow.credit -= tokens
            return
        self._come_back(flow)
        flow.credit -= tokens
        self._queue_up(flow)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless every tenant is where it belongs and the counts are right."""
        listed = self._listed()
        known = {flow for flow in self._flows.values() if flow.listed}
        if len(listed) != len(known) or set(listed) != known:
            raise InvariantError("the tenants on the lists are not those that should be")
        if any(flow.waiting for flow in self._flows.values() if not flow.listed):
            raise InvariantError("a tenant with somebody in line is on no list")
        if sum(len(flow.waiting) for flow in listed) != self._length:
            raise InvariantError("the line's length is miscounted")
        if any(f.cost != sum(one.cost for one in f.waiting.values()) for f in listed):
            raise InvariantError("a tenant's cost in line is miscounted")
        if any(not 0 <= flow.saved <= flow.most_saved for flow in self._flows.values()):
            raise InvariantError("a tenant has saved less than nothing, or too much")

    def _flow(self, tenant: Tenant) -> Flow:
        """The tenant's, on one of the lists."""
        flow = self._flows.get(tenant.tenant_id)
        if flow is None:
            self._forget_some()
            flow = Flow(tenant_id=tenant.tenant_id, weight=tenant.weight)
            flow.saved, flow.left_at = flow.most_saved, self._rounds
            self._flows[tenant.tenant_id] = flow
        flow.reweigh(tenant.weight)
        if not flow.listed:
            self._come_back(flow)
            self._queue_up(flow)
        return flow

    def _come_back(self, flow: Flow) -> None:
        """It is to be listed, and has what was saved for it meanwhile."""
        flow.listed = True
        flow.save((self._rounds - flow.left_at) * flow.quantum)

    def _turn(self) -> Flow | None:
        """Whose turn it is: somebody in line and credit left. Moves on those who cannot go on."""
        turns = 0
        while self._length:
            flow = self._savers[0][-1] if self._savers else self._ring[0]
            if flow.waiting and flow.credit > 0:
                return flow
            if self._savers:
                heappop(self._savers)
            else:
                self._ring.popleft()
                turns += 1
            self._end_turn(flow)
            if turns > len(self._ring):
                self._skip_rounds()
                turns = 0
        return None

    def _end_turn(self, flow: Flow) -> None:
        """Finds a place for a tenant that was first on its list: first its savings, then the round, then the door."""
        if not flow.waiting and flow.credit + flow.saved >= 0:
            flow.save(flow.credit)
            flow.credit, flow.left_at, flow.listed = 0.0, self._rounds, False
            return
        if flow.saved <= 0:
            flow.credit += flow.quantum
            self._rounds += 1 / (len(self._ring) + 1)
        self._queue_up(flow)

    def _queue_up(self, flow: Flow) -> None:
        """To its place among those who have saved something, or to the end of the round."""
        if flow.saved > 0:
            entry = (-flow.saved / flow.weight, next(self._entries), flow)
            flow.use_savings()
            heappush(self._savers, entry)
        else:
            self._ring.append(flow)

    def _listed(self) -> list[Flow]:
        return [*(flow for _, _, flow in self._savers), *self._ring]

    def _balance(self, tenant: Tenant) -> float:
        """What `tenant` could take before it would have to wait for the round; below 0 it is in debt."""
        flow = self._flows.get(tenant.tenant_id)
        if flow is None:
            return SAVED_TOKENS * tenant.weight
        if flow.listed:
            return flow.balance
        return min(flow.saved + (self._rounds - flow.left_at) * flow.quantum, flow.most_saved)

    def _begin_anew(self) -> None:
        """Nobody was kept waiting by what the others took."""
        self._flows.clear()
        self._savers.clear()
        self._ring.clear()

    def _skip_rounds(self) -> None:
        """Gives everybody at once what the rounds would in which nobody can send; the last of them is not skipped."""
        waiting = [flow for flow in self._ring if flow.waiting]
        rounds = min((ceil(-flow.credit / flow.quantum) for flow in waiting), default=0)
        self._rounds += rounds
        for flow in self._ring:
            flow.credit += rounds * flow.quantum

    def _forget_some(self) -> None:
        if len(self._flows) >= _MAX_FLOWS:
            self._flows = {name: flow for name, flow in self._flows.items() if flow.listed}
