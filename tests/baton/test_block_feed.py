from hypothesis import given, settings
from hypothesis import strategies as st

from baton.blocks import BlockReport, ChangeLog, split
from baton.ids import BlockKey
from baton.rpc import block_feed
from baton.rpc.block_feed import BlockFeed, HeldBlocks


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


class Router:
    """What a router knows after what it was sent."""

    def __init__(self, feed: BlockFeed) -> None:
        self.feed = feed
        self.known: set[BlockKey] = set()
        self.reports: list[BlockReport] = []

    def read(self, limit: int = 1000) -> None:
        for _ in range(limit):
            report = self.feed.next()
            if report is None:
                return
            self.reports.append(report)
            if report.first:
                self.known.clear()
            self.known -= set(split(report.removed))
            self.known |= set(split(report.stored))


class Worker:
    """Changes its blocks as an engine does: one net change per step."""

    def __init__(self, max_waiting: int = 1000) -> None:
        self.log = ChangeLog()
        self.holds: dict[BlockKey, None] = {}
        self.held = HeldBlocks(max_waiting=max_waiting)

    def step(self, *numbers: int) -> None:
        """Stores what it has not, and removes what it has."""
        for k in map(key, numbers):
            if k in self.holds:
                del self.holds[k]
                self.log.removed(k)
            else:
                self.holds[k] = None
                self.log.stored(k)
        self.held.apply(self.log.take())


def test_a_router_is_told_first_what_is_held_and_then_what_changes():
    worker = Worker()
    worker.step(1, 2)
    router = Router(worker.held.open_feed())
    router.read()
    worker.step(2, 3)
    router.read()
    first, then = router.reports
    assert (first.seq, first.snapshot, first.first, first.last) == (1, True, True, True)
    assert (then.seq, then.snapshot, then.stored, then.removed) == (2, False, key(3), key(2))


def test_a_worker_without_blocks_says_so():
    (router := Router(HeldBlocks().open_feed())).read()
    assert [(r.stored, r.first, r.last) for r in router.reports] == [(b"", True, True)]
    assert not router.feed.waits


def test_what_came_and_went_between_two_reports_is_not_mentioned():
    worker = Worker()
    router = Router(worker.held.open_feed())
    router.read()
    worker.step(1, 2)
    worker.step(1)
    router.read()
    assert (router.reports[-1].stored, router.reports[-1].removed) == (key(2), b"")
    worker.step(3)
    worker.step(3)
    assert not router.feed.waits


def test_a_long_snapshot_comes_in_parts_and_changes_after_it(monkeypatch):
    monkeypatch.setattr(block_feed, "MAX_KEYS_PER_REPORT", 2)
    worker = Worker()
    worker.step(1, 2, 3, 4, 5)
    router = Router(worker.held.open_feed())
    router.read(1)
    worker.step(1, 6)
    router.read()
    parts = [(r.snapshot, r.first, r.last) for r in router.reports]
    assert parts == [(True, True, False), (True, False, False), (True, False, True), (False,) * 3]
    assert router.known == worker.holds.keys()


def test_a_router_that_falls_behind_gets_a_snapshot_instead_of_a_backlog():
    worker = Worker(max_waiting=10)
    router = Router(worker.held.open_feed())
    router.read()
    for number in range(100):
        worker.step(number)
    router.read()
    assert len(router.reports) == 2
    assert router.reports[-1].snapshot
    assert router.known == worker.holds.keys()


def test_a_snapshot_under_way_is_finished_even_if_the_router_falls_behind_meanwhile(monkeypatch):
    monkeypatch.setattr(block_feed, "MAX_KEYS_PER_REPORT", 1)
    worker = Worker(max_waiting=1)
    worker.step(*range(5))
    router = Router(worker.held.open_feed())
    for number in range(10, 15):
        router.read(1)
        worker.step(number, number + 10)
    assert [report.first for report in router.reports] == [True, False, False, False, False]
    router.read()
    assert router.known == worker.holds.keys()


def test_a_router_that_is_gone_costs_nothing_more():
    worker = Worker()
    feed = worker.held.open_feed()
    Router(feed).read()
    worker.held.close_feed(feed)
    worker.step(1)
    assert not feed.waits


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.lists(st.integers(0, 8), unique=True)),
            st.tuples(st.just("read"), st.integers(0, 3)),
            st.tuples(st.just("restart"), st.none()),
        ),
        max_size=30,
    ),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_whoever_reads_to_the_end_knows_exactly_what_is_held(operations, max_waiting, per_report):
    worker = Worker(max_waiting=max_waiting)
    router = Router(worker.held.open_feed())
    whole, block_feed.MAX_KEYS_PER_REPORT = block_feed.MAX_KEYS_PER_REPORT, per_report
    try:
        for kind, argument in operations:
            if kind == "step":
                worker.step(*argument)
            elif kind == "read":
                router.read(argument)
            else:
                router.feed.restart()
        router.read()
    finally:
        block_feed.MAX_KEYS_PER_REPORT = whole
    assert router.known == worker.holds.keys()
    assert [report.seq for report in router.reports] == list(range(1, len(router.reports) + 1))
