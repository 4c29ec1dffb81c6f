"""Nobody who decodes is slowed beyond its promise by whoever is let in after it: controller,
capacity and routing together.
"""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.generation import Prompt, SamplingParams
from baton.ids import RequestId, Role
from router.admission.capacity import WorkerCapacity
from router.admission.controller import AdmissionController
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.events import ClientGone, WorkerJoined
from router.dispatch.placement import Placement
from router.dispatch.retry import RetryPolicy
from router.ports import GenerationRequest
from router.routing.index import PrefixIndex
from router.routing.policies import policy_named
from router.routing.view import ClusterView, WorkerView
from router.slo import STANDARD, Slo
from tests.router.admission.test_controller import limits
from tests.router.known_workers import hello

STEP_S = 0.01
SLOS = [Slo(name="tight", tbt_s=0.035), Slo(name="loose", tbt_s=0.085), STANDARD]


class LinearPace:
    """A step takes `STEP_S` per sequence."""

    def step_s(self, worker: WorkerView, sequences: int, context_tokens: int) -> float | None:
        return STEP_S * sequences

    def first_token_s(self, worker: WorkerView, prompt_tokens: int) -> float | None:
        return None

    def queue_s(self, worker: WorkerView, now_s: float) -> float | None:
        return 0.0


class Door:
    """A controller before a dispatcher, as the intake has it."""

    def __init__(self, policy: str) -> None:
        index = PrefixIndex(max_blocks=1000)
        self.view = ClusterView(index)
        capacity = WorkerCapacity(self.view, LinearPace(), prefill_window_tokens=10**9)
        placement = Placement(
            view=self.view,
            index=index,
            policy=policy_named(policy),
            secret=b"s" * 32,
            rng=Random(0),
            capacity=capacity,
        )
        self.controller = AdmissionController(capacity=capacity, limits=limits())
        self.dispatcher = Dispatcher(view=self.view, placement=placement, policy=RetryPolicy())
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
            greeting = hello(name, role, max_num_seqs=32)
            self.dispatcher.handle(WorkerJoined(hello=greeting, address=name), 0.0)

    def come(self, name: str, slo: Slo, samples: int = 1) -> None:
        prompt = Prompt(
            prompt_tokens=tuple(range(10)),
            samples=tuple(range(samples)),
            sampling=SamplingParams(max_tokens=4),
        )
        job = GenerationRequest(
            request_id=RequestId(name), prompt=prompt, timeout_s=60.0, slo=slo, expected_tokens=4
        )
        assert self.controller.offer(job, 0.0) is None
        self.let_in()

    def go(self, name: str) -> None:
        self.controller.leave(RequestId(name))
        self.dispatcher.handle(ClientGone(request_id=RequestId(name)), 0.0)
        self.let_in()

    def let_in(self) -> None:
        while (taken := self.controller.next(0.0)) is not None:
            before = {w.identity: w.sequences for w in self.view.workers}
            self.dispatcher.handle(taken, 0.0)
            for worker in self.view.workers:
                if 0 < before[worker.identity] < worker.sequences:
                    self.check(worker)
            self.dispatcher.check_integrity()
            self.controller.check_integrity()

    def check(self, worker: WorkerView) -> None:
        """Somebody joined others on `worker`."""
        if worker.tightest_tbt_s is not None:
            assert STEP_S * worker.sequences <= worker.tightest_tbt_s


@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from(["predictive", "prefix_affinity", "round_robin"]),
    acts=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(SLOS), st.integers(1, 3)),
            st.integers(0, 40),
        ),
        max_size=40,
    ),
)
def test_nobody_joins_where_a_promise_would_break_and_everybody_gets_in_in_the_end(policy, acts):
    door = Door(policy)
    here: list[str] = []
    for number, act in enumerate(acts):
        if isinstance(act, tuple):
            here.append(f"r{number}")
            door.come(here[-1], *act)
        elif act < len(here):
            door.go(here.pop(act))
    while here:
        door.go(here.pop(0))
    assert door.controller.waiting == 0
    assert door.dispatcher.in_flight == 0


def test_those_who_were_promised_little_go_where_nobody_was_promised_more():
    door = Door("predictive")
    door.come("tight", SLOS[0])
    (promised,) = [w for w in door.view.workers if w.decode_sequences]
    for n in range(20):
        door.come(f"r{n}", STANDARD)
    assert promised.decode_sequences <= 3
    assert door.controller.waiting == 0


@pytest.mark.parametrize("full", [3, 6])
def test_when_every_worker_has_somebody_with_a_promise_the_rest_wait(full):
    door = Door("predictive")
    for n in range(full):
        door.come(f"tight{n}", SLOS[0])
    for n in range(20):
        door.come(f"r{n}", STANDARD)
    in_flight = door.dispatcher.in_flight
    assert door.controller.waiting == full + 20 - in_flight
    assert all(w.decode_sequences <= 3 for w in door.view.workers)
    for n in range(full):
        door.go(f"tight{n}")
    assert door.controller.waiting == 0
