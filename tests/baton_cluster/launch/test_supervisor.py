import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.backoff import Backoff
from baton.errors import ModelLoadError
from baton.ids import Incarnation
from baton_cluster.launch.supervisor import (
    FORGIVEN_S,
    KILL_GRACE_S,
    SERVED_S,
    AnnounceJoined,
    AnnounceLeft,
    AnnounceReady,
    AnnounceRecovered,
    AnnounceRestart,
    ChildAdded,
    ChildExited,
    ChildFatal,
    ChildProgress,
    ChildReady,
    ChildRetired,
    ChildState,
    GiveUp,
    Kill,
    Member,
    StartProcess,
    Stop,
    StopRequested,
    Supervisor,
    SupervisorPolicy,
    Tick,
)

POLICY = SupervisorPolicy(
    restart_backoff=Backoff(first_s=1.0, max_s=8.0), startup_timeout_s=30.0, drain_timeout_s=10.0
)
POOL = Member(name="pool-0", stop_rank=2, is_needed=False)
MEMBERS = (
    Member(name="prefill-0", stop_rank=1),
    Member(name="decode-0", stop_rank=1),
    Member(name="router", stop_rank=0),
)


class Cluster:
    """A supervisor with a clock and processes that do as they are told."""

    def __init__(self, members=MEMBERS):
        numbers = itertools.count(1)
        self.now_s = 100.0
        self.supervisor = Supervisor(
            members, POLICY, new_incarnation=lambda: Incarnation(next(numbers)), now_s=self.now_s
        )
        self.running: dict[str, Incarnation] = {}
        self.incarnations: list[Incarnation] = []

    def handle(self, event):
        actions = self.supervisor.handle(event, self.now_s)
        self.supervisor.check_integrity()
        for action in actions:
            if isinstance(action, StartProcess):
                assert action.name not in self.running, "started while its process lives"
                self.running[action.name] = action.incarnation
                self.incarnations.append(action.incarnation)
            if isinstance(action, Stop | Kill):
                assert action.name in self.running, "signalled without a process"
        return actions

    def tick(self, after_s=0.0):
        self.now_s += after_s
        return self.handle(Tick())

    def ready(self, name):
        return self.handle(ChildReady(name=name, incarnation=self.running[name]))

    def exit(self, name, returncode=-9):
        incarnation = self.running.pop(name)
        return self.handle(ChildExited(name=name, incarnation=incarnation, returncode=returncode))

    def fatal(self, name, error):
        incarnation = self.running[name]
        return self.handle(ChildFatal(name=name, incarnation=incarnation, error=error))


def launched(members=MEMBERS) -> Cluster:
    cluster = Cluster(members)
    cluster.tick()
    for name in list(cluster.running):
        cluster.ready(name)
    return cluster


def test_all_children_start_at_once_and_the_last_to_be_ready_makes_the_cluster_ready():
    cluster = Cluster()
    assert [action.name for action in cluster.tick()] == ["prefill-0", "decode-0", "router"]
    assert cluster.ready("router") == []
    assert cluster.ready("prefill-0") == []
    assert cluster.ready("decode-0") == [AnnounceReady()]


def test_a_child_that_ends_before_it_was_ever_ready_ends_the_launch_with_its_reason():
    cluster = Cluster()
    cluster.tick()
    cluster.ready("router")
    error = ModelLoadError("no such model")
    cluster.fatal("decode-0", error)
    actions = cluster.exit("decode-0", 1)
    assert actions == [GiveUp(error=error), Stop(name="router")]
    assert cluster.exit("router", 0) == [Stop(name="prefill-0")]
    cluster.exit("prefill-0", 0)
    assert cluster.supervisor.finished


def test_a_child_that_dies_without_a_word_during_the_launch_is_reported_by_its_signal():
    cluster = Cluster()
    cluster.tick()
    give_up = cluster.exit("decode-0", -9)[0]
    assert give_up.error.message == "decode-0 was killed by signal 9 while starting"


def test_a_crash_after_the_launch_starts_the_child_again_under_a_new_incarnation():
    cluster = launched()
    before = cluster.running["decode-0"]
    [announcement] = cluster.exit("decode-0")
    assert announcement == AnnounceRestart(
        name="decode-0", after_s=1.0, reason="was killed by signal 9"
    )
    assert cluster.tick(after_s=0.9) == []
    [start] = cluster.tick(after_s=0.1)
    assert start.name == "decode-0"
    assert start.incarnation != before
    assert cluster.ready("decode-0") == [AnnounceRecovered(name="decode-0")]


def test_the_cluster_is_not_ready_while_one_of_its_children_waits_for_a_restart():
    cluster = Cluster()
    cluster.tick()
    cluster.ready("decode-0")
    cluster.exit("decode-0")
    assert cluster.ready("router") == []
    assert cluster.ready("prefill-0") == []
    cluster.tick(after_s=1.0)
    assert cluster.ready("decode-0") == [AnnounceReady()]


def test_an_error_at_a_later_start_is_tried_again_and_told():
    cluster = launched()
    cluster.exit("decode-0")
    cluster.tick(after_s=1.0)
    cluster.fatal("decode-0", ModelLoadError("disk is gone"))
    [announcement] = cluster.exit("decode-0", 1)
    assert announcement.reason == "ended with status 1: disk is gone"


def waits_of(cluster: Cluster, crashes: int, *, ready_for_s: float) -> list[float]:
    waits = []
    for _ in range(crashes):
        cluster.now_s += ready_for_s
        [announcement] = cluster.exit("decode-0")
        waits.append(announcement.after_s)
        cluster.tick(after_s=announcement.after_s)
        cluster.ready("decode-0")
    return waits


def test_the_wait_doubles_up_to_its_maximum():
    assert waits_of(launched(), 6, ready_for_s=0.0) == [1, 2, 4, 8, 8, 8]


def test_a_child_that_has_served_starts_again_at_once_and_after_each_further_end_in_a_row_later():
    assert waits_of(launched(), 6, ready_for_s=SERVED_S) == [0, 1, 2, 4, 8, 8]


def test_a_child_that_serves_between_its_ends_starts_again_at_once_each_time():
    assert waits_of(launched(), 20, ready_for_s=FORGIVEN_S) == [0] * 20


def test_ends_of_a_child_that_served_and_of_one_that_did_not_are_counted_together():
    cluster = launched()
    assert waits_of(cluster, 2, ready_for_s=0.0) == [1, 2]
    assert waits_of(cluster, 1, ready_for_s=SERVED_S) == [2]
    assert waits_of(cluster, 1, ready_for_s=0.0) == [8]


def test_the_ends_of_a_child_that_was_ready_for_a_minute_are_forgiven():
    cluster = launched()
    assert waits_of(cluster, 20, ready_for_s=0.0)[-1] == POLICY.restart_backoff.max_s
    assert waits_of(cluster, 1, ready_for_s=60.0) == [0]
    assert waits_of(cluster, 2, ready_for_s=0.0) == [2, 4]


@given(st.integers(0, 5000))
@settings(max_examples=20)
def test_however_often_a_child_crashes_the_wait_stays_within_its_bounds(crashes):
    waits = waits_of(launched(), min(crashes, 1500), ready_for_s=0.0)
    assert all(1.0 <= wait <= 8.0 for wait in waits)


def test_a_start_that_shows_no_progress_is_killed_and_ends_the_launch():
    cluster = Cluster()
    cluster.tick()
    cluster.ready("router")
    cluster.ready("prefill-0")
    cluster.now_s += 20
    progress = ChildProgress(
        name="decode-0", incarnation=cluster.running["decode-0"], what="loading", done=0.5
    )
    cluster.handle(progress)
    assert cluster.tick(after_s=29) == []
    assert cluster.tick(after_s=1) == [Kill(name="decode-0")]
    give_up = cluster.exit("decode-0")[0]
    assert give_up.error.message == "decode-0 made no progress for 30 s while starting"


def test_a_stop_lets_the_router_drain_before_the_workers_are_asked_to_go():
    cluster = launched()
    assert cluster.handle(StopRequested()) == [Stop(name="router")]
    assert cluster.exit("router", 0) == [Stop(name="prefill-0"), Stop(name="decode-0")]
    cluster.exit("prefill-0", 0)
    assert not cluster.supervisor.finished
    cluster.exit("decode-0", 0)
    assert cluster.supervisor.finished


def test_a_child_that_does_not_go_is_killed_once_after_the_drain_timeout():
    cluster = launched()
    cluster.handle(StopRequested())
    assert cluster.tick(after_s=10 + KILL_GRACE_S - 1) == []
    assert cluster.tick(after_s=1) == [Kill(name="router")]
    assert cluster.supervisor.next_deadline_s() is None


def test_a_second_stop_request_kills_everything_at_once():
    cluster = launched()
    cluster.handle(StopRequested())
    assert cluster.handle(StopRequested()) == [
        Kill(name="prefill-0"),
        Kill(name="decode-0"),
        Kill(name="router"),
    ]


def test_a_child_that_waits_for_its_restart_is_not_started_once_a_stop_is_asked_for():
    cluster = launched()
    cluster.exit("decode-0")
    cluster.handle(StopRequested())
    assert cluster.supervisor.state("decode-0") is ChildState.GONE
    assert not [a for a in cluster.tick(after_s=1000) if isinstance(a, StartProcess)]


def test_what_is_not_needed_is_not_waited_for():
    cluster = Cluster((POOL, *MEMBERS))
    cluster.tick()
    cluster.ready("router")
    cluster.ready("prefill-0")
    assert cluster.ready("decode-0") == [AnnounceReady()]
    assert cluster.ready("pool-0") == []


def test_what_is_not_needed_may_fail_at_its_first_start_and_is_tried_again():
    cluster = Cluster((POOL, *MEMBERS))
    cluster.tick()
    cluster.fatal("pool-0", ModelLoadError("no room"))
    assert cluster.exit("pool-0", 1) == [
        AnnounceRestart(
            name="pool-0", after_s=1.0, reason="ended with status 1: no room", was_ready=False
        )
    ]
    assert [action.name for action in cluster.tick(after_s=1.0)] == ["pool-0"]
    assert cluster.ready("pool-0") == [AnnounceRecovered(name="pool-0")]


def test_the_pool_is_stopped_after_those_who_use_it():
    cluster = launched((POOL, *MEMBERS))
    cluster.handle(StopRequested())
    cluster.exit("router", 0)
    assert cluster.exit("prefill-0", 0) == []
    assert cluster.exit("decode-0", 0) == [Stop(name="pool-0")]


def test_late_news_of_an_earlier_incarnation_is_ignored():
    cluster = launched()
    old = cluster.running["decode-0"]
    cluster.exit("decode-0")
    cluster.tick(after_s=1.0)
    assert cluster.handle(ChildReady(name="decode-0", incarnation=old)) == []
    assert cluster.handle(ChildExited(name="decode-0", incarnation=old, returncode=1)) == []
    assert cluster.supervisor.state("decode-0") is ChildState.STARTING


def test_the_story_of_a_child_has_its_events_and_what_was_done_about_them():
    cluster = launched()
    cluster.exit("decode-0", -9)
    cluster.tick(1.0)

    story = [str(entry) for entry in cluster.supervisor.story("decode-0")]

    assert len(story) == 4
    assert "ChildReady" in story[1]
    assert "ChildExited" in story[2]
    assert "AnnounceRestart" in story[2]
    assert "StartProcess(incarnation=" in story[3]
    assert not any("name=" in line for line in story), "nothing of another child"


def add(cluster, name="decode-1"):
    assert cluster.handle(ChildAdded(name=name, stop_rank=1)) == []
    return [action.name for action in cluster.tick()]


def test_an_added_child_starts_at_once_and_is_announced_when_it_serves():
    cluster = launched()
    assert add(cluster) == ["decode-1"]
    assert cluster.ready("decode-1") == [AnnounceJoined(name="decode-1")]


def test_an_added_child_that_cannot_start_is_tried_again_and_ends_nothing():
    cluster = launched()
    add(cluster)
    cluster.fatal("decode-1", ModelLoadError("no room"))
    [announcement] = cluster.exit("decode-1", 1)
    assert announcement == AnnounceRestart(
        name="decode-1", after_s=1.0, reason="ended with status 1: no room", was_ready=False
    )


def test_a_retired_child_is_asked_to_end_killed_after_the_drain_timeout_and_forgotten():
    cluster = launched()
    assert cluster.handle(ChildRetired(name="decode-0")) == [Stop(name="decode-0")]
    assert cluster.handle(ChildRetired(name="decode-0")) == []
    assert cluster.tick(after_s=10 + KILL_GRACE_S) == [Kill(name="decode-0")]
    assert cluster.exit("decode-0") == [AnnounceLeft(name="decode-0")]
    assert cluster.tick(after_s=1000) == []


def test_a_retired_child_that_waits_for_its_restart_is_forgotten_at_once():
    cluster = launched()
    cluster.exit("decode-0")
    assert cluster.handle(ChildRetired(name="decode-0")) == [AnnounceLeft(name="decode-0")]
    assert cluster.tick(after_s=1000) == []


def test_a_child_that_is_wanted_again_while_it_ends_starts_once_it_is_gone():
    cluster = launched()
    cluster.handle(ChildRetired(name="decode-0"))
    assert add(cluster, "decode-0") == []
    assert cluster.exit("decode-0", 0) == []
    assert [action.name for action in cluster.tick()] == ["decode-0"]


def test_a_cluster_that_stops_waits_for_a_retired_child_and_starts_none_that_was_added():
    cluster = launched()
    cluster.handle(ChildRetired(name="decode-0"))
    cluster.handle(ChildAdded(name="decode-1", stop_rank=1))
    assert cluster.handle(StopRequested()) == [Stop(name="router")]
    assert cluster.tick() == []
    assert cluster.exit("router", 0) == [Stop(name="prefill-0")]
    cluster.exit("prefill-0", 0)
    assert not cluster.supervisor.finished
    cluster.exit("decode-0", 0)
    assert cluster.supervisor.finished


class AnyHistory(RuleBasedStateMachine):
    """Children that do what they like, at any time, and an operator who may stop the cluster."""

    @initialize(size=st.integers(1, 4), with_pool=st.booleans())
    def begin(self, size, with_pool):
        names = ["router", "prefill-0", "decode-0", "decode-1"][:size]
        members = [Member(name=n, stop_rank=int(n != "router")) for n in names]
        self.cluster = Cluster([POOL, *members] if with_pool else members)
        self.stopped = False
        self.retired: set[str] = set()

    def _take(self, actions):
        if self.stopped:
            assert not [a for a in actions if isinstance(a, StartProcess)], "started after a stop"
        if any(isinstance(a, GiveUp) for a in actions):
            self.stopped = True
        for action in actions:
            if (
                isinstance(action, Stop)
                and action.name != "router"
                and action.name not in self.retired
            ):
                assert "router" not in self.cluster.running, "a worker was stopped first"
            if isinstance(action, Stop) and action.name == POOL.name:
                assert set(self.cluster.running) == {POOL.name}, "the pool was stopped first"
            if isinstance(action, GiveUp):
                assert POOL.name not in action.error.message, "given up for want of a pool"

    @rule(after_s=st.floats(0, 100))
    def time_passes(self, after_s):
        self._take(self.cluster.tick(after_s))

    @rule()
    def the_next_deadline_comes(self):
        deadline_s = self.cluster.supervisor.next_deadline_s()
        if deadline_s is not None:
            self._take(self.cluster.tick(max(0.0, deadline_s - self.cluster.now_s)))
            after = self.cluster.supervisor.next_deadline_s()
            assert after is None or after > self.cluster.now_s, "a tick that changes nothing"

    @precondition(lambda self: self.cluster.running)
    @rule(data=st.data())
    def a_child_is_ready(self, data):
        self._take(self.cluster.ready(data.draw(st.sampled_from(sorted(self.cluster.running)))))

    @precondition(lambda self: self.cluster.running)
    @rule(data=st.data(), speaks=st.booleans(), returncode=st.sampled_from([0, 1, -9]))
    def a_child_ends(self, data, speaks, returncode):
        name = data.draw(st.sampled_from(sorted(self.cluster.running)))
        if speaks:
            self._take(self.cluster.fatal(name, ModelLoadError(f"{name}: x")))
        self._take(self.cluster.exit(name, returncode))

    @rule(name=st.sampled_from(["prefill-0", "decode-0", "decode-1", "decode-2"]))
    def the_operator_adds_a_worker(self, name):
        self._take(self.cluster.handle(ChildAdded(name=name, stop_rank=1)))

    @rule(name=st.sampled_from(["prefill-0", "decode-0", "decode-1", "decode-2"]))
    def the_operator_retires_a_worker(self, name):
        self.retired.add(name)
        self._take(self.cluster.handle(ChildRetired(name=name)))
        self.retired.clear()

    @rule()
    def the_operator_stops_it(self):
        self._take(self.cluster.handle(StopRequested()))
        self.stopped = True

    @invariant()
    def processes_and_states_agree(self):
        if not hasattr(self, "cluster"):
            return
        assert len(set(self.cluster.incarnations)) == len(self.cluster.incarnations)
        if self.cluster.supervisor.finished:
            assert not self.cluster.running

    def teardown(self):
        if not hasattr(self, "cluster"):
            return
        self.the_operator_stops_it()
        while self.cluster.running:
            self._take(self.cluster.exit(min(self.cluster.running), 0))
        assert self.cluster.supervisor.finished


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
