from collections import Counter
from random import Random

import pytest

from baton.config.rules import POLICIES
from baton.errors import ConfigError
from baton.generation import WorkerLoad
from baton.ids import LayerName, LegId, Role
from router.routing.index import PrefixIndex
from router.routing.policies import policy_named
from router.routing.policy import Demand, Pair, RouteKind
from router.routing.view import ClusterView
from tests.router.known_workers import hello, layout

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "h": Role.HYBRID}
ALL = POLICIES


class Cluster:
    """Workers named by their role's letter, and decisions among them."""

    def __init__(self, *names: str) -> None:
        self.view = ClusterView(PrefixIndex(max_blocks=100))
        self.rng = Random(0)
        for name in names:
            self.add(name)

    def add(self, name: str, **changes) -> None:
        self.view.join(hello(name, ROLES[name[0]], **changes), f"unix:{name}", 0.0)

    def __getitem__(self, name):
        return self.view.find(name)

    def choose(self, policy="prefix_affinity", *, tokens=100, held=None, session=0):
        by_slot = {self[name].slot: count for name, count in (held or {}).items()}
        demand = Demand(tokens=tokens, samples=1, held=by_slot, session=session)
        return policy_named(policy).pair(self.view.usable(0.0), demand, self.rng)

    def names(self, policy="prefix_affinity", **demand):
        pair = self.choose(policy, **demand)
        assert isinstance(pair, Pair)
        return pair.prefill.identity.worker_id, pair.decode.identity.worker_id


@pytest.mark.parametrize("policy", ALL)
def test_a_pair_is_one_worker_of_each_kind(policy):
    assert Cluster("p0", "d0").names(policy) == ("p0", "d0")


@pytest.mark.parametrize("policy", ALL)
def test_without_a_worker_that_decodes_a_prefill_worker_does_it(policy):
    chosen = Cluster("p0").choose(policy)
    assert chosen.kind is RouteKind.NO_DECODER
    assert chosen.local


@pytest.mark.parametrize("policy", ALL)
def test_while_one_worker_decodes_no_prefill_worker_does(policy):
    cluster = Cluster("p0", "p1", "d0")
    cluster["d0"].decode_sequences, cluster["d0"].decode_tokens = 40, 40_000
    for _ in range(20):
        chosen = cluster.choose(policy)
        assert chosen.decode.can_decode


@pytest.mark.parametrize("policy", ALL)
def test_without_a_worker_that_prefills_the_decode_worker_does_it(policy):
    assert Cluster("d0").names(policy) == ("d0", "d0")


@pytest.mark.parametrize("policy", ALL)
def test_a_pair_is_never_made_across_layouts(policy):
    cluster = Cluster("p0")
    cluster.add("d0", layout=layout(layers=(LayerName("other"),)))
    assert cluster.names(policy) == ("d0", "d0")


def test_a_worker_that_cannot_receive_kv_decodes_only_for_itself():
    cluster = Cluster("p0")
    cluster.add("d0", transfer_address="")
    assert cluster.names() == ("d0", "d0")


def test_a_hybrid_worker_that_is_as_good_keeps_both_legs():
    pair = Cluster("h0", "h1").choose()
    assert isinstance(pair, Pair)
    assert pair.local


def test_a_hybrid_worker_may_prefill_for_another():
    cluster = Cluster("h0", "h1")
    first, second = sorted(("h0", "h1"), key=lambda name: cluster[name].kv_order)
    cluster[second].prefill_tokens = 10_000
    cluster[first].decode_sequences = 1000
    assert cluster.names() == (first, second)


@pytest.mark.parametrize("policy", ALL)
def test_no_two_hybrid_workers_prefill_for_each_other(policy):
    """Prompts of each would keep the pages that those of the other wait for."""
    names = ("h0", "h1", "h2")
    cluster, pairs = Cluster(*names), set()
    for session in range(400):
        for name in names:
            worker = cluster[name]
            worker.prefill_tokens = cluster.rng.choice((0, 100_000))
            worker.forecast.queued(LegId(1), worker.prefill_tokens / 1000, 0.0)
            worker.decode_sequences = cluster.rng.choice((0, 1000))
            worker.decode_tokens = 2000 * worker.decode_sequences
        pairs.add(cluster.names(policy, session=session))
    apart = {pair for pair in pairs if pair[0] != pair[1]}
    assert apart or policy == "session"  # which keeps both legs where the session is
    assert not {(d, p) for p, d in apart} & apart


def test_the_held_prefix_draws_a_prompt_to_its_holder():
    cluster = Cluster("p0", "p1", "d0", "d1")
    assert cluster.names(tokens=1000, held={"p1": 900, "d0": 900}) == ("p1", "d0")


def test_a_queue_longer_than_the_held_prefix_drives_it_away():
    cluster = Cluster("p0", "p1", "d0")
    cluster["p1"].prefill_tokens = 901
    assert cluster.names(tokens=1000, held={"p1": 900})[0] == "p0"


def test_the_work_of_other_routers_counts():
    cluster = Cluster("p0", "p1", "d0")
    cluster["p0"].report(WorkerLoad(prefill_tokens_pending=500), 0.0)
    assert cluster.names()[0] == "p1"


def test_a_decode_worker_without_pages_is_avoided():
    cluster = Cluster("p0", "d0", "d1")
    cluster["d0"].report(WorkerLoad(blocks_total=64, blocks_free=1), 0.0)
    cluster["d1"].report(WorkerLoad(blocks_total=64, blocks_free=64), 0.0)
    cluster["d1"].decode_sequences = 1
    assert cluster.names(tokens=200)[1] == "d1"


def test_least_loaded_does_not_look_at_prefixes():
    cluster = Cluster("p0", "p1", "d0")
    cluster["p1"].prefill_tokens = 1
    assert cluster.names("least_loaded", tokens=1000, held={"p1": 900})[0] == "p0"


def test_round_robin_takes_turns():
    cluster = Cluster("p0", "p1", "d0", "d1", "d2")
    turns = []
    for decision in range(1, 7):
        pair = cluster.choose("round_robin")
        assert isinstance(pair, Pair)
        pair.prefill.last_pick = pair.decode.last_pick = decision
        turns.append((pair.prefill.identity.worker_id, pair.decode.identity.worker_id))
    assert Counter(p for p, _ in turns) == {"p0": 3, "p1": 3}
    assert Counter(d for _, d in turns) == {"d0": 2, "d1": 2, "d2": 2}


def test_ties_go_to_the_lighter_worker():
    cluster = Cluster("p0", "p1", "d0")
    cluster["p0"].legs = 1
    assert {cluster.names()[0] for _ in range(20)} == {"p1"}


def test_other_ties_are_broken_at_random():
    cluster = Cluster("p0", "p1", "d0", "d1")
    assert len({cluster.names() for _ in range(50)}) == 4


def test_random_takes_everybody():
    cluster = Cluster("p0", "p1", "d0", "d1")
    assert len({cluster.names("random") for _ in range(100)}) == 4


def test_a_session_stays_where_it_is():
    cluster = Cluster("p0", "p1", "p2", "d0", "d1", "d2")
    before = cluster.names("session", session=42)
    for name in before:
        cluster[name].legs = cluster[name].prefill_tokens = 100
    assert cluster.names("session", session=42) == before


def test_sessions_are_spread():
    cluster = Cluster("p0", "p1", "d0", "d1")
    pairs = Counter(cluster.names("session", session=number) for number in range(400))
    assert {p for p, _ in pairs} == {"p0", "p1"}
    assert {d for _, d in pairs} == {"d0", "d1"}
    assert max(pairs.values()) < 300


def test_a_worker_that_goes_moves_only_its_own_sessions():
    cluster = Cluster("p0", "p1", "p2", "d0")
    before = {number: cluster.names("session", session=number)[0] for number in range(100)}
    cluster.view.lose(cluster["p1"].identity)
    after = {number: cluster.names("session", session=number)[0] for number in range(100)}
    assert {n for n in before if before[n] != after[n]} == {n for n in before if before[n] == "p1"}


@pytest.mark.parametrize("policy", ALL)
def test_a_choice_says_what_it_was_chosen_from(policy):
    pair = Cluster("p0", "p1", "d0").choose(policy)
    assert isinstance(pair, Pair)
    assert pair.kind is RouteKind.PAIR
    assert pair.rationale is not None
    assert pair.rationale.why()
    names = (pair.prefill.identity.worker_id, pair.decode.identity.worker_id)
    assert names in {(option.prefill, option.decode) for option in pair.rationale.considered()}


@pytest.mark.parametrize("policy", ALL)
def test_another_prefiller_is_one_of_those_given(policy):
    cluster = Cluster("p0", "p1", "d0")
    demand = Demand(tokens=100, samples=1, held={})
    chosen = policy_named(policy).prefiller([cluster["p1"]], cluster["d0"], demand, cluster.rng)
    assert chosen.prefill is cluster["p1"]
    assert chosen.decode is cluster["d0"]
    assert chosen.kind is RouteKind.TAKE_OVER


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ConfigError, match="fastest") as refused:
        policy_named("fastest")
    assert refused.value.param == "router.policy"


class Whole:
    """An operator's policy that always takes the first worker for both legs."""

    uses_prefix = uses_session = False

    def pair(self, workers, demand, rng):
        worker = next(iter(workers))
        return Pair(prefill=worker, decode=worker)

    def prefiller(self, workers, decode, demand, rng):
        return Pair(prefill=next(iter(workers)), decode=decode)


class NoPolicy:
    """Has the flags and nothing else."""

    uses_prefix = uses_session = False


class Unmakeable:
    def __init__(self, needed: int) -> None:
        self.needed = needed


def test_a_policy_of_the_operators_own_is_loaded_by_its_path():
    policy = policy_named(f"{__name__}:Whole")
    cluster = Cluster("h0", "h1")
    demand = Demand(tokens=1, samples=1, held={})
    pair = policy.pair(cluster.view.usable(0.0), demand, cluster.rng)
    assert isinstance(pair, Pair)
    assert pair.prefill is cluster["h0"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no.such.module:Policy", "no such class"),
        (f"{__name__}:Missing", "no such class"),
        (f"{__name__}:NoPolicy", "neither pair and prefiller"),
        (f"{__name__}:Cluster", "no uses_prefix"),
        (f"{__name__}:Unmakeable", "cannot be made"),
        ("fastest", "no such policy"),
    ],
)
def test_what_is_no_policy_is_refused_with_the_known_ones(name, why):
    with pytest.raises(ConfigError, match=why) as refused:
        policy_named(name)
    assert refused.value.param == "router.policy"
    assert all(known in refused.value.message for known in ALL)
