"""What `predictive` weighs, one thing at a time.
Workers have the same coefficients unless a test teaches them others.
"""

from random import Random

import pytest

from baton.generation import WorkerLoad
from baton.ids import Incarnation, LayerName, LegId, Role, WorkerId, WorkerIdentity
from router.routing.index import PrefixIndex
from router.routing.policy import Demand, Pair, RouteKind
from router.routing.predictive import LocalPrefill, Predictive
from router.routing.pricing import fastest_pricing
from router.routing.view import ClusterView
from tests.router.known_workers import hello, layout

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "h": Role.HYBRID}
NEVER = LocalPrefill(max_tokens=0)
LONG = 8000
NODE = WorkerIdentity(worker_id=WorkerId("pool-0"), incarnation=Incarnation(7))
ATTACHED = WorkerLoad(pool_node="pool-0", pool_incarnation=7)


class Cluster:
    """Workers named by their role's letter, with room for anything."""

    def __init__(self, *names: str, local: LocalPrefill = NEVER) -> None:
        self.view = ClusterView(PrefixIndex(max_blocks=100), silence_timeout_s=1e9)
        self.policy = Predictive(local, fastest_pricing())
        self.rng = Random(0)
        for name in names:
            self.add(name)

    def add(self, name: str, **changes) -> None:
        room = {"num_blocks": 1_000_000, "max_num_seqs": 256} | changes
        self.view.join(hello(name, ROLES[name[0]], **room), f"unix:{name}", 0.0)

    def __getitem__(self, name):
        return self.view.find(name)

    def choose(self, *, tokens=LONG, held=None, now_s=0.0, pooled=0) -> Pair:
        counts = {self[name].slot: count for name, count in (held or {}).items()}
        counts |= {w.pool_slot: pooled for w in self.view.workers if w.pool_slot >= 0}
        demand = Demand(tokens=tokens, samples=1, held=counts, now_s=now_s)
        chosen = self.policy.pair(list(self.view.workers), demand, self.rng)
        assert isinstance(chosen, Pair)
        return chosen

    def names(self, **demand) -> tuple[str, str]:
        pair = self.choose(**demand)
        return pair.prefill.identity.worker_id, pair.decode.identity.worker_id

    def teach_prefill(self, name: str, seconds_per_token: float) -> None:
        for tokens in (100, 1000, 10_000) * 5:
            self[name].forecast.prefilled(tokens, 0, tokens * seconds_per_token)

    def attach(self, *names: str) -> None:
        """Has workers map the node of their host."""
        self.view.pools.join(NODE, "host:1")
        for name in names:
            self[name].report(ATTACHED, 0.0)
            self.view.pools.attach(self[name])

    def teach_fetch(self, name: str, *, seconds_per_token: float) -> None:
        for tokens in (100, 1000, 10_000) * 5:
            self[name].forecast.fetched(1, tokens, tokens * seconds_per_token)

    def teach_step(self, name: str, seconds: float) -> None:
        for number in range(20):
            self[name].forecast.stepped(1, 1000, seconds, float(number))


def test_the_shorter_queue_wins():
    cluster = Cluster("p0", "p1", "d0")
    cluster["p0"].forecast.queued(LegId(1), 2.0, 0.0)
    cluster["p1"].forecast.queued(LegId(2), 1.0, 0.0)
    assert cluster.names()[0] == "p1"


def test_a_queue_is_worked_off_while_time_passes():
    cluster = Cluster("p0", "p1", "d0")
    cluster["p0"].forecast.queued(LegId(1), 2.0, 0.0)
    cluster["p1"].forecast.queued(LegId(2), 1.0, 1.5)
    assert cluster.names(now_s=1.6)[0] == "p0"


def test_the_held_prefix_is_worth_the_seconds_that_it_saves():
    cluster = Cluster("p0", "p1", "d0")
    saved_s = cluster["p1"].forecast.prefill_s(LONG, 0) - cluster["p1"].forecast.prefill_s(
        LONG - 6000, 6000
    )
    cluster["p1"].forecast.queued(LegId(1), saved_s - 0.05, 0.0)
    assert cluster.names(held={"p1": 6000})[0] == "p1"
    cluster["p1"].forecast.queued(LegId(2), 0.1, 0.0)
    assert cluster.names(held={"p1": 6000})[0] == "p0"


def test_a_worker_that_was_measured_to_be_fast_is_preferred():
    cluster = Cluster("p0", "p1", "d0")
    cluster.teach_prefill("p0", 2e-4)
    cluster.teach_prefill("p1", 1e-4)
    assert cluster.names()[0] == "p1"


def test_a_worker_that_nobody_measured_is_taken_for_one_of_the_others():
    cluster = Cluster("p0", "p1", "d0")
    cluster.teach_prefill("p0", 5e-3)
    new = cluster["p1"].forecast
    assert new.prefill_s(1000, 0) == pytest.approx(5.0, rel=0.2)


def test_the_decode_worker_with_the_quicker_step_wins():
    cluster = Cluster("p0", "d0", "d1")
    cluster.teach_step("d0", 0.05)
    cluster.teach_step("d1", 0.02)
    assert cluster.names()[1] == "d1"


def test_context_counts_not_only_sequences():
    cluster = Cluster("p0", "d0", "d1")
    cluster["d0"].decode_sequences, cluster["d0"].decode_tokens = 2, 400_000
    cluster["d1"].decode_sequences, cluster["d1"].decode_tokens = 4, 4_000
    assert cluster.names()[1] == "d1"


def test_the_context_of_other_routers_counts():
    cluster = Cluster("p0", "d0", "d1")
    busy = WorkerLoad(
        running=4, steps=1, step_s=0.02, step_sequences=4, step_context_tokens=400_000
    )
    cluster["d0"].report(busy, 0.0)
    cluster["d1"].report(WorkerLoad(running=4, steps=1), 0.0)
    assert cluster.names()[1] == "d1"


def test_a_decode_worker_without_pages_is_avoided():
    cluster = Cluster("p0")
    cluster.add("d0", num_blocks=1000)
    cluster.add("d1", num_blocks=10_000)
    cluster["d1"].decode_sequences = 20
    assert cluster.names()[1] == "d1"


def test_a_decode_worker_with_a_full_batch_is_avoided():
    cluster = Cluster("p0", "d1")
    cluster.add("d0", max_num_seqs=2)
    cluster["d0"].decode_sequences, cluster["d0"].decode_tokens = 2, 200
    cluster["d1"].decode_sequences, cluster["d1"].decode_tokens = 20, 2000
    assert cluster.names()[1] == "d1"


def test_a_slow_link_drives_a_pair_apart():
    cluster = Cluster("p0", "p1", "d0", "d1")
    slow, fast = (1e4, 1e12)
    for p, d, bytes_per_s in (("p0", "d0", slow), ("p0", "d1", fast), ("p1", "d0", fast)):
        for _ in range(40):
            cluster[p].forecast.handed_off(cluster[d].slot, int(bytes_per_s), 0.1, 0.901)
    cluster["d1"].decode_sequences = 1
    assert cluster.names()[1] == "d0"
    assert cluster.names()[0] == "p1"


def test_a_prompt_goes_where_its_beginning_can_be_fetched():
    cluster = Cluster("p0", "p1", "d0")
    cluster.attach("p1")
    pair = cluster.choose(pooled=LONG)
    assert pair.prefill is cluster["p1"]
    assert pair.predicted is not None
    assert pair.predicted.fetch_s > 0.0
    assert pair.predicted.prefill_s < 0.1


def test_a_pool_slower_than_computing_is_left_alone():
    cluster = Cluster("p0", "d0")
    cluster.attach("p0")
    cluster.teach_fetch("p0", seconds_per_token=0.1)
    predicted = cluster.choose(pooled=LONG).predicted
    assert predicted is not None
    assert predicted.fetch_s == 0.0


def test_of_two_who_can_fetch_the_one_that_fetches_faster_is_chosen():
    cluster = Cluster("p0", "p1", "d0")
    cluster.attach("p0", "p1")
    cluster.teach_fetch("p0", seconds_per_token=5e-5)
    cluster.teach_fetch("p1", seconds_per_token=5e-6)
    assert cluster.names(pooled=LONG)[0] == "p1"


def test_what_is_held_already_is_not_fetched():
    cluster = Cluster("p0", "d0")
    cluster.attach("p0")
    predicted = cluster.choose(pooled=LONG, held={"p0": LONG}).predicted
    assert predicted is not None
    assert predicted.fetch_s == 0.0


def test_a_prompt_that_the_pool_holds_may_run_where_it_is_decoded():
    local = LocalPrefill(max_tokens=100)
    cluster = Cluster("p0", "d0", local=local)
    cluster["p0"].forecast.queued(LegId(1), 5.0, 0.0)
    assert cluster.choose().kind is RouteKind.PAIR
    cluster.attach("d0")
    assert cluster.choose(pooled=LONG - 50).kind is RouteKind.ON_DECODE


def test_a_pair_is_expected_to_take_the_sum_of_its_parts():
    cluster = Cluster("p0", "d0")
    cluster["p0"].forecast.queued(LegId(1), 2.0, 0.0)
    predicted = cluster.choose(now_s=0.5).predicted
    assert predicted is not None
    assert predicted.queue_s == pytest.approx(1.5)
    parts = predicted.queue_s + predicted.prefill_s + predicted.unhidden_s
    assert predicted.ttft_s == pytest.approx(parts)


def test_ties_go_to_the_lighter_worker_and_then_to_chance():
    cluster = Cluster("p0", "p1", "p2", "d0")
    cluster["p0"].legs = 1
    assert {cluster.names()[0] for _ in range(40)} == {"p1", "p2"}


def test_a_pair_is_never_made_across_layouts():
    cluster = Cluster("p0")
    cluster.add("d0", layout=layout(layers=(LayerName("other"),)))
    assert cluster.choose().kind is RouteKind.NO_PREFILLER


LOCAL = LocalPrefill(max_tokens=500, max_stall_s=0.1)


def queued(*names: str) -> Cluster:
    """A cluster whose prefill workers are busy for two seconds."""
    cluster = Cluster(*names, local=LOCAL)
    for worker in cluster.view.workers:
        if worker.can_prefill:
            worker.forecast.queued(LegId(1), 2.0, 0.0)
    return cluster


def test_a_short_prompt_runs_on_the_decode_worker_when_prefill_workers_are_busy():
    pair = queued("p0", "d0").choose(tokens=400)
    assert pair.kind is RouteKind.ON_DECODE
    assert pair.local


def test_a_mostly_cached_prompt_does_too():
    cluster = queued("p0", "d0")
    assert cluster.choose(held={"d0": LONG - 100}).kind is RouteKind.ON_DECODE
    assert cluster.choose(held={"p0": LONG - 100}).kind is RouteKind.PAIR


def test_a_short_prompt_runs_on_an_idle_prefill_worker():
    assert Cluster("p0", "d0", local=LOCAL).choose(tokens=400).kind is RouteKind.PAIR


def test_a_long_prompt_never_runs_on_a_decode_worker_that_is_not_alone():
    assert queued("p0", "d0").choose(tokens=600).kind is RouteKind.PAIR
    assert Cluster("d0", local=LOCAL).choose(tokens=600).kind is RouteKind.NO_PREFILLER


def test_those_who_decode_are_not_held_up_for_longer_than_allowed():
    cluster = queued("p0", "d0")
    cluster["d0"].decode_sequences, cluster["d0"].decode_tokens = 1, 100
    assert cluster.choose(tokens=400).kind is RouteKind.ON_DECODE
    cluster["d0"].forecast.queued(LegId(2), 0.08, 0.0)
    assert cluster.choose(tokens=400).kind is RouteKind.PAIR


def test_what_many_would_lose_outweighs_what_one_would_gain():
    cluster = queued("p0", "d0")
    cluster["d0"].decode_sequences, cluster["d0"].decode_tokens = 100, 10_000
    assert cluster.choose(tokens=400).kind is RouteKind.PAIR


def test_a_bound_of_nothing_keeps_all_prompts_off_decode_workers():
    cluster = queued("p0", "d0")
    cluster.policy = Predictive(NEVER, fastest_pricing())
    assert cluster.choose(tokens=4).kind is RouteKind.PAIR


def test_a_hybrid_worker_that_is_as_good_does_both():
    cluster = Cluster("h0", "h1")
    assert cluster.choose().kind is RouteKind.HYBRID


def test_a_hybrid_worker_computes_for_one_that_is_busy_computing():
    cluster = Cluster("h0", "h1")
    first, second = sorted(("h0", "h1"), key=lambda name: cluster[name].kv_order)
    cluster[second].forecast.queued(LegId(1), 5.0, 0.0)
    cluster[first].decode_sequences, cluster[first].decode_tokens = 1, 2_000_000
    assert cluster.names() == (first, second)
