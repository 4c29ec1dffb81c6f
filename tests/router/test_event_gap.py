from hypothesis import given
from hypothesis import strategies as st

from router.event_gap import EventGap


def work(gap: EventGap, share: float, seconds: float, from_s: float) -> float:
    """The loop is busy for `share` of every 10 ms; returns when that ended."""
    now_s = from_s
    while now_s < from_s + seconds:
        gap.worked(now_s, now_s + 0.01 * share)
        now_s += 0.01
    return now_s


def test_the_gap_of_a_router_that_keeps_up_stays_as_it_is():
    gap = EventGap(0.004, 0.05)
    work(gap, 0.4, 5.0, 100.0)
    assert gap.gap_s == 0.004


def test_the_gap_widens_while_the_loop_is_busy_and_narrows_once_it_is_calm():
    gap = EventGap(0.004, 0.05)
    now_s = work(gap, 0.95, 0.4, 100.0)
    assert gap.gap_s > 0.004
    now_s = work(gap, 0.95, 5.0, now_s)
    assert gap.gap_s == 0.05
    now_s = work(gap, 0.4, 5.0, now_s)
    assert gap.gap_s == 0.05, "between the two bounds it stays"
    work(gap, 0.1, 5.0, now_s)
    assert gap.gap_s == 0.004


def test_a_long_pause_counts_as_calm():
    gap = EventGap(0.004, 0.05)
    now_s = work(gap, 0.95, 0.25, 100.0)
    wide_s = gap.gap_s
    gap.worked(now_s + 60.0, now_s + 60.2)
    assert gap.gap_s < wide_s


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), max_size=200))
def test_the_gap_stays_within_its_bounds(turns):
    gap, now_s = EventGap(0.004, 0.05), 0.0
    for idle_s, busy_s in turns:
        gap.worked(now_s + idle_s, now_s + idle_s + busy_s)
        now_s += idle_s + busy_s
        assert 0.004 <= gap.gap_s <= 0.05
