"""The controller: capacity, refusals that tell the truth, deadlines."""

import copy
import heapq
import weakref
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import RequestId
from router.admission.controller import AdmissionController, QueueLimits, Refusal, RefusalReason
from router.ports import GenerationRequest
from router.slo import STANDARD, Slo
from tests.router.admission.admitting import FakeCapacity, queued

QUICK = Slo(name="interactive", ttft_s=2.0, priority=2)


def limits(**changes: int) -> QueueLimits:
    bounds = {
        "requests": 1000,
        "tenant_requests": 500,
        "prompt_tokens": 10**6,
        "tenant_prompt_tokens": 10**6,
        "worker_wait_s": 15,
    }
    return QueueLimits(**(bounds | changes))


def test_whoever_comes_while_there_is_room_is_let_in_at_once():
    controller = AdmissionController(capacity=FakeCapacity(places=1), limits=limits())
    assert controller.offer(queued("r"), 0.0) is None
    taken = controller.next(0.0)
    assert taken is not None
    assert taken.request_id == "r"
    assert controller.waiting == 0


def test_nobody_is_let_in_without_room():
    capacity = FakeCapacity(places=0)
    controller = AdmissionController(capacity=capacity, limits=limits())
    controller.offer(queued("r"), 0.0)
    assert controller.next(0.0) is None
    capacity.places = 1
    assert controller.next(1.0) is not None


def test_whoever_leaves_the_line_is_not_let_in():
    capacity = FakeCapacity()
    controller = AdmissionController(capacity=capacity, limits=limits())
    controller.offer(queued("r"), 0.0)
    assert controller.leave(queued("r").request_id)
    assert not controller.leave(queued("r").request_id)
    capacity.places = 1
    assert controller.next(0.0) is None


def test_without_workers_requests_wait_within_bounds_and_are_given_up_in_time():
    capacity = FakeCapacity(places=5, workers=False)
    controller = AdmissionController(capacity=capacity, limits=limits(requests=2, worker_wait_s=10))
    assert controller.offer(queued("a"), 0.0) is None
    assert controller.offer(queued("b", arrived_s=4.0), 4.0) is None
    refused = controller.offer(queued("c", arrived_s=5.0), 5.0)
    assert refused is not None
    assert refused.reason is RefusalReason.QUEUE_FULL
    assert controller.next(5.0) is None
    assert [ids(controller.abandon(now_s)) for now_s in (0.0, 9.9, 10.0)] == [[], [], ["a"]]
    capacity.workers = True
    assert controller.abandon(20.0) == []
    taken = controller.next(20.0)
    assert taken is not None
    assert taken.request_id == "b"


def test_a_wait_for_room_is_none_for_a_worker():
    capacity = FakeCapacity(places=0)
    controller = AdmissionController(capacity=capacity, limits=limits(worker_wait_s=10))
    assert controller.offer(queued("r", deadline_s=1000.0), 0.0) is None
    assert controller.abandon(100.0) == []
    capacity.workers = False
    given_up = [ids(controller.abandon(now_s)) for now_s in (100.0, 109.9, 110.0)]
    assert given_up == [[], [], ["r"]]


def test_time_without_workers_says_nothing_of_how_long_the_line_takes():
    capacity = FakeCapacity(places=1)
    controller = AdmissionController(capacity=capacity, limits=limits())
    for number in range(100):
        controller.offer(queued(f"r{number}", prompt_tokens=10_000, deadline_s=1000.0), 0.0)
    for now_s in (0.0, 1.0, 2.0):
        assert controller.next(now_s) is not None
    tenant = queued("another").tenant
    before_s = controller.wait_s(tenant, STANDARD)
    capacity.workers = False
    for now_s in range(3, 60):
        assert controller.next(float(now_s)) is None
    assert 0 < controller.wait_s(tenant, STANDARD) < 2 * before_s


def ids(requests: Iterable[GenerationRequest]) -> list[str]:
    return [request.request_id for request in requests]


def test_a_deadline_that_cannot_be_met_any_more_ends_the_wait():
    controller = AdmissionController(capacity=FakeCapacity(first_s=1.0), limits=limits())
    controller.offer(queued("soon", deadline_s=5.0), 0.0)
    controller.offer(queued("late", deadline_s=50.0), 0.0)
    assert controller.expire(3.9) == []
    assert [one.request_id for one in controller.expire(4.0)] == ["soon"]
    assert controller.waiting == 1


class WatchedId(str):
    """A request's name that tells whether anything still holds it: weak references to plain text cannot be made."""


@pytest.mark.parametrize("end", ["next", "leave"])
def test_requests_that_have_left_the_queue_are_held_no_longer_though_their_deadlines_lie_ahead(end):
    controller = AdmissionController(capacity=FakeCapacity(places=1), limits=limits())
    held: weakref.WeakSet[WatchedId] = weakref.WeakSet()
    for number in range(1000):
        name = WatchedId(f"r{number}")
        held.add(name)
        controller.offer(queued(name), 0.0)
        assert controller.next(0.0) if end == "next" else controller.leave(RequestId(name))
        del name
        controller.check_integrity()
    assert len(held) < 100


def test_a_full_line_is_known_before_the_prompt_is_and_tells_the_same_time_to_come_back():
    capacity = FakeCapacity(places=0)
    controller = AdmissionController(capacity=capacity, limits=limits(requests=2))
    other = queued("x")
    unknown = (other.tenant, other.slo, other.expected_tokens)
    assert controller.check_capacity(*unknown, 0.0) is None
    controller.offer(queued("one"), 0.0)
    capacity.places = 1
    controller.next(0.0)
    controller.offer(queued("two"), 0.0)
    assert controller.check_capacity(*unknown, 0.0) is None
    controller.offer(queued("three"), 0.0)
    capacity.places = 2
    controller.next(10.0)
    controller.offer(queued("four"), 10.0)
    twin = copy.deepcopy(controller)
    refused = twin.check_capacity(*unknown, 10.0)
    assert refused is not None
    assert refused == controller.offer(other, 10.0)
    stranger = queued("y", tenant="b").tenant
    assert controller.check_capacity(stranger, STANDARD, 10, 10.0) is not None
    controller.check_integrity()


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        ({"requests": 2}, RefusalReason.QUEUE_FULL),
        ({"prompt_tokens": 200}, RefusalReason.QUEUE_FULL),
        ({"tenant_requests": 2}, RefusalReason.TENANT_QUEUE_FULL),
        ({"tenant_prompt_tokens": 200}, RefusalReason.TENANT_QUEUE_FULL),
    ],
)
def test_the_line_is_bounded_by_count_and_by_tokens(bounds, reason):
    controller = AdmissionController(capacity=FakeCapacity(), limits=limits(**bounds))
    assert controller.offer(queued("r0"), 0.0) is None
    assert controller.offer(queued("r1"), 0.0) is None
    refusal = controller.offer(queued("r2"), 0.0)
    assert refusal is not None
    assert refusal.reason is reason
    controller.check_integrity()


def test_one_tenants_full_line_is_not_anothers():
    controller = AdmissionController(capacity=FakeCapacity(), limits=limits(tenant_requests=1))
    assert controller.offer(queued("b0", tenant="b"), 0.0) is None
    assert controller.offer(queued("b1", tenant="b"), 0.0) is not None
    assert controller.offer(queued("a0", tenant="a"), 0.0) is None


class Shop:
    """A simulated cluster: each place serves one request for about a second, 100 tokens each."""

    def __init__(self, places: int, **bounds: int) -> None:
        self.capacity = FakeCapacity(places=places)
        self.controller = AdmissionController(capacity=self.capacity, limits=limits(**bounds))
        self.now_s = 0.0
        self.begun: dict[str, float] = {}
        self._ends: list[tuple[float, RequestId]] = []

    def offer(self, name: str, **what) -> Refusal | None:
        one = queued(name, arrived_s=self.now_s, **what)
        refusal = self.controller.offer(one, self.now_s)
        self._let_in()
        return refusal

    def run(self, until_s: float) -> None:
        while self._ends and self._ends[0][0] <= until_s:
            self.now_s, name = heapq.heappop(self._ends)
            self.capacity.taken.remove(name)
            self._let_in()
        self.now_s = until_s
        self._let_in()
        self.controller.check_integrity()

    def _let_in(self) -> None:
        while (taken := self.controller.next(self.now_s)) is not None:
            self.capacity.taken.append(taken.request_id)
            self.begun[taken.request_id] = self.now_s
            spread_s = 0.1 * (7 * len(self.begun) % 11)  # or all places would become free at once
            heapq.heappush(self._ends, (self.now_s + 0.5 + spread_s, taken.request_id))


def test_a_request_that_would_miss_its_target_is_refused_and_the_time_it_is_told_is_true():
    shop = Shop(places=4)
    for n in range(100):
        shop.offer(f"r{n}", slo=Slo(name="slow", priority=2))
    shop.run(15.0)
    refusal = shop.offer("quick", slo=QUICK)
    assert refusal is not None
    assert refusal.reason is RefusalReason.TARGET
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s == pytest.approx(10.5, abs=2)
    came_back_s = shop.now_s + refusal.retry_after_s
    shop.run(came_back_s)
    assert shop.offer("quick", slo=QUICK) is None
    shop.run(came_back_s + 3.0)
    assert shop.begun["quick"] - came_back_s <= 2.0 * 1.2


def test_those_who_are_refused_together_are_told_to_return_one_after_the_other_and_all_get_in():
    shop = Shop(places=4)
    for n in range(100):
        shop.offer(f"r{n}", slo=Slo(name="slow", priority=2))
    shop.run(15.0)
    returns = []
    for n in range(20):
        refusal = shop.offer(f"q{n}", slo=QUICK)
        assert refusal is not None
        assert refusal.retry_after_s is not None
        returns.append((shop.now_s + refusal.retry_after_s, f"q{n}"))
    assert len({at for at, _ in returns}) == 20
    for at, name in sorted(returns):
        shop.run(at)
        assert shop.offer(name, slo=QUICK) is None, name


def test_whoever_obeys_gets_in_though_others_come_meanwhile():
    """After a burst, beside a third of what the workers can do."""
    rng = Random(0)
    shop = Shop(places=4)
    arrivals = [(rng.uniform(0.0, 4.0), f"burst{n}", 0) for n in range(80)]
    arrivals += [(4.0 + rng.uniform(0.0, 30.0), f"later{n}", 0) for n in range(40)]
    heapq.heapify(arrivals)
    tries: list[tuple[int, bool]] = []
    while arrivals:
        at_s, name, times = heapq.heappop(arrivals)
        shop.run(at_s)
        refusal = shop.offer(name, slo=QUICK)
        tries.append((times, refusal is None))
        if refusal is not None:
            told_s = refusal.retry_after_s or 1.0
            heapq.heappush(arrivals, (at_s + told_s, name, times + 1))
    returned = [taken for times, taken in tries if times > 0]
    assert len(returned) >= 20
    assert sum(returned) >= 0.9 * len(returned)


def test_a_flood_of_one_tenant_does_not_get_another_refused():
    shop = Shop(places=2)
    for n in range(400):
        shop.offer(f"b{n}", tenant="b", slo=QUICK)
        if n == 40:
            shop.run(5.0)
    assert shop.controller.waiting < 100
    assert shop.offer("a", tenant="a", slo=QUICK) is None


def test_a_prompt_too_long_for_its_target_even_alone_is_not_refused_for_it():
    controller = AdmissionController(capacity=FakeCapacity(first_s=10.0), limits=limits())
    controller.offer(queued("r"), 0.0)
    assert controller.offer(queued("long", slo=QUICK), 0.0) is None


def test_a_request_whose_deadline_would_pass_in_line_is_refused_at_once():
    shop = Shop(places=1)
    for n in range(40):
        shop.offer(f"r{n}")
    shop.run(15.0)
    refusal = shop.offer("late", deadline_s=shop.now_s + 5.0)
    assert refusal is not None
    assert refusal.reason is RefusalReason.DEADLINE
    assert refusal.retry_after_s == pytest.approx(26.0, abs=5.0)


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "leave", "time"]),
        st.integers(0, 40),
        st.sampled_from(["a", "b", "c"]),
        st.floats(0.1, 20.0),
    ),
    max_size=50,
)


@settings(max_examples=50, deadline=None)
@given(acts=ACTS, places=st.integers(0, 3))
def test_whoever_is_accepted_ends_in_exactly_one_way(acts, places):
    shop = Shop(places=places, requests=12, tenant_requests=6)
    accepted: set[str] = set()
    ended: dict[str, str] = {}

    def settle() -> None:
        for name in shop.begun.keys() & accepted - ended.keys():
            ended[name] = "begun"

    for number, (act, target, tenant, span_s) in enumerate(acts):
        if act == "offer":
            name = f"r{number}"
            if shop.offer(name, tenant=tenant, deadline_s=shop.now_s + span_s) is None:
                accepted.add(name)
        elif act == "leave" and shop.controller.leave(queued(f"r{target}").request_id):
            assert f"r{target}" not in ended
            ended[f"r{target}"] = "left"
        elif act == "time":
            shop.run(shop.now_s + span_s)
            settle()
            for late in shop.controller.expire(shop.now_s):
                assert late.request_id not in ended
                ended[late.request_id] = "late"
        settle()
        shop.controller.check_integrity()
        assert len(accepted) == len(ended) + shop.controller.waiting


@pytest.mark.parametrize("slo", [QUICK, Slo()])
def test_at_five_times_the_capacity_as_much_is_served_as_at_the_capacity_itself(slo):
    """Of a class with a target, in time; of one without, at all."""

    def served(times: int) -> int:
        shop = Shop(places=8, tenant_requests=64)
        arrived: dict[str, float] = {}
        for n in range(times * 8 * 60):
            shop.run(n / (times * 8))
            arrived[f"r{n}"] = shop.now_s
            shop.offer(f"r{n}", slo=slo)
        # Before the line has moved for a while nothing is known of its speed.
        settled = {name: began_s for name, began_s in shop.begun.items() if began_s > 15.0}
        waits = [began_s - arrived[name] for name, began_s in settled.items()]
        return sum(slo.ttft_s is None or wait_s <= 1.1 * slo.ttft_s for wait_s in waits)

    assert served(5) >= 0.95 * served(1)


def test_under_a_flood_those_who_are_let_in_begin_in_the_time_promised():
    shop = Shop(places=8)
    arrived: dict[str, float] = {}
    for n in range(2000):
        shop.run(n / 40)
        arrived[f"r{n}"] = shop.now_s
        shop.offer(f"r{n}", slo=QUICK)
    late = [n for n, began_s in shop.begun.items() if began_s - arrived[n] > 1.2 * 2.0]
    # Before the line has moved for a while nothing is known of its speed.
    assert len([name for name in late if arrived[name] > 2.0]) <= 0.02 * len(shop.begun)


def test_the_story_of_a_request_tells_when_it_was_queued_and_admitted():
    controller = AdmissionController(capacity=FakeCapacity(places=1), limits=limits(requests=1))
    controller.offer(queued("r"), 1.0)
    assert controller.offer(queued("s"), 1.5) is not None
    assert controller.next(2.0) is not None
    asked, admitted = controller.story(RequestId("r"))
    assert (asked.at_s, asked.actions) == (1.0, ("queued",))
    assert (admitted.at_s, admitted.event) == (2.0, "admitted")
    (refused,) = controller.story(RequestId("s"))
    assert refused.actions == ("Refusal(reason=queue_full)",)
