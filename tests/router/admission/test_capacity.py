"""How far workers are filled, and whom a newcomer must not slow down."""

from dataclasses import dataclass, replace
from random import Random

import pytest

from baton.config.rules import POLICIES
from baton.generation import WorkerLoad
from baton.ids import Role
from router.admission.capacity import MeasuredSpeed, WorkerCapacity
from router.attainment import NOTHING_MISSED
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.events import WorkerJoined
from router.dispatch.placement import Placement
from router.dispatch.retry import RetryPolicy
from router.ports import GenerationRequest
from router.roles.look import look_at
from router.routing.index import PrefixIndex
from router.routing.policies import policy_named
from router.routing.view import ClusterView, WorkerView
from router.slo import STANDARD, Slo
from tests.router.admission.admitting import UnknownSpeed, queued
from tests.router.known_workers import hello

PROMISED = Slo(name="interactive", tbt_s=0.1, priority=2)


@dataclass
class LinearPace:
    """A step takes a hundredth of a second per sequence."""

    def step_s(self, worker: WorkerView, sequences: int, context_tokens: int) -> float | None:
        return 0.01 * sequences

    def first_token_s(self, worker: WorkerView, prompt_tokens: int) -> float | None:
        return None if worker.identity.worker_id == "p0" else prompt_tokens / 1000

    def queue_s(self, worker: WorkerView, now_s: float) -> float | None:
        return max(0.0, worker.prefill_tokens / 1000 - now_s)


def cluster(
    pace=None, *, local_decode: int = 0, **roles: Role
) -> tuple[WorkerCapacity, dict[str, WorkerView]]:
    view = ClusterView(PrefixIndex())
    workers = {name: view.join(hello(name, role), name, 0.0) for name, role in roles.items()}
    capacity = WorkerCapacity(
        view,
        pace or UnknownSpeed(),
        prefill_window_tokens=4096,
        local_decode_sequences=local_decode,
    )
    return capacity, workers


def test_without_any_worker_there_is_no_room():
    capacity, _ = cluster()
    assert not capacity.has_room(queued("r"), 0.0)
    assert not capacity.has_workers(0.0)
    capacity, _ = cluster(h0=Role.HYBRID)
    assert capacity.has_workers(0.0)


@pytest.mark.parametrize(
    ("prompts", "tokens", "expected"),
    [(0, 0, True), (1, 9000, True), (2, 9000, False), (20, 4000, True), (20, 4096, False)],
)
def test_a_prefill_worker_has_a_prompt_ahead_or_a_window_of_tokens(prompts, tokens, expected):
    capacity, workers = cluster(p0=Role.PREFILL, d0=Role.DECODE)
    workers["p0"].prefills, workers["p0"].prefill_tokens = prompts, tokens
    assert capacity.has_room(queued("r"), 0.0) is expected


def test_where_it_is_known_how_long_prompts_take_the_next_is_sent_just_before_it_is_needed():
    capacity, workers = cluster(LinearPace(), p0=Role.PREFILL, d0=Role.DECODE)
    workers["p0"].prefills, workers["p0"].prefill_tokens = 1, 3000
    assert not capacity.has_room(queued("r"), 2.9)
    assert capacity.has_room(queued("r"), 2.96)


def test_a_steps_budget_of_prompts_is_always_sent_ahead():
    capacity, workers = cluster(LinearPace(), p0=Role.PREFILL, d0=Role.DECODE)
    workers["p0"].prefills, workers["p0"].prefill_tokens = 7, 2047
    assert capacity.has_room(queued("r"), 0.0)


def test_one_free_prefill_worker_is_enough():
    capacity, workers = cluster(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    workers["p0"].prefills, workers["p0"].prefill_tokens = 5, 9000
    assert capacity.has_room(queued("r"), 0.0)


def test_a_decode_worker_is_sent_a_quarter_more_than_its_seats_and_no_more():
    capacity, workers = cluster(p0=Role.PREFILL, d0=Role.DECODE)  # 8 seats
    workers["d0"].decode_sequences = 9
    assert capacity.has_room(queued("r"), 0.0)
    assert not capacity.has_room(queued("r", samples=2), 0.0)
    workers["d0"].decode_sequences = 10
    assert not capacity.has_room(queued("r"), 0.0)


def test_what_other_routers_decode_there_counts_too():
    capacity, workers = cluster(p0=Role.PREFILL, d0=Role.DECODE)
    workers["d0"].foreign_sequences = 10
    assert not capacity.has_room(queued("r"), 0.0)


def test_several_samples_take_the_first_place_where_other_routers_would_take_it_before_the_next():
    capacity, workers = cluster(p0=Role.PREFILL, d0=Role.DECODE)  # 8 seats and 2 ahead
    workers["d0"].decode_sequences, workers["d0"].foreign_sequences = 4, 5
    assert capacity.has_room(queued("r", samples=8), 0.0)
    workers["d0"].foreign_sequences = 6
    assert not capacity.has_room(queued("r", samples=8), 0.0)


def test_more_samples_than_seats_run_on_a_worker_that_is_empty():
    capacity, _ = cluster(h0=Role.HYBRID)
    assert capacity.has_room(queued("r", samples=100), 0.0)


def test_a_decode_worker_in_which_requests_wait_for_pages_is_full():
    capacity, workers = cluster(p0=Role.PREFILL, d0=Role.DECODE)
    workers["d0"].decode_sequences = 4
    workers["d0"].load = WorkerLoad(running=1, waiting=3)
    assert not capacity.has_room(queued("r"), 0.0)


@pytest.mark.parametrize(
    ("prompt_tokens", "decoding", "samples", "expected"),
    [(0, 0, 1, True), (0, 1, 1, True), (0, 2, 1, False), (0, 1, 2, False), (10, 0, 1, False)],
)
def test_while_decode_workers_are_full_a_prefill_worker_without_a_prompt_decodes_a_few(
    prompt_tokens, decoding, samples, expected
):
    capacity, workers = cluster(local_decode=2, p0=Role.PREFILL, d0=Role.DECODE)
    workers["d0"].decode_sequences = 10
    workers["p0"].prefill_tokens, workers["p0"].decode_sequences = prompt_tokens, decoding
    assert capacity.has_room(queued("r", samples=samples), 0.0) is expected


def test_a_prefill_worker_decodes_nothing_itself_where_that_is_forbidden():
    capacity, workers = cluster(p0=Role.PREFILL, d0=Role.DECODE)
    workers["d0"].decode_sequences = 10
    assert not capacity.has_room(queued("r"), 0.0)


def test_a_suspected_worker_has_no_room():
    capacity, workers = cluster(p0=Role.PREFILL, d0=Role.DECODE, d1=Role.DECODE)
    workers["p0"].heard_s = workers["d0"].heard_s = 100.0
    workers["d0"].decode_sequences = 10
    assert not capacity.has_room(queued("r"), 100.0)


def test_nobody_joins_where_somebodys_promised_time_between_tokens_would_break():
    capacity, workers = cluster(LinearPace(), p0=Role.PREFILL, d0=Role.DECODE)
    d0 = workers["d0"]
    d0.hello = hello("d0", Role.DECODE, max_num_seqs=64)
    d0.decode_sequences = 10
    d0.tbt_targets = {0.1: 1}
    assert not capacity.can_decode(d0, samples=1, context_tokens=10, slo=STANDARD)
    d0.tbt_targets = {}
    assert capacity.can_decode(d0, samples=1, context_tokens=10, slo=STANDARD)


def test_nobody_is_put_where_its_own_promise_would_break():
    capacity, workers = cluster(LinearPace(), p0=Role.PREFILL, d0=Role.DECODE)
    d0 = workers["d0"]
    d0.hello = hello("d0", Role.DECODE, max_num_seqs=64)
    d0.decode_sequences = 9
    assert capacity.can_decode(d0, samples=1, context_tokens=10, slo=PROMISED)
    d0.decode_sequences = 10
    assert not capacity.can_decode(d0, samples=1, context_tokens=10, slo=PROMISED)
    assert capacity.can_decode(d0, samples=1, context_tokens=10, slo=STANDARD)


def test_the_first_token_is_expected_of_the_fastest_worker_of_which_something_is_known():
    capacity, _ = cluster(LinearPace(), p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    assert capacity.first_token_s(queued("r", prompt_tokens=2000), 0.0) == 2.0
    silent, _ = cluster(LinearPace(), p0=Role.PREFILL, d0=Role.DECODE)
    assert silent.first_token_s(queued("r"), 0.0) == 0.0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    "roles",
    [{"p0": Role.PREFILL, "d0": Role.DECODE}, {"h0": Role.HYBRID}, {"h0": Role.HYBRID, "h1": Role.HYBRID}],
    ids=["pair", "hybrid", "hybrids"],
)  # fmt: skip
def test_no_more_prompts_are_sent_ahead_whichever_policy_chooses_and_whatever_is_known(
    policy: str, is_known: bool, roles: dict[str, Role]
):
    """Beyond that they wait where they can be put in order."""
    view = ClusterView(index := PrefixIndex())
    capacity = WorkerCapacity(view, MeasuredSpeed(), prefill_window_tokens=4096)
    placement = Placement(
        view=view,
        index=index,
        policy=policy_named(policy),
        secret=b"x" * 32,
        rng=Random(1),
        capacity=capacity,
    )
    dispatcher = Dispatcher(view=view, placement=placement, policy=RetryPolicy())
    for name, role in roles.items():
        room = {"max_num_seqs": 256, "num_blocks": 1_000_000, "max_model_len": 100_000}
        dispatcher.handle(WorkerJoined(hello=hello(name, role, **room), address=name), 0.0)
    workers = view.workers
    for worker in workers if is_known else ():
        for tokens in (3000, 300) * 20:
            worker.forecast.prefilled(tokens, 0, tokens / 10_000)
    admitted = 0
    while admitted < 100 and capacity.has_room(r := asks(admitted), 0.0):
        dispatcher.handle(r, 0.0)
        admitted += 1
    assert 1 <= admitted <= 12 * len(roles)
    if is_known:
        look = look_at(view, 0.0, waiting=0, missed=NOTHING_MISSED)
        assert max(worker.backlog_s for worker in look.workers) >= 0.25, "the planner sees it"


def asks(number: int) -> GenerationRequest:
    """Prompts that have nothing in common."""
    request = queued(f"r{number}", prompt_tokens=3000)
    return replace(request, prompt=replace(request.prompt, prompt_tokens=(number,) * 3000))


def test_a_hybrid_worker_that_may_not_hand_off_to_the_one_that_decodes_is_no_prefill_worker():
    capacity, workers = cluster(h0=Role.HYBRID, h1=Role.HYBRID)
    low, high = sorted(workers.values(), key=lambda worker: worker.kv_order)
    low.prefills, low.prefill_tokens = 5, 9000
    high.decode_sequences = 1000
    assert not capacity.has_room(queued("r"), 0.0)
    low.prefills = low.prefill_tokens = low.decode_sequences = 0
    assert capacity.has_room(queued("r"), 0.0)
    low.decode_sequences, high.decode_sequences, high.prefills, high.prefill_tokens = (
        1000, 0, 5, 9000
    )  # fmt: skip
    assert capacity.has_room(queued("r"), 0.0), "the lower one computes for the higher one"
