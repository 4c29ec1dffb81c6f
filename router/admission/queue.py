"""The admission queue: priorities, deficit round robin between the tenants of one priority,
first come first served within each.

`AdmissionQueue` holds one `FairQueue` per priority, and a `FairQueue` one `TenantQueue` per tenant, in which the
tenant's requests of that priority stand as they came. Between priorities: the
more urgent go first, but not for ever. For all that they are given, those below them earn a share, so that no class
starves however much the ones above it ask for.

Between tenants, after M. Shreedhar and G. Varghese, "Efficient fair queueing using deficit round robin" (1995), with
three changes:

- A tenant may go into debt for its next request and pays before it sends again, as in FQ-CoDel (RFC 8290). So a request
  is never held back because it is large.
- A debt is remembered until it is paid, even while its tenant has nothing queued. Otherwise a tenant that sends one
  large request at a time, each after the one before, would begin without debt every time and get many times its share.
- What a tenant does not use while others wait is saved for it, up to a bound, and is spent before the round; of several
  tenants with savings, the one with most goes first. So a tenant that stays below its share hardly notices a flood: its
  requests do not wait for those of the flood, only for what is being computed.

Debts and savings end with the queue: once nothing waits, all tenants are equal again.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import ceil

from baton.errors import InvariantError
from baton.ids import RequestId
from router.ports import GenerationRequest
from router.slo import Slo
from router.tenants.tenant import Tenant, TenantId

QUANTUM_TOKENS = 128
"""What a tenant of weight 1 is given in a round: less than most requests cost, so that a turn is mostly one request.
Rounds in which no tenant could send anything cost no time.
"""

SAVED_TOKENS = 32 * 1024
"""What is saved for a tenant of weight 1 at most; a tenant that was never seen has saved all of it."""

RESERVED_SHARE = 0.1
"""What a priority earns for each token that those above it are given, while a request of it waits."""

_MAX_TENANTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """A tenant was given so many tokens by another router, at this priority."""

    priority: int
    tenant_id: TenantId
    tokens: float


@dataclass(slots=True, eq=False)
class TenantQueue:
    """One tenant's requests of one priority, and what it may take before others have had theirs.

    Attributes:
        tenant_id: Whose it is.
        weight: Its share, relative to the others'.
        saved: What it may take without waiting for the round.
        credit: What it may send before its turn is over; below 0 it is in debt.
        left_at: The round in which it last left the schedule.
        listed: Whether it is on one of the schedule's lists.
        cost: Of all that it has queued.
        waiting: Its queued requests, in the order in which they came.
    """

    tenant_id: TenantId
    weight: float
    saved: float = 0.0
    credit: float = 0.0
    left_at: float = 0.0
    listed: bool = False
    cost: int = 0
    waiting: OrderedDict[RequestId, GenerationRequest] = field(default_factory=OrderedDict)

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

    def put(self, request: GenerationRequest) -> None:
        """Adds a request of it behind the others."""
        self.waiting[request.request_id] = request
        self.cost += request.cost

    def first(self) -> GenerationRequest:
        """The request of it that came first; there must be one."""
        return next(iter(self.waiting.values()))

    def drop(self, request: GenerationRequest) -> None:
        """A request of it is no longer queued."""
        del self.waiting[request.request_id]
        self.cost -= request.cost

    def use_savings(self) -> None:
        """Moves one quantum from its savings to its credit, or what is left of them."""
        taken = min(self.saved, self.quantum - self.credit)
        self.credit += taken
        self.saved -= taken

    def save(self, tokens: float) -> None:
        """Adds to its savings, up to their bound."""
        self.saved = min(self.saved + tokens, self.most_saved)


class FairQueue:
    """All queued requests of one priority.

    Pure. Over any time in which two tenants always have requests queued, what they were given, each divided by its
    weight, differs by at most `SAVED_TOKENS`, three quanta, and the largest cost of each (divided by its weight).
    """

    def __init__(self) -> None:
        self._tenants: dict[TenantId, TenantQueue] = {}
        self._savers: list[tuple[float, int, TenantQueue]] = []
        """Tenants that have savings left, as a heap: before the round, the one with most (for its weight) first."""
        self._entries = count()
        self._ring: deque[TenantQueue] = deque()
        self._rounds = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def cost(self) -> int:
        """Of all that is queued."""
        return sum(tenant.cost for tenant in self._listed())

    def ahead(self, tenant: Tenant, *, more: int = 0) -> float:
        """Cost of what goes before a request that `tenant` sent now, if no other came; or before one that it sends
        after `more` of its own.

        The round robin as a fluid: each tenant's balance, by its weight, sinks to the level at which the tenant's own
        requests are through; others are given what lies above it, as far as they have requests queued.
        """
        if not self._length:
            return float(more)
        mine = self._tenants.get(tenant.tenant_id)
        own = more if mine is None else mine.cost + more
        level = (self._balance(tenant) - own) / tenant.weight
        others = (other for other in self._listed() if other is not mine)
        return own + sum(
            min(other.cost, max(0.0, other.balance - level * other.weight)) for other in others
        )

    def push(self, request: GenerationRequest) -> None:
        """To the end of its tenant's queue. A tenant whose weight has changed has the new one from now on."""
        if not self._length:
            self._forget_balances()
        self._queue_of(request.tenant).put(request)
        self._length += 1

    def head(self) -> GenerationRequest | None:
        """The next request. Stays the same until one is taken, one leaves, or a tenant comes that had none queued."""
        tenant = self._turn()
        return None if tenant is None else tenant.first()

    def pop(self) -> GenerationRequest:
        """Takes the head, of which there must be one."""
        tenant = self._turn()
        if tenant is None:
            raise InvariantError("no request is queued")
        request = tenant.first()
        tenant.drop(request)
        tenant.credit -= request.cost
        self._length -= 1
        return request

    def remove(self, request: GenerationRequest) -> None:
        """Takes a request out, wherever it stands; at no cost to its tenant."""
        self._tenants[request.tenant.tenant_id].drop(request)
        self._length -= 1

    def charge(self, tenant_id: TenantId, tokens: float) -> None:
        """A tenant was given something elsewhere. It counts here while requests wait here, if the tenant was seen."""
        tenant = self._tenants.get(tenant_id) if self._length else None
        if tenant is None:
            return
        if tenant.listed:
            tenant.credit -= tokens
            return
        self._return_to_schedule(tenant)
        tenant.credit -= tokens
        self._schedule(tenant)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless every tenant is where it belongs and the counts are right."""
        listed = self._listed()
        known = {tenant for tenant in self._tenants.values() if tenant.listed}
        if len(listed) != len(known) or set(listed) != known:
            raise InvariantError("the tenants on the lists are not those that should be")
        if any(tenant.waiting for tenant in self._tenants.values() if not tenant.listed):
            raise InvariantError("a tenant with queued requests is on no list")
        if sum(len(tenant.waiting) for tenant in listed) != self._length:
            raise InvariantError("the queue's length is miscounted")
        if any(t.cost != sum(one.cost for one in t.waiting.values()) for t in listed):
            raise InvariantError("the cost of a tenant's queued requests is miscounted")
        if any(not 0 <= tenant.saved <= tenant.most_saved for tenant in self._tenants.values()):
            raise InvariantError("a tenant has saved less than nothing, or too much")

    def _queue_of(self, tenant: Tenant) -> TenantQueue:
        """The tenant's, on one of the lists."""
        queue = self._tenants.get(tenant.tenant_id)
        if queue is None:
            self._forget_some()
            queue = TenantQueue(tenant_id=tenant.tenant_id, weight=tenant.weight)
            queue.saved, queue.left_at = queue.most_saved, self._rounds
            self._tenants[tenant.tenant_id] = queue
        queue.reweigh(tenant.weight)
        if not queue.listed:
            self._return_to_schedule(queue)
            self._schedule(queue)
        return queue

    def _return_to_schedule(self, tenant: TenantQueue) -> None:
        """It is to be listed, and has what was saved for it meanwhile."""
        tenant.listed = True
        tenant.save((self._rounds - tenant.left_at) * tenant.quantum)

    def _turn(self) -> TenantQueue | None:
        """The tenant whose turn it is: with requests queued and credit left.
        Ends the turns of those that cannot send.
        """
        turns = 0
        while self._length:
            tenant = self._savers[0][-1] if self._savers else self._ring[0]
            if tenant.waiting and tenant.credit > 0:
                return tenant
            if self._savers:
                heappop(self._savers)
            else:
                self._ring.popleft()
                turns += 1
            self._end_turn(tenant)
            if turns > len(self._ring):
                self._skip_rounds()
                turns = 0
        return None

    def _end_turn(self, tenant: TenantQueue) -> None:
        """Places a tenant that was first on its list: by its savings, else in the round,
        or off the lists if it has none queued.
        """
        if not tenant.waiting and tenant.credit + tenant.saved >= 0:
            tenant.save(tenant.credit)
            tenant.credit, tenant.left_at, tenant.listed = 0.0, self._rounds, False
            return
        if tenant.saved <= 0:
            tenant.credit += tenant.quantum
            self._rounds += 1 / (len(self._ring) + 1)
        self._schedule(tenant)

    def _schedule(self, tenant: TenantQueue) -> None:
        """To its place among those with savings, or to the end of the round."""
        if tenant.saved > 0:
            entry = (-tenant.saved / tenant.weight, next(self._entries), tenant)
            tenant.use_savings()
            heappush(self._savers, entry)
        else:
            self._ring.append(tenant)

    def _listed(self) -> list[TenantQueue]:
        return [*(tenant for _, _, tenant in self._savers), *self._ring]

    def _balance(self, tenant: Tenant) -> float:
        """What `tenant` could take before it would have to wait for the round; below 0 it is in debt."""
        queue = self._tenants.get(tenant.tenant_id)
        if queue is None:
            return SAVED_TOKENS * tenant.weight
        if queue.listed:
            return queue.balance
        return min(queue.saved + (self._rounds - queue.left_at) * queue.quantum, queue.most_saved)

    def _forget_balances(self) -> None:
        """The queue was empty: what a tenant took made no other wait."""
        self._tenants.clear()
        self._savers.clear()
        self._ring.clear()

    def _skip_rounds(self) -> None:
        """Gives each tenant at once what the rounds would in which none can send; the last of them is not skipped."""
        waiting = [tenant for tenant in self._ring if tenant.waiting]
        rounds = min((ceil(-tenant.credit / tenant.quantum) for tenant in waiting), default=0)
        self._rounds += rounds
        for tenant in self._ring:
            tenant.credit += rounds * tenant.quantum

    def _forget_some(self) -> None:
        if len(self._tenants) >= _MAX_TENANTS:
            self._tenants = {name: queue for name, queue in self._tenants.items() if queue.listed}


@dataclass(slots=True, eq=False)
class _Level:
    """One priority; `earned` is what it may take before its turn."""

    priority: int
    queue: FairQueue
    earned: float = 0.0


@dataclass(slots=True, eq=False)
class QueueCount:
    """What is queued of one tenant, or of all."""

    requests: int = 0
    prompt_tokens: int = 0

    def add(self, request: GenerationRequest, sign: int) -> None:
        """Counts one in (1) or out (-1)."""
        self.requests += sign
        self.prompt_tokens += sign * request.num_prompt_tokens

    def exceeded(self, requests: int, prompt_tokens: int, *, by: int) -> bool:
        """Whether one more request with a prompt of `by` tokens is too much beside those that wait."""
        over = self.requests >= requests or self.prompt_tokens + by > prompt_tokens
        return self.requests > 0 and over


class AdmissionQueue:
    """All queued requests, over all priorities.

    Pure. While a request of a priority waits, the priority is given at least `RESERVED_SHARE` of what those above it
    are, less one request.
    """

    def __init__(self) -> None:
        self.total = QueueCount()
        self._levels: list[_Level] = []
        self._requests: dict[RequestId, GenerationRequest] = {}
        self._counts: dict[TenantId, QueueCount] = {}
        self._per_class: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[GenerationRequest]:
        """All that wait, as they came."""
        return iter(self._requests.values())

    def find(self, request_id: RequestId) -> GenerationRequest | None:
        """The request of that name, while it waits."""
        return self._requests.get(request_id)

    def queued_of(self, tenant: TenantId) -> QueueCount:
        """What is queued of one tenant."""
        return self._counts.get(tenant, QueueCount())

    def per_class(self) -> dict[str, int]:
        """How many requests wait, by the name of their class."""
        return dict(self._per_class)

    def push(self, request: GenerationRequest) -> None:
        """To the end of its tenant's queue of its priority."""
        if request.request_id in self._requests:
            raise InvariantError(f"{request.request_id} is queued already")
        self._level(request).queue.push(request)
        self._requests[request.request_id] = request
        self._count(request, 1)

    def head(self) -> GenerationRequest | None:
        """The next request."""
        level = self._next_level()
        return None if level is None else level.queue.head()

    def pop(self) -> GenerationRequest:
        """Takes the head, of which there must be one."""
        level = self._next_level()
        if level is None:
            raise InvariantError("no request is queued")
        request = level.queue.pop()
        level.earned = max(0.0, level.earned - request.cost)
        for below in self._levels:
            if below.priority < level.priority and len(below.queue):
                below.earned += RESERVED_SHARE * request.cost
        self._gone(request, level)
        return request

    def remove(self, request_id: RequestId) -> GenerationRequest | None:
        """Takes a request out; None for one that is not queued."""
        request = self._requests.get(request_id)
        if request is not None:
            level = self._level(request)
            level.queue.remove(request)
            self._gone(request, level)
        return request

    def charge(self, charge: Charge) -> None:
        """A tenant was given something by another router."""
        for level in self._levels:
            if level.priority == charge.priority:
                level.queue.charge(charge.tenant_id, charge.tokens)

    def ahead(self, tenant: Tenant, slo: Slo, *, more: int = 0) -> float:
        """Cost of what will be admitted before a request that came now, if no other came; or before one that came after
        its tenant had queued `more`.
        """
        cost = 0.0
        for level in self._levels:
            if level.priority > slo.priority:
                cost += level.queue.cost
            elif level.priority == slo.priority:
                cost += level.queue.ahead(tenant, more=more)
        return cost

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless every count is that of the requests that wait."""
        for level in self._levels:
            level.queue.check_integrity()
            if level.earned and not len(level.queue):
                raise InvariantError("a priority of which no request waits has earned something")
        if sum(len(level.queue) for level in self._levels) != len(self._requests):
            raise InvariantError("a request is queued and not known, or the other way round")
        tokens = sum(one.num_prompt_tokens for one in self._requests.values())
        if (self.total.requests, self.total.prompt_tokens) != (len(self), tokens):
            raise InvariantError("what waits is miscounted")
        if sum(held.requests for held in self._counts.values()) != len(self):
            raise InvariantError("what waits per tenant is miscounted")
        if sum(self._per_class.values()) != len(self):
            raise InvariantError("what waits per class is miscounted")

    def _level(self, request: GenerationRequest) -> _Level:
        priority = request.slo.priority
        for level in self._levels:
            if level.priority == priority:
                return level
        level = _Level(priority=priority, queue=FairQueue())
        self._levels.append(level)
        self._levels.sort(key=lambda one: -one.priority)
        return level

    def _next_level(self) -> _Level | None:
        """The most urgent that has earned its next request, or else simply the most urgent."""
        busy = [level for level in self._levels if len(level.queue)]
        for level in busy[1:]:
            head = level.queue.head()
            if head is not None and level.earned >= head.cost:
                return level
        return busy[0] if busy else None

    def _gone(self, request: GenerationRequest, level: _Level) -> None:
        del self._requests[request.request_id]
        self._count(request, -1)
        if not len(level.queue):
            level.earned = 0.0

    def _count(self, request: GenerationRequest, sign: int) -> None:
        tenant = request.tenant.tenant_id
        of_tenant = self._counts.setdefault(tenant, QueueCount())
        for counted in (of_tenant, self.total):
            counted.add(request, sign)
        if not of_tenant.requests:
            del self._counts[tenant]
        self._per_class[request.slo.name] += sign
