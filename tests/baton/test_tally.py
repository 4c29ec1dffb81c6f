import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from baton.telemetry.metrics import render
from baton.telemetry.tally import Tally

BOUNDS = (0.1, 0.5, 2.0)


def _samples(registry: CollectorRegistry) -> dict[tuple[str, str | None], float]:
    return {
        (sample.name, sample.labels.get("le")): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(st.floats(0, 3) | st.sampled_from(BOUNDS)))
def test_a_tally_says_what_a_histogram_says(values: list[float]):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("wait_seconds", "A wait.", BOUNDS, {"model": "m"}, ours)
    histogram = Histogram("wait_seconds", "A wait.", ["model"], buckets=BOUNDS, registry=theirs)
    for value in values:
        tally.observe(value)
        histogram.labels("m").observe(value)
    histogram.labels("m")
    assert _samples(ours) == pytest.approx(_samples(theirs))


def test_a_tally_is_written_out_with_its_label():
    registry = CollectorRegistry()
    Tally("wait_seconds", "A wait.", BOUNDS, {"model": "m"}, registry).observe(0.2)
    assert b'wait_seconds_bucket{le="0.5",model="m"} 1.0' in render(registry)[0]
