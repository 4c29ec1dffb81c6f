from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import Role
from router.roles.sizing import Resize, SizingLook, SizingPolicy, WorkerCountPlanner

POLICY = SizingPolicy(
    least=2,
    most=8,
    high=0.8,
    low=0.5,
    sustained_s=10.0,
    cooldown_s=30.0,
    start_timeout_s=600.0,
    pinned_s=900.0,
)


@dataclass(eq=False)
class Cluster:
    """Workers that come `start_s` after they are asked for, and loads in workers' worth of time."""

    prefill: int = 1
    decode: int = 1
    start_s: int = 5
    policy: SizingPolicy = POLICY
    loads: dict[Role, float] = field(default_factory=dict)
    flip_is_near: bool = False

    def __post_init__(self) -> None:
        self.planner = WorkerCountPlanner(self.policy)
        self.now_s = 0.0
        self.pools = {"prefill": self.prefill, "decode": self.decode, "hybrid": 0}
        self.there = {f"{pool}-{i}" for pool, count in self.pools.items() for i in range(count)}
        self.starting: list[tuple[float, str]] = []
        self.resizes: list[Resize] = []
        self.flipped: dict[str, Role] = {}

    def pressure(self, role: Role, workers: int) -> float:
        return self.loads.get(role, 0.0) / workers if workers else float("inf")

    def roles(self) -> dict[str, Role]:
        names = {name: Role(name.split("-")[0]) for name in self.there}
        return names | {name: role for name, role in self.flipped.items() if name in names}

    def run(self, seconds: int, *, changes: bool = True) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            for due_s, name in [one for one in self.starting if one[0] <= self.now_s]:
                self.starting.remove((due_s, name))
                self.there.add(name)
            look = SizingLook(
                pools=dict(self.pools),
                connected=set(self.there),
                roles=self.roles(),
                pressure=self.pressure,
                flip_is_near=self.flip_is_near,
            )
            resize = self.planner.look(look, self.now_s)
            if resize is None:
                continue
            self.resizes.append(resize)
            if changes:
                name = f"{resize.pool}-{min(resize.workers, self.pools[resize.pool])}"
                if resize.workers > self.pools[resize.pool]:
                    self.starting.append((self.now_s + self.start_s, name))
                else:
                    self.there.discard(name)
                    self.starting = [one for one in self.starting if one[1] != name]
                self.pools[resize.pool] = resize.workers
            self.planner.resized(self.now_s, outcome="done", changed=changes)

    def asked(self) -> list[tuple[str, int]]:
        return [(one.pool, one.workers) for one in self.resizes]


def test_a_pool_with_too_much_to_do_for_a_while_gets_one_worker_after_the_other():
    cluster = Cluster(loads={Role.PREFILL: 0.3, Role.DECODE: 2.0})
    cluster.run(10)
    assert cluster.asked() == []
    cluster.run(150)
    assert cluster.asked() == [("decode", 2), ("decode", 3)]
    assert "pressure 2.00 of 1, 1.00 is predicted for 2" in cluster.resizes[0].why


def test_no_worker_is_asked_for_while_one_is_on_its_way():
    cluster = Cluster(start_s=500, loads={Role.DECODE: 5.0})
    cluster.run(400)
    assert cluster.asked() == [("decode", 2)]
    assert cluster.planner.verdict == "2 of 3 workers are there"


NEVER = 1_000_000


def test_a_worker_that_never_comes_holds_up_no_other_for_longer_than_one_may_take_to_start():
    cluster = Cluster(start_s=NEVER, loads={Role.DECODE: 1.0})
    cluster.run(11)
    assert cluster.asked() == [("decode", 2)]
    cluster.run(int(POLICY.start_timeout_s) - 1)
    assert cluster.planner.verdict == "2 of 3 workers are there"
    cluster.run(12)
    assert cluster.asked() == [("decode", 2), ("decode", 3)]


def test_of_a_pool_with_little_to_do_the_worker_that_is_not_there_goes_first_and_alone():
    cluster = Cluster(prefill=3, decode=3, loads={Role.PREFILL: 1.2, Role.DECODE: 0.8})
    cluster.there.remove("decode-2")
    cluster.run(int(POLICY.start_timeout_s))
    assert cluster.asked() == []
    cluster.run(200)
    assert cluster.asked() == [("decode", 2)], "0.40 for the two that are there, and 0.80 for one"
    assert cluster.resizes[0].why == (
        "one worker less, decode-2, which is not there:"
        " pressure 0.40 is predicted for 2 decode workers"
    )
    assert cluster.planner.verdict == "every worker is needed"


def test_while_a_worker_is_missing_another_that_is_not_needed_ends_all_the_same():
    cluster = Cluster(prefill=1, decode=4, loads={Role.PREFILL: 0.6, Role.DECODE: 0.6})
    cluster.there.remove("decode-1")
    cluster.run(int(POLICY.start_timeout_s) + 50)
    assert cluster.asked() == [("decode", 3)], "0.30 for two of three"


def test_a_worker_that_comes_and_goes_is_not_waited_for_each_time():
    cluster = Cluster(prefill=1, decode=2, loads={Role.DECODE: 3.0})
    for _ in range(int(POLICY.start_timeout_s) // 8 + 10):
        cluster.there.discard("decode-1")
        cluster.run(5)
        cluster.there.add("decode-1")
        cluster.run(3)
    assert ("decode", 3) in cluster.asked()


def test_a_worker_that_is_lost_is_waited_for():
    cluster = Cluster(prefill=1, decode=3, loads={Role.PREFILL: 0.6, Role.DECODE: 1.7})
    cluster.run(2000)
    assert cluster.asked() == []
    cluster.there.remove("decode-2")
    cluster.run(int(POLICY.start_timeout_s) - 1)
    assert cluster.asked() == []
    assert cluster.planner.verdict == "3 of 4 workers are there"
    cluster.there.add("decode-2")
    cluster.run(100)
    assert cluster.asked() == []


def test_roles_change_first():
    cluster = Cluster(loads={Role.DECODE: 5.0}, flip_is_near=True)
    cluster.run(100)
    assert cluster.asked() == []
    assert cluster.planner.verdict == "roles change first"


def test_workers_that_are_not_needed_end_down_to_the_least():
    cluster = Cluster(prefill=3, decode=3)
    cluster.run(400)
    assert cluster.pools == {"prefill": 1, "decode": 1, "hybrid": 0}


def test_none_ends_before_enough_has_been_averaged():
    cluster = Cluster(prefill=3, decode=3)
    cluster.run(int(POLICY.warm_up_s))
    assert cluster.asked() == []
    cluster.planner.stand_by()
    cluster.run(int(POLICY.warm_up_s))
    assert cluster.asked() == []
    cluster.run(20)
    assert len(cluster.asked()) == 1


def test_a_short_peak_changes_nothing():
    cluster = Cluster(prefill=2, decode=2, loads={Role.PREFILL: 1.2, Role.DECODE: 1.2})
    for _ in range(10):
        cluster.loads[Role.DECODE] = 9.0
        cluster.run(8)
        cluster.loads[Role.DECODE] = 1.2
        cluster.run(8)
    assert cluster.asked() == []


def test_the_worker_that_would_end_counts_in_the_pool_whose_role_it_has_now():
    cluster = Cluster(prefill=2, decode=2, loads={Role.PREFILL: 0.1, Role.DECODE: 2.0})
    cluster.flipped = {"prefill-1": Role.DECODE, "decode-1": Role.DECODE}
    cluster.run(200)
    assert cluster.asked() == [], "three decode at 0.67 each; two would have 1.00"


def test_an_operators_numbers_are_left_alone_for_a_while():
    cluster = Cluster(loads={Role.DECODE: 5.0})
    cluster.run(5)
    cluster.pools["decode"] = 2
    cluster.there.add("decode-1")
    cluster.run(800)
    assert cluster.asked() == []
    assert "an operator decides on the numbers" in str(cluster.planner.story())
    cluster.run(200)
    assert cluster.asked()[0] == ("decode", 3)


def test_a_dry_run_decides_again_and_again_and_takes_itself_for_no_operator():
    cluster = Cluster(loads={Role.DECODE: 5.0})
    cluster.run(200, changes=False)
    assert set(cluster.asked()) == {("decode", 2)}
    assert len(cluster.resizes) > 2


LOADS = st.floats(0.0, 12.0)
SIZES = st.integers(1, 6)


@given(SIZES, SIZES, LOADS, LOADS, st.integers(0, 60))
@settings(max_examples=25, deadline=None)
def test_under_a_constant_load_no_pool_goes_back_and_none_is_left_with_too_much(
    prefill, decode, prefill_load, decode_load, start_s
):
    loads = {Role.PREFILL: prefill_load, Role.DECODE: decode_load}
    cluster = Cluster(prefill=prefill, decode=decode, start_s=start_s, loads=loads)
    cluster.run(1500)
    before = {"prefill": prefill, "decode": decode}
    directions: dict[str, set[int]] = {"prefill": set(), "decode": set()}
    for pool, workers in cluster.asked():
        directions[pool].add(workers - before[pool])
        before[pool] = workers
    assert all(len(steps) <= 1 for steps in directions.values()), cluster.asked()
    asked = len(cluster.resizes)
    cluster.run(300)
    assert len(cluster.resizes) == asked, "it has come to rest"
    total = sum(cluster.pools.values())
    for pool, steps in directions.items():
        pressure = cluster.pressure(Role(pool), cluster.pools[pool])
        assert pressure < POLICY.high or total >= POLICY.most
        if -1 in steps:
            assert pressure < POLICY.low, "fewer than the load needs"


@given(
    st.lists(st.tuples(LOADS, LOADS, st.integers(1, 60), st.booleans()), max_size=30),
    SIZES,
    SIZES,
)
@settings(max_examples=25, deadline=None)
def test_whatever_the_load_does_no_limit_is_passed_and_each_change_is_by_one(
    steps, prefill, decode
):
    cluster = Cluster(prefill=prefill, decode=decode)
    for prefill_load, decode_load, seconds, near in steps:
        cluster.loads = {Role.PREFILL: prefill_load, Role.DECODE: decode_load}
        cluster.flip_is_near = near
        before, asked = dict(cluster.pools), len(cluster.resizes)
        cluster.run(seconds)
        for resize in cluster.resizes[asked:]:
            grown = resize.workers - before[resize.pool]
            assert abs(grown) == 1
            before[resize.pool] = resize.workers
            total = sum(before.values())
            assert total <= POLICY.most if grown > 0 else total >= POLICY.least
            assert min(before["prefill"], before["decode"]) >= 1
