"""The fallbacks that lead through the pool."""

import pytest

from baton.errors import CancelledByPeerError
from baton.generation import WorkerLoad
from baton.ids import LegKind
from router.dispatch.actions import Finish, SendCancel, SendLeg
from router.dispatch.events import LegWriterLost, LoadReported, Pooled, WorkerLost
from router.dispatch.placement import Placement
from router.dispatch.retry import Fallback, RetryPolicy
from tests.router.dispatch.test_dispatcher import (
    Core,
    cancelled,
    decoded,
    failed,
    first_tokens,
    legs_sent,
    sent,
    start_pair,
    tokens_in,
)
from tests.router.known_workers import drawn


def _put_in_pool(to: SendLeg) -> Pooled:
    return Pooled(worker=to.worker, leg_id=to.leg_id)


def _writer_lost(to: SendLeg) -> LegWriterLost:
    error = CancelledByPeerError("given up")
    return LegWriterLost(worker=to.worker, leg_id=to.leg_id, attempt=1, error=error)


def pooled(core: Core, **nodes: str) -> None:
    """Has workers say which node's memory they map; by default all map one."""
    for worker in core.view.workers:
        node = nodes.get(worker.identity.worker_id, "pool-0")
        load = WorkerLoad(pool_node=node, pool_incarnation=1)
        core(LoadReported(worker=worker.identity, load=load))


def test_a_prompt_without_room_is_fetched_by_the_same_worker_once_it_has_room():
    core = Core()
    core.join("p0", "d0", "d1")
    pooled(core)
    p, d = start_pair(core, max_tokens=3)
    core(first_tokens(p, drawn(0, 0, 3)))
    actions = core(_put_in_pool(p))
    assert cancelled(actions) == {d.leg_id}
    local = sent(actions, LegKind.GENERATE)
    assert local.worker == d.worker
    assert local.prompt.tokens == (*range(10), drawn(0, 0, 3).token)
    assert core.dispatcher.retry_counters.fallbacks == {Fallback.NO_ROOM: 1}
    assert core.dispatcher.retry_counters.retries == core.dispatcher.retry_counters.resumptions == 0
    assert tokens_in(core(decoded(local, drawn(0, 1, 3)))) == [drawn(0, 1, 3)]
    assert sent(core(decoded(local, drawn(0, 2, 3))), Finish).timing.output_tokens == 3
    core.assert_empty()


def test_each_sample_that_goes_on_fetches_the_prompt_for_itself():
    core = Core()
    core.join("p0", "d0")
    pooled(core)
    p, _ = start_pair(core, samples=(0, 1, 2), max_tokens=3)
    core(first_tokens(p, drawn(0, 0, 3), drawn(1, 0, 3), drawn(2, 0, 1)))
    actions = core(_put_in_pool(p))
    local = legs_sent(actions, LegKind.GENERATE)
    assert [one.prompt.samples for one in local] == [(0,), (1,)]


def test_a_worker_that_is_lost_while_its_prompt_lies_in_the_pool_is_replaced():
    core = Core()
    core.join("p0", "d0", "d1")
    pooled(core)
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    core(_put_in_pool(p))
    actions = core(WorkerLost(worker=d.worker, reason="killed"))
    assert sent(actions, LegKind.RECEIVE).worker != d.worker
    assert core.dispatcher.retry_counters.fallbacks == {
        Fallback.NO_ROOM: 1,
        Fallback.ANOTHER_PAIR: 1,
    }


@pytest.mark.parametrize("node", ["", "pool-of-another-host"])
def test_a_worker_that_cannot_fetch_a_prompt_does_not_compute_it_among_those_who_decode(node):
    core = Core()
    core.join("p0", "d0")
    pooled(core, d0=node)
    p, _ = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    actions = core(_put_in_pool(p))
    assert sent(actions, LegKind.PREFILL).worker == p.worker
    assert core.dispatcher.retry_counters.fallbacks == {Fallback.ANOTHER_PAIR: 1}


def test_a_prompt_without_room_is_fetched_also_where_d_says_first_that_nobody_writes_any_more():
    core = Core()
    core.join("p0", "p1", "d0")
    pooled(core)
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    assert core(_writer_lost(d)) == []
    assert sent(core(_put_in_pool(p)), LegKind.GENERATE).worker == d.worker
    assert core.dispatcher.retry_counters.fallbacks == {Fallback.NO_ROOM: 1}


def test_a_prompt_in_the_pool_whose_pages_d_has_given_up_goes_to_any_pair():
    core = Core()
    core.join("p0", "d0")
    pooled(core)
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    assert core(failed(d, _writer_lost(d).error)) == []
    actions = core(_put_in_pool(p))
    assert sent(actions, LegKind.PREFILL).worker == p.worker
    assert core.dispatcher.retry_counters.fallbacks == {Fallback.ANOTHER_PAIR: 1}


def test_a_prompt_that_is_put_before_its_first_tokens_breaks_the_contract():
    core = Core()
    core.join("p0", "p1", "d0")
    p, _ = start_pair(core)
    actions = core(_put_in_pool(p))
    assert p.leg_id in cancelled(actions)
    assert sent(actions, LegKind.PREFILL).worker != p.worker


def test_a_prompt_that_is_put_after_it_was_handed_over_changes_nothing():
    core = Core()
    core.join("p0", "d0")
    p, d = start_pair(core)
    core(first_tokens(p, drawn(0, 0, 4)))
    core(decoded(d, drawn(0, 1, 4)))
    actions = core(_put_in_pool(p))
    assert not [a for a in actions if not isinstance(a, SendCancel)]
    assert tokens_in(core(decoded(d, drawn(0, 2, 4)))) == [drawn(0, 2, 4)]


def _orphaned(core: Core) -> SendLeg | None:
    """The prefill worker dies, and there is another one that was tried already."""
    p, d = start_pair(core)
    again = core(WorkerLost(worker=p.worker, reason="killed"))
    taken = sent(again, LegKind.PREFILL)
    core.join("p2")
    actions = core(WorkerLost(worker=taken.worker, reason="killed"))
    local = legs_sent(actions, LegKind.GENERATE)
    assert not local or local[0].worker == d.worker
    return local[0] if local else None


def test_what_the_pool_holds_need_not_be_short(monkeypatch):
    core = Core(policy=RetryPolicy(recompute_tokens=4, max_attempts=5))
    core.join("p0", "p1", "d0")
    monkeypatch.setattr(Placement, "pooled_tokens", lambda *_: 8)
    assert _orphaned(core) is not None
    assert core.dispatcher.retry_counters.fallbacks == {
        Fallback.ANOTHER_PREFILL_WORKER: 1,
        Fallback.POOL: 1,
    }


def test_what_the_pool_does_not_hold_and_is_not_short_is_computed_elsewhere():
    core = Core(policy=RetryPolicy(recompute_tokens=4, max_attempts=5))
    core.join("p0", "p1", "d0")
    assert _orphaned(core) is None
    assert core.dispatcher.retry_counters.fallbacks == {
        Fallback.ANOTHER_PREFILL_WORKER: 1,
        Fallback.ANOTHER_PAIR: 1,
    }
