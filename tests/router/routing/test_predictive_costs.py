"""The terms that `predictive` adds up, and the pass over all workers that sorts them."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import LegId, Role
from router.routing.index import PrefixIndex
from router.routing.policy import Demand
from router.routing.pools import NO_SLOT
from router.routing.predictive import (
    decode_s,
    predict,
    prefill_and_decode_s,
    prefill_s,
    shortlist,
)
from router.routing.view import ClusterView, WorkerView
from tests.router.known_workers import hello

counts = st.integers(0, 300)
tokens = st.integers(0, 20_000)


def worker_of(draw: st.DataObject) -> WorkerView:
    view = ClusterView(PrefixIndex())
    greeting = hello("h0", Role.HYBRID, num_blocks=draw.draw(tokens), max_num_seqs=100)
    worker = view.join(greeting, "unix:h0", 0.0)
    worker.decode_sequences, worker.decode_tokens = draw.draw(counts), draw.draw(tokens)
    worker.foreign_sequences, worker.foreign_prefill_tokens = draw.draw(counts), draw.draw(tokens)
    worker.used_tokens, worker.reported_context_tokens = draw.draw(tokens), draw.draw(tokens)
    worker.forecast.queued(LegId(1), draw.draw(st.floats(0.0, 5.0)), 0.0)
    worker.pool_slot = draw.draw(st.sampled_from([NO_SLOT, 1]))
    worker.forecast.fetched(1, 1000, draw.draw(st.sampled_from([1e-3, 1.0, 1e3])))
    return worker


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 20_000), tokens, tokens, st.floats(0.0, 10.0))
def test_the_pass_over_all_workers_gives_each_its_terms(data, prompt, held, in_pool, now_s):
    worker = worker_of(data)
    demand = Demand(tokens=prompt, samples=2, held={worker.slot: held, 1: in_pool}, now_s=now_s)
    rng = Random(0)
    for cost, expected in (
        (prefill_s, prefill_s(worker, demand)),
        (decode_s, decode_s(worker, demand)),
        (prefill_and_decode_s, prefill_s(worker, demand) + decode_s(worker, demand)),
    ):
        [(milliseconds, _, _, cost_s, who)] = shortlist([worker], cost, demand, rng)
        assert who is worker
        assert cost_s == pytest.approx(expected)
        assert milliseconds == pytest.approx(1000 * expected, abs=1.001, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 20_000))
def test_the_parts_of_a_prediction_add_up_to_the_cost(data, prompt):
    worker = worker_of(data)
    demand = Demand(tokens=prompt, samples=1, held={})
    parts = predict(worker, worker, demand)
    waiting_s = parts.ttft_s + parts.harm_s
    total_s = waiting_s + parts.room_s + demand.output_tokens * parts.tbt_s
    assert total_s == pytest.approx(prefill_s(worker, demand) + decode_s(worker, demand))
