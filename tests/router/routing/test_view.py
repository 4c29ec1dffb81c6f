import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import IncompatibleError, InvariantError
from baton.generation import WorkerLoad
from baton.ids import LayerName, Role
from router.breaker import Circuit
from router.routing.index import PrefixIndex
from router.routing.view import ClusterView
from tests.interpreter_steps import steps_of
from tests.router.known_workers import hello, layout


@pytest.fixture
def view() -> ClusterView:
    return ClusterView(PrefixIndex(max_blocks=100), stall_timeout_s=60.0, silence_timeout_s=600.0)


def test_workers_with_equal_layouts_form_a_group(view):
    a = view.join(hello("a", Role.PREFILL), "unix:a", 0.0)
    b = view.join(hello("b", Role.DECODE), "unix:b", 0.0)
    longer = layout(layers=(LayerName("layers.0"), LayerName("layers.1")))
    c = view.join(hello("c", Role.DECODE, layout=longer), "unix:c", 0.0)
    assert a.layout_group == b.layout_group
    assert a.layout_group != c.layout_group


def test_of_groups_of_layers_those_without_a_window_say_how_many_tokens_fit(view):
    plain = view.join(hello("a", Role.DECODE), "unix:a", 0.0)
    grouped = view.join(hello("b", Role.DECODE, layout=layout(windows=(0, 64, 0))), "unix:b", 0.0)
    for worker in (plain, grouped):
        worker.report(WorkerLoad(blocks_used=4), 1.0)

    size = plain.hello.layout.block_tokens
    assert grouped.capacity_tokens == plain.hello.num_blocks // 2 * size
    assert grouped.kv_token_bytes == 2 * plain.kv_token_bytes
    assert (plain.used_tokens, grouped.used_tokens) == (4 * size, 2 * size)


def test_two_workers_cannot_have_one_name(view):
    view.join(hello("a", Role.DECODE), "unix:a", 0.0)
    with pytest.raises(IncompatibleError, match="unix:a has this name"):
        view.join(hello("a", Role.DECODE), "unix:b", 0.0)


def test_losing_an_incarnation_that_is_not_here_changes_nothing(view):
    view.join(hello("a", Role.DECODE, incarnation=2), "unix:a", 0.0)
    assert view.lose(hello("a", Role.DECODE, incarnation=1).identity) is None
    assert len(view.workers) == 1


def test_a_worker_begins_with_what_is_known_of_all_links_whoever_had_its_slot(view):
    prefill = view.join(hello("p", Role.PREFILL), "unix:p", 0.0)
    other = view.join(hello("q", Role.PREFILL), "unix:q", 0.0)
    far, near = (view.join(hello(n, Role.DECODE), f"unix:{n}", 0.0) for n in ("far", "near"))
    for _ in range(30):
        prefill.forecast.handed_off(far.slot, 10**9, 0.01, 10.0)
        other.forecast.handed_off(near.slot, 10**9, 0.01, 0.1)
    learned = other.forecast.link_to(near.slot)
    view.lose(far.identity)
    new = view.join(hello("new", Role.DECODE), "unix:new", 1.0)
    assert new.slot == far.slot
    assert prefill.forecast.link_to(new.slot) is prefill.forecast.link_to(99)
    assert other.forecast.link_to(near.slot) is learned


def test_a_draining_worker_gets_nothing_new(view):
    worker = view.join(hello("a", Role.DECODE), "unix:a", 0.0)
    worker.report(WorkerLoad(draining=True), 1.0)
    assert view.usable(1.0) == ()
    assert view.state(worker, 1.0) == "draining"


def test_a_worker_that_changes_its_role_is_weighed_anew_for_what_it_takes_now(view):
    worker = view.join(hello("a", Role.HYBRID), "unix:a", 0.0)
    before = view.usable(1.0)
    view.change_role(worker.identity, Role.DECODE)
    assert (worker.can_prefill, worker.can_decode, worker.hello.role) == (False, True, Role.DECODE)
    assert view.usable(1.0) == before
    assert view.usable(1.0) is not before, "what policies have prepared for a tuple is void"


def test_the_role_of_an_incarnation_that_is_gone_changes_nothing(view):
    worker = view.join(hello("a", Role.HYBRID, incarnation=2), "unix:a", 0.0)
    view.change_role(hello("a", Role.HYBRID, incarnation=1).identity, Role.DECODE)
    assert worker.can_prefill


def test_a_worker_with_work_and_no_progress_is_stalled_until_it_moves(view):
    worker = view.join(hello("a", Role.DECODE), "unix:a", 0.0)
    worker.legs = 1
    assert view.usable(59.0) == (worker,)
    assert view.usable(61.0) == ()
    worker.report(WorkerLoad(steps=1), 62.0)
    assert view.usable(63.0) == (worker,)


def test_a_worker_that_says_nothing_is_suspected_until_it_is_heard(view):
    worker = view.join(hello("a", Role.DECODE), "unix:a", 0.0)
    assert view.usable(600.0) == (worker,)
    assert view.usable(601.0) == ()
    assert view.state(worker, 601.0) == "suspected"
    worker.report(WorkerLoad(), 602.0)
    assert view.usable(602.0) == (worker,)


def test_an_idle_worker_is_never_stalled(view):
    worker = view.join(hello("a", Role.DECODE), "unix:a", 0.0)
    assert view.state(worker, 500.0) == "ready"


def test_a_report_adds_only_the_work_of_others(view):
    worker = view.join(hello("a", Role.HYBRID), "unix:a", 0.0)
    worker.legs, worker.prefill_tokens, worker.decode_sequences = 3, 100, 3
    worker.report(WorkerLoad(running=4, waiting=1, prefill_tokens_pending=150), 1.0)
    assert worker.queued_prefill_tokens == 150
    assert worker.sequences == 5
    worker.report(WorkerLoad(running=1, prefill_tokens_pending=20), 2.0)
    assert worker.queued_prefill_tokens == 100
    assert worker.sequences == 3


def test_counts_without_a_leg_are_a_broken_invariant(view):
    worker = view.join(hello("a", Role.DECODE), "unix:a", 0.0)
    view.check_integrity()
    worker.decode_tokens = 5
    with pytest.raises(InvariantError):
        view.check_integrity()


def _fail(worker, now_s: float, times: int = 3) -> None:
    for _ in range(times):
        worker.breaker.failed(now_s)


def test_a_worker_whose_legs_keep_failing_is_left_out_for_a_while(view):
    sick, well = (view.join(hello(name, Role.DECODE), f"unix:{name}", 0.0) for name in "ab")
    _fail(sick, 1.0)
    assert view.usable(1.0) == (well,)
    assert view.state(sick, 1.0) == "left out"
    assert view.usable(7.0) == (sick, well), "one leg may try it"
    sick.breaker.started(7.0)
    assert view.usable(7.0) == (well,)
    sick.breaker.succeeded(8.0)
    assert view.usable(8.0) == (sick, well)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_where_all_of_a_role_fail_the_others_are_left(view, role):
    sick = view.join(hello("a", role), "unix:a", 0.0)
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    others = tuple(view.join(hello(name, other), f"unix:{name}", 0.0) for name in "bc")
    _fail(sick, 1.0)
    assert view.usable(1.0) == others
    assert view.usable(7.0) == (sick, *others), "one leg may try it"


def test_where_all_fail_they_are_tried_all_the_same(view):
    names = {"p": Role.PREFILL, "d": Role.DECODE}
    sick = tuple(view.join(hello(name, names[name]), f"unix:{name}", 0.0) for name in names)
    for worker in sick:
        _fail(worker, 1.0)
    assert view.usable(1.0) == sick


def test_a_worker_between_two_roles_is_used_alone_and_only_if_no_other_is_left(view):
    changing = [view.join(hello(name, Role.PREFILL), f"unix:{name}", 0.0) for name in "ab"]
    other = view.join(hello("d", Role.DECODE), "unix:d", 0.0)
    for worker in changing:
        worker.report(WorkerLoad(draining=True, changing_role=True), 0.0)
    changing[0].legs = 1
    assert view.usable(1.0) == (other,)
    view.lose(other.identity)
    assert view.usable(1.0) == (changing[1],)
    changing[1].report(WorkerLoad(draining=True), 1.0)
    assert view.usable(1.0) == (changing[0],)
    assert view.usable(601.0) == (), "it says nothing any more"


def test_a_worker_that_is_started_anew_keeps_its_record_until_it_has_faded(view):
    greeting, restarted = hello("a", Role.DECODE), hello("a", Role.DECODE, incarnation=2)
    well = view.join(hello("b", Role.DECODE), "unix:b", 0.0)
    _fail(view.join(greeting, "unix:a", 0.0), 1.0)
    view.lose(greeting.identity)
    view.join(restarted, "unix:a", 2.0)
    assert view.usable(2.0) == (well,)
    view.lose(restarted.identity)
    again = view.join(hello("a", Role.DECODE, incarnation=3), "unix:a", 1000.0)
    assert again in view.usable(1000.0), "there was time enough for a trial"


def test_a_worker_that_failed_and_is_gone_costs_nothing_and_is_forgotten_in_time(view):
    view.join(hello("b", Role.DECODE), "unix:b", 0.0)
    gone = view.join(hello("a", Role.DECODE), "unix:a", 0.0)
    _fail(gone, 1.0)
    view.lose(gone.identity)
    assert view.usable(2.0) is view.usable(2.0)
    view.join(hello("c", Role.DECODE), "unix:c", 3700.0)
    back = view.join(hello("a", Role.DECODE, incarnation=2), "unix:a", 3701.0)
    _fail(back, 3701.0, times=2)
    assert back in view.usable(3701.0), "its record begins anew"


@pytest.mark.parametrize("away_s", [70.0, 200.0])
def test_a_worker_that_comes_back_now_and_then_to_fail_is_tried_with_one_leg_at_a_time(
    view, away_s
):
    worker, now_s = view.join(hello("a", Role.DECODE), "unix:a", 0.0), 1.0
    _fail(worker, now_s)
    for incarnation in range(2, 6):
        view.lose(worker.identity)
        now_s += away_s
        worker = view.join(hello("a", Role.DECODE, incarnation=incarnation), "unix:a", now_s)
        assert worker.breaker.circuit(now_s) is Circuit.HALF_OPEN
        worker.breaker.started(now_s)
        worker.breaker.failed(now_s)
        assert not worker.breaker.allows(now_s), "the trial failed"


def test_while_all_are_well_the_same_tuple_is_given_again(view):
    worker = view.join(hello("a", Role.DECODE), "unix:a", 0.0)
    first = view.usable(1.0)
    assert view.usable(2.0) is first
    worker.draining = True
    assert view.usable(3.0) == ()


def _drain(worker) -> None:
    worker.draining = True


def _silence(worker) -> None:
    worker.heard_s = -1000.0


def _stall(worker) -> None:
    worker.legs, worker.progress_s = 1, -1000.0


@pytest.mark.parametrize("leave_out", [_drain, _silence, _stall, lambda worker: _fail(worker, 1.0)])
def test_one_worker_that_is_left_out_costs_the_others_nothing(leave_out):
    """Neither what policies have prepared for them, nor a look at each."""

    def asking(workers: int) -> int:
        view = ClusterView(PrefixIndex(max_blocks=100))
        for number in range(workers):
            view.join(hello(f"w{number}", Role.DECODE), f"unix:{number}", 0.0)
        sick, *others = view.workers
        leave_out(sick)
        usable = view.usable(1.0)
        assert usable == tuple(others)
        assert view.usable(1.5) is usable
        return steps_of(lambda: view.usable(2.0))

    assert asking(200) == asking(3)


def test_a_worker_that_is_heard_again_is_used_again_at_once(view):
    silent, other = (view.join(hello(name, Role.DECODE), f"unix:{name}", 0.0) for name in "ab")
    other.heard_s = 500.0
    assert view.usable(601.0) == (other,)
    silent.report(WorkerLoad(), 601.0)
    assert view.usable(601.0) == (silent, other)


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("join", "lose", "report", "drain", "open", "close", "step", "wait")),
        st.sampled_from("abc"),
        st.floats(0.0, 40.0),
    ),
    max_size=40,
)


@given(_EVENTS)
def test_whatever_happens_exactly_those_that_are_ready_may_be_used(events):
    view = ClusterView(PrefixIndex(max_blocks=100), stall_timeout_s=30.0, silence_timeout_s=20.0)
    now_s = 0.0
    for what, name, passed_s in events:
        now_s += passed_s
        happen(view, what, name, now_s)
        ready = [w.identity for w in view.workers if view.state(w, now_s) == "ready"]
        assert [w.identity for w in view.usable(now_s)] == ready
    view.check_integrity()


def happen(view: ClusterView, what: str, name: str, now_s: float) -> None:
    greeting = hello(name, Role.DECODE)
    worker = view.find(greeting.identity.worker_id)
    if worker is None:
        if what == "join":
            view.join(greeting, f"unix:{name}", now_s)
    elif what == "lose":
        view.lose(greeting.identity)
    elif what in ("report", "drain"):
        steps = worker.load.steps + (worker.legs == 0)
        worker.report(WorkerLoad(steps=steps, draining=what == "drain"), now_s)
    elif what == "open":
        worker.progress_s = worker.progress_s if worker.legs else now_s
        worker.legs += 1
    elif what == "close":
        worker.legs = max(0, worker.legs - 1)
    elif what == "step" and worker.legs:
        worker.progress_s = worker.heard_s = now_s
