import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.backoff import Backoff

FIRST_S = st.floats(min_value=0.0, max_value=1e3)
FACTOR = st.floats(min_value=1.0, max_value=10.0)
BACKOFF = st.builds(
    lambda first_s, more_s, factor: Backoff(first_s=first_s, max_s=first_s + more_s, factor=factor),
    FIRST_S,
    FIRST_S,
    FACTOR,
)


def test_waits_double_up_to_the_longest():
    backoff = Backoff(first_s=0.5, max_s=3.0)

    assert [backoff.wait_s(failures) for failures in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


@given(BACKOFF, st.integers(min_value=1, max_value=10_000))
def test_a_wait_is_within_bounds_and_never_shorter_than_the_one_before(backoff, failures):
    wait_s = backoff.wait_s(failures)

    assert backoff.first_s <= wait_s <= backoff.max_s
    assert wait_s >= (backoff.wait_s(failures - 1) if failures > 1 else 0.0)


@given(BACKOFF)
def test_any_number_of_failures_has_a_wait(backoff):
    assert backoff.wait_s(10**9) <= backoff.max_s


def test_no_first_wait_means_none_at_all():
    assert Backoff(first_s=0.0, max_s=5.0).wait_s(10**9) == 0.0


@pytest.mark.parametrize(
    ("first_s", "max_s", "factor"), [(-1.0, 1.0, 2.0), (2.0, 1.0, 2.0), (1.0, 2.0, 0.5)]
)
def test_waits_that_are_negative_or_shrink_are_refused(first_s, max_s, factor):
    with pytest.raises(ValueError, match="wait"):
        Backoff(first_s=first_s, max_s=max_s, factor=factor)
