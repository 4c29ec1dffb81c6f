import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import LegId
from router.routing.forecast import Fleet, Forecast
from tests.interpreter_steps import steps_of


def leg(number: int) -> LegId:
    return LegId(number)


def test_an_idle_worker_has_no_queue():
    assert Forecast().queue_s(5.0) == 0.0


def test_work_counts_from_the_moment_that_it_is_sent():
    forecast = Forecast()
    forecast.queued(leg(1), 2.0, 10.0)
    forecast.queued(leg(2), 3.0, 11.0)
    assert forecast.queue_s(11.0) == pytest.approx(4.0)


def test_a_prompt_that_takes_longer_than_expected_leaves_those_behind_it_waiting():
    forecast = Forecast()
    forecast.queued(leg(1), 2.0, 0.0)
    forecast.queued(leg(2), 3.0, 0.0)
    assert forecast.queue_s(100.0) == pytest.approx(3.0)


def test_when_a_prompt_is_computed_the_next_one_begins():
    forecast = Forecast()
    forecast.queued(leg(1), 2.0, 0.0)
    forecast.queued(leg(2), 3.0, 0.0)
    forecast.left(leg(1), 4.0)
    assert forecast.queue_s(5.0) == pytest.approx(2.0)
    forecast.left(leg(2), 6.0)
    assert forecast.queue_s(6.0) == 0.0


def test_a_prompt_that_is_cancelled_leaves_the_queue():
    forecast = Forecast()
    for number in (1, 2, 3):
        forecast.queued(leg(number), 1.0, 0.0)
    forecast.left(leg(2))
    assert forecast.queue_s(0.0) == pytest.approx(2.0)


def test_steps_are_looked_at_a_few_times_per_second():
    forecast = Forecast()
    before = forecast.tbt_s(10, 1000)
    forecast.stepped(10, 1000, 1.0, 0.0)
    learned = forecast.tbt_s(10, 1000)
    assert learned > before
    forecast.stepped(10, 1000, 0.001, 0.1)
    assert forecast.tbt_s(10, 1000) == learned


def test_what_is_learned_of_one_worker_is_expected_of_those_not_measured():
    fleet = Fleet()
    measured, other, later = (Forecast(fleet) for _ in range(3))
    for tokens in (100, 1000, 4000):
        measured.prefilled(tokens, 0, tokens * 0.01)
    assert other.prefill_s(2000, 0) == pytest.approx(20.0, rel=0.3)
    other.prefilled(2000, 0, 1.0)
    later.prefilled(1000, 0, 10.0)
    assert other.prefill_s(2000, 0) < later.prefill_s(2000, 0)


def test_a_measurement_costs_the_same_however_many_workers_there_are():
    def measuring(others: int) -> int:
        fleet = Fleet()
        measured, *_others = (Forecast(fleet) for _ in range(1 + others))

        def measure() -> None:
            measured.prefilled(1000, 0, 1.0)
            measured.stepped(10, 1000, 0.02, 0.0)
            measured.fetched(1, 1000, 0.01)

        return steps_of(measure)

    assert measuring(200) == measuring(1)


def test_a_worker_that_has_been_measured_keeps_to_that_whatever_others_take():
    fleet = Fleet()
    quick, slow = Forecast(fleet), Forecast(fleet)
    quick.stepped(10, 1000, 0.01, 0.0)
    expected_s = quick.tbt_s(10, 1000)
    for number in range(20):
        slow.stepped(10, 1000, 1.0, float(number))
    assert quick.tbt_s(10, 1000) == expected_s
    assert Forecast(fleet).tbt_s(10, 1000) > expected_s


def test_a_link_that_was_never_used_is_expected_to_be_like_the_others():
    fleet = Fleet()
    one, other = Forecast(fleet), Forecast(fleet)
    for _ in range(30):
        one.handed_off(3, 10**9, 0.0, 10.0)
    assert other.link_to(3).bytes_per_s == pytest.approx(1e8, rel=0.2)


ids = st.integers(1, 6)
queueing = st.one_of(
    st.tuples(st.just("queued"), ids, st.floats(0.0, 100.0)),
    st.tuples(st.just("left"), ids, st.just(0.0)),
    st.tuples(st.just("cancelled"), ids, st.just(0.0)),
    st.tuples(st.just("wait"), ids, st.floats(0.0, 50.0)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(queueing, max_size=40))
def test_the_queue_is_never_below_nothing_and_never_above_what_is_in_it(events):
    forecast, inside, now_s = Forecast(), {}, 0.0
    for kind, number, value in events:
        match kind:
            case "queued" if number not in inside:
                inside[number] = value
                forecast.queued(leg(number), value, now_s)
            case "left":
                inside.pop(number, None)
                forecast.left(leg(number), now_s)
            case "cancelled":
                inside.pop(number, None)
                forecast.left(leg(number))
            case "wait":
                now_s += value
        forecast.check_integrity()
        assert -1e-9 <= forecast.queue_s(now_s) <= sum(inside.values()) + 1e-6
