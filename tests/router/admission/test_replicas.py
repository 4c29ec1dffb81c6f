"""What two routers give over one prefill worker, in simulated time: one prompt after the other, whoever sent it."""

import heapq
from collections import Counter, deque
from itertools import count
from random import Random

import pytest

from baton.generation import WorkerLoad
from baton.ids import LegId, Role
from router.admission.capacity import MeasuredSpeed, WorkerCapacity
from router.admission.controller import AdmissionController
from router.routing.index import PrefixIndex
from router.routing.view import ClusterView
from router.slo import Slo
from router.tenants.tenant import TenantId
from tests.router.admission.admitting import queued
from tests.router.admission.test_controller import limits
from tests.router.known_workers import hello

PROMPT_S = 0.16
TOKENS = 2048
PERIODS_S = {"tick": 0.05, "report": 0.5, "exchange": 0.2}
INTERACTIVE = Slo(name="interactive", ttft_s=2.0, priority=2)


class Router:
    """A controller, and what its router believes of the worker."""

    def __init__(self) -> None:
        view = ClusterView(PrefixIndex(), silence_timeout_s=1e9)
        self.worker = view.join(hello("p0", Role.PREFILL), "p0", 0.0)
        view.join(hello("d0", Role.DECODE, max_num_seqs=64), "d0", 0.0)
        capacity = WorkerCapacity(view, MeasuredSpeed(), prefill_window_tokens=2 * TOKENS)
        self.controller = AdmissionController(capacity=capacity, limits=limits())
        self.sent: dict[LegId, TenantId] = {}
        self._leg_ids = count(1)

    def come(self, name: str, now_s: float) -> None:
        tenant = name.partition(" ")[0]
        one = queued(name, tenant=tenant, prompt_tokens=TOKENS, slo=INTERACTIVE, arrived_s=now_s)
        self.controller.offer(one, now_s)

    def send(self, now_s: float) -> LegId | None:
        """The next prompt goes to the worker, if it is its time."""
        taken = self.controller.next(now_s)
        if taken is None:
            return None
        leg_id = LegId(next(self._leg_ids))
        self.sent[leg_id] = taken.tenant.tenant_id
        worker = self.worker
        worker.progress_s = now_s
        worker.legs += 1
        worker.prefills += 1
        worker.prefill_tokens += TOKENS
        worker.forecast.queued(leg_id, worker.forecast.prefill_s(TOKENS, 0), now_s)
        return leg_id

    def computed(self, leg_id: LegId, now_s: float) -> TenantId:
        worker = self.worker
        worker.progress_s = now_s
        worker.legs -= 1
        worker.prefills -= 1
        worker.prefill_tokens -= TOKENS
        worker.forecast.left(leg_id, now_s)
        worker.forecast.prefilled(TOKENS, 0, PROMPT_S)
        return self.sent.pop(leg_id)


class Cluster:
    """Two routers that hear of each other, and the prompts that they have sent to the worker."""

    def __init__(self, seed: int) -> None:
        self.routers = [Router(), Router()]
        self.computed: Counter[TenantId] = Counter()
        self._rng = Random(seed)
        self._sent: deque[tuple[int, LegId]] = deque()
        self._events: list[tuple[float, int, str, int, str]] = []
        self._numbers = count()

    def load(self, tenant: str, rate: float, routers: list[int], seconds: float) -> None:
        """Arrivals at `routers` in turns."""
        at_s = 0.0
        for n in range(round(rate * seconds)):
            at_s += self._rng.expovariate(rate)
            self._at(at_s, "come", routers[n % len(routers)], f"{tenant} {n}")

    def run(self, seconds: float) -> None:
        for number in range(len(self.routers)):
            for what, period_s in PERIODS_S.items():
                phase = self._rng.random()
                for n in range(round(seconds / period_s)):
                    self._at((n + phase) * period_s, what, number)
        while self._events and self._events[0][0] < seconds:
            now_s, _, what, number, name = heapq.heappop(self._events)
            self._happen(what, number, name, now_s)

    def _happen(self, what: str, number: int, name: str, now_s: float) -> None:
        router = self.routers[number]
        if what == "come":
            router.come(name, now_s)
        elif what == "report":
            pending = TOKENS * len(self._sent)
            router.worker.report(WorkerLoad(prefill_tokens_pending=pending), now_s)
        elif what == "exchange":
            router.controller.hear({"other": dict(self.routers[1 - number].controller.admitted)})
        elif what == "computed":
            _, leg_id = self._sent.popleft()
            self.computed[router.computed(leg_id, now_s)] += 1
            self._compute(now_s)
        while (leg := router.send(now_s)) is not None:
            self._sent.append((number, leg))
            if len(self._sent) == 1:
                self._compute(now_s)

    def _compute(self, now_s: float) -> None:
        if self._sent:
            self._at(now_s + PROMPT_S, "computed", self._sent[0][0])

    def _at(self, when_s: float, what: str, number: int, name: str = "") -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), what, number, name))


@pytest.mark.parametrize("seed", range(4))
def test_a_tenant_of_one_router_gets_its_share_beside_a_flood_of_both(seed):
    cluster = Cluster(seed)
    for tenant, routers in (("quiet", [0]), ("flood", [0, 1])):
        cluster.load(tenant, 2 / PROMPT_S, routers, 30.0)
    cluster.run(30.0)
    assert cluster.computed.total() >= 0.95 * 30.0 / PROMPT_S
    assert 2 * cluster.computed[TenantId("quiet")] / cluster.computed.total() >= 0.9
