from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvariantError
from baton.fit import Fit

PRIOR = (0.005, 1e-4, 1e-9)
SIZES = [(uncached, cached) for uncached in (64, 500, 4000, 20_000) for cached in (0, 10_000)]

factors = st.floats(0.05, 20.0)


def features(uncached: int, cached: int) -> tuple[float, ...]:
    return (1.0, float(uncached), uncached * (cached + 0.5 * uncached))


def cost(coefficients, at) -> float:
    return float(sum(c * x for c, x in zip(coefficients, at, strict=True)))


def taught(true, rng: Random, measurements: int, *, outliers: float = 0.0) -> Fit:
    fit = Fit(PRIOR)
    for _ in range(measurements):
        at = features(*rng.choice(SIZES))
        seconds = cost(true, at) * rng.lognormvariate(0.0, 0.05)
        fit.measure(at, seconds * 50.0 if rng.random() < outliers else seconds)
        fit.check_integrity()
    return fit


def worst_error(fit: Fit, true) -> float:
    return max(
        abs(fit.predict(features(*size)) / cost(true, features(*size)) - 1.0) for size in SIZES
    )


@settings(max_examples=30, deadline=None)
@given(st.tuples(factors, factors, factors), st.integers(0, 1000))
def test_the_predictions_converge_on_a_workers_times(scale, seed):
    true = [p * s for p, s in zip(PRIOR, scale, strict=True)]
    assert worst_error(taught(true, Random(seed), 200), true) < 0.35


@settings(max_examples=30, deadline=None)
@given(st.tuples(factors, factors, factors), st.integers(0, 1000))
def test_one_stall_in_twenty_does_not_spoil_them(scale, seed):
    true = [p * s for p, s in zip(PRIOR, scale, strict=True)]
    assert worst_error(taught(true, Random(seed), 300, outliers=0.05), true) < 0.5


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 200_000),
            st.integers(0, 200_000),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=40,
    )
)
def test_whatever_is_measured_no_coefficient_is_negative(measurements):
    fit = Fit(PRIOR)
    for uncached, cached, seconds in measurements:
        fit.measure(features(uncached, cached), seconds)
        fit.check_integrity()
        assert fit.predict(features(1000, 0)) >= 0.0


def test_one_measurement_tells_how_fast_the_worker_is():
    fit = Fit(PRIOR)
    at = features(1000, 0)
    fit.measure(at, 50.0 * cost(PRIOR, at))
    assert fit.predict(at) == pytest.approx(50.0 * cost(PRIOR, at), rel=0.01)
    assert fit.predict(features(4000, 0)) == pytest.approx(
        50.0 * cost(PRIOR, features(4000, 0)), rel=0.01
    )


def test_a_worker_that_becomes_slower_is_believed_in_time():
    rng = Random(0)
    fit = taught(PRIOR, rng, 100)
    at = features(4000, 0)
    for _ in range(60):
        fit.measure(at, 3.0 * cost(PRIOR, at))
    assert fit.predict(at) == pytest.approx(3.0 * cost(PRIOR, at), rel=0.1)


def test_a_single_stall_hardly_moves_a_settled_fit():
    fit = taught(PRIOR, Random(0), 100)
    at = features(4000, 0)
    before = fit.predict(at)
    fit.measure(at, 100.0 * before)
    assert fit.predict(at) == pytest.approx(before, rel=0.05)


def test_a_prior_of_nothing_is_refused():
    with pytest.raises(InvariantError):
        Fit((1.0, 0.0))
