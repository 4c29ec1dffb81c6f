from random import Random

import pytest

from baton.errors import IncompatibleError, TransferError
from baton.generation import Prompt, SamplingParams
from baton.ids import RequestId, Role, WorkerId
from router.admission.capacity import MeasuredSpeed, WorkerCapacity
from router.dispatch.placement import Placement
from router.dispatch.request import RequestState
from router.ports import GenerationRequest
from router.routing.index import PrefixIndex
from router.routing.policies import policy_named
from router.routing.policy import Pair, Policy, RouteKind, Unavailable
from router.routing.view import ClusterView
from tests.router.known_workers import hello


def placement_of(
    view: ClusterView, index: PrefixIndex, policy: Policy, capacity: WorkerCapacity | None = None
) -> Placement:
    return Placement(
        view=view, index=index, policy=policy, secret=b"s" * 32, rng=Random(0), capacity=capacity
    )


def request_of(prompt: Prompt, session: str = "") -> RequestState:
    asked = GenerationRequest(
        request_id=RequestId("r"), prompt=prompt, timeout_s=9.0, session=session
    )
    return RequestState(asked, 0.0)


class Place:
    """Placement by session among eight workers."""

    def __init__(self) -> None:
        index = PrefixIndex()
        view = ClusterView(index)
        for number in range(8):
            view.join(hello(f"h{number}", Role.HYBRID), f"unix:h{number}", 0.0)
        self.placement = placement_of(view, index, policy_named("session"))

    def chosen(self, tokens, *, session="", scope="") -> str:
        prompt = Prompt(prompt_tokens=tuple(tokens), sampling=SamplingParams(), cache_scope=scope)
        pair = self.placement.choose(request_of(prompt, session), prompt, frozenset(), 0.0)
        assert isinstance(pair, Pair)
        return pair.decode.identity.worker_id


@pytest.fixture
def place() -> Place:
    return Place()


def test_a_named_session_stays_whatever_its_prompts(place):
    chosen = {place.chosen(range(start, start + 100), session="t/ann") for start in range(20)}
    assert len(chosen) == 1


def test_prompts_that_begin_alike_are_one_session(place):
    chosen = {place.chosen([*range(64), *[number] * number]) for number in range(20)}
    assert len(chosen) == 1


def test_prompts_that_begin_otherwise_are_spread(place):
    assert len({place.chosen(range(start, start + 100)) for start in range(40)}) > 3


def test_equal_prompts_of_other_tenants_are_other_sessions(place):
    chosen = {place.chosen(range(100), scope=f"tenant-{number}") for number in range(40)}
    assert len(chosen) > 3


def test_every_choice_is_counted_and_remembered(place):
    place.chosen(range(10))
    log = place.placement.log
    assert log.counts[RouteKind.HYBRID] == 1
    assert log.explain(RequestId("r")) is not None


@pytest.mark.parametrize("policy", ["predictive", "prefix_affinity"])
def test_while_all_decode_workers_are_full_a_prefill_worker_without_a_prompt_keeps_the_request(
    policy,
):
    index = PrefixIndex()
    view = ClusterView(index)
    roles = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
    workers = {n: view.join(hello(n, role), f"unix:{n}", 0.0) for n, role in roles.items()}
    capacity = WorkerCapacity(
        view, MeasuredSpeed(), prefill_window_tokens=4096, local_decode_sequences=2
    )
    placement = placement_of(view, index, policy_named(policy), capacity)
    prompt = Prompt(prompt_tokens=tuple(range(100)), sampling=SamplingParams())
    job = request_of(prompt)

    def chosen() -> tuple[str, str, RouteKind]:
        pair = placement.choose(job, prompt, frozenset(), 0.0)
        assert isinstance(pair, Pair)
        return pair.prefill.identity.worker_id, pair.decode.identity.worker_id, pair.kind

    workers["d0"].legs, workers["d0"].decode_sequences = 10, 10
    assert chosen()[1] == "d1", "one has room"
    workers["d1"].legs, workers["d1"].decode_sequences = 10, 10
    workers["p1"].legs, workers["p1"].decode_sequences = 1, 1
    assert chosen() == ("p0", "p0", RouteKind.ON_PREFILL)
    workers["p0"].prefills, workers["p0"].prefill_tokens = 1, 50
    assert chosen() == ("p1", "p1", RouteKind.ON_PREFILL)
    workers["p1"].decode_sequences = 2
    assert chosen()[1] in ("d0", "d1"), "a request that was admitted continues on any"


class CountedPolicy:
    """The usual policy; counts how often it is asked for a pair."""

    uses_prefix, uses_session = True, False

    def __init__(self) -> None:
        self._policy = policy_named("predictive")
        self.asked = 0

    def pair(self, workers, demand, rng):
        self.asked += 1
        return self._policy.pair(workers, demand, rng)

    def prefiller(self, workers, decode, demand, rng):
        return self._policy.prefiller(workers, decode, demand, rng)


@pytest.mark.parametrize(("broken", "chosen", "asked"), [(39, "d0", 2), (40, "d1", 2)])
def test_a_decode_worker_whose_pairs_are_broken_is_left_out_at_one_look(broken, chosen, asked):
    index, policy = PrefixIndex(), CountedPolicy()
    view = ClusterView(index)
    prefillers = [view.join(hello(f"p{n}", Role.PREFILL), f"p{n}", 0.0) for n in range(40)]
    roomy = [hello(f"d{n}", Role.DECODE, num_blocks=1000) for n in range(2)]
    decoders = [view.join(greeting, str(greeting.identity), 0.0) for greeting in roomy]
    decoders[1].foreign_sequences = 4
    prefillers[39].foreign_prefill_tokens = 1000  # the best are those that cannot reach d0
    does_not_fit = IncompatibleError("dtype: float32 here", param="dtype")
    for prefill in prefillers[:broken]:
        view.link_failed(prefill.identity, decoders[0].identity, does_not_fit, 0.0)
    placement = placement_of(view, index, policy)
    prompt = Prompt(prompt_tokens=tuple(range(1000)), sampling=SamplingParams())
    job = request_of(prompt)
    pair = placement.choose(job, prompt, frozenset(), 0.0)
    assert isinstance(pair, Pair)
    assert (pair.decode.identity.worker_id, pair.kind) == (chosen, RouteKind.PAIR)
    assert policy.asked == asked


class OfTwoSizes:
    """Two prefill workers and a decode worker, where p0 has room for 256 tokens and 4 samples."""

    def __init__(self, policy: str) -> None:
        index = PrefixIndex()
        self.view = ClusterView(index)
        self.small = hello("p0", Role.PREFILL, max_model_len=257, max_num_seqs=4)
        greetings = (self.small, hello("p1", Role.PREFILL), hello("d0", Role.DECODE))
        self.workers = {
            greeting.identity.worker_id: self.view.join(greeting, "unix:w", 0.0)
            for greeting in greetings
        }
        self.placement = placement_of(self.view, index, policy_named(policy))

    def choose(
        self, num_tokens: int, *, samples: int = 1, first: int = 0
    ) -> tuple[str, str] | Unavailable:
        prompt = Prompt(
            prompt_tokens=tuple(range(first, first + num_tokens)),
            samples=tuple(range(samples)),
            sampling=SamplingParams(max_tokens=3000),
        )
        pair = self.placement.choose(request_of(prompt), prompt, frozenset(), 0.0)
        if isinstance(pair, Unavailable):
            return pair
        return pair.prefill.identity.worker_id, pair.decode.identity.worker_id

    def lose(self, *names: str) -> None:
        for name in names:
            self.view.lose(self.workers[WorkerId(name)].identity)


POLICIES = pytest.mark.parametrize(
    "policy", ["predictive", "prefix_affinity", "least_loaded", "round_robin", "random"]
)


@POLICIES
def test_a_worker_is_given_no_prompt_that_it_could_never_hold(policy):
    sizes = OfTwoSizes(policy)
    for first in range(20):
        assert sizes.choose(300, first=first) in (("p1", "d0"), ("d0", "d0"))
        assert sizes.choose(100, samples=5, first=first) in (("p1", "d0"), ("d0", "d0"))
    fresh = range(1000, 50_000, 1000)
    assert ("p0", "d0") in {sizes.choose(256, samples=4, first=first) for first in fresh}
    sizes.lose("p1")
    assert sizes.choose(300) == ("d0", "d0")


@POLICIES
def test_a_text_whose_output_no_worker_that_is_left_can_hold_waits_for_one_that_can(policy):
    sizes = OfTwoSizes(policy)
    sizes.lose("d0")
    assert sizes.choose(100) == ("p1", "p1")
    sizes.lose("p1")
    assert isinstance(sizes.choose(100), Unavailable)


def test_who_takes_over_a_prompt_can_hold_it():
    sizes = OfTwoSizes("prefix_affinity")
    prompt = Prompt(prompt_tokens=tuple(range(300)), sampling=SamplingParams(max_tokens=9))
    decode, gone = sizes.workers[WorkerId("d0")], sizes.workers[WorkerId("p1")].identity
    request = request_of(prompt)
    assert sizes.placement.another_pair(request, prompt, decode, frozenset(), 0.0) is not None
    assert sizes.placement.another_pair(request, prompt, decode, {gone}, 0.0) is None
    assert sizes.placement.single_worker(request, prompt, sizes.small.identity, 0.0) is None


@POLICIES
def test_a_prefill_worker_runs_a_text_that_the_decode_worker_that_is_left_could_not_hold(policy):
    sizes = OfTwoSizes(policy)
    sizes.lose("d0", "p0")
    greeting = hello("d1", Role.DECODE, max_model_len=1050)
    sizes.view.join(greeting, "unix:d1", 0.0)
    assert sizes.choose(100) == ("p1", "p1")


@POLICIES
@pytest.mark.parametrize("is_full", [False, True])
def test_a_decode_worker_that_no_peer_reaches_computes_the_prompt_where_no_other_has_room(
    policy, is_full
):
    index = PrefixIndex()
    view = ClusterView(index)
    other = {} if is_full else {"max_model_len": 1050}
    greetings = {
        "p0": hello("p0", Role.PREFILL),
        "d0": hello("d0", Role.DECODE),
        "d1": hello("d1", Role.DECODE, **other),
    }
    workers = {n: view.join(greeting, "unix:w", 0.0) for n, greeting in greetings.items()}
    capacity = WorkerCapacity(view, MeasuredSpeed(), prefill_window_tokens=4096)
    placement = placement_of(view, index, policy_named(policy), capacity)
    if is_full:
        workers["d1"].legs, workers["d1"].decode_sequences = 10, 10
    broken = workers["p0"].identity, workers["d0"].identity
    view.link_failed(*broken, TransferError("no way"), 0.0)
    prompt = Prompt(prompt_tokens=tuple(range(100)), sampling=SamplingParams(max_tokens=3000))
    pair = placement.choose(request_of(prompt), prompt, frozenset(), 0.0)
    assert isinstance(pair, Pair)
    assert pair.prefill is pair.decode is workers["d0"]
