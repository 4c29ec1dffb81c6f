import pytest

from bench.harness.percentile import percentile


@pytest.mark.parametrize("count", [1, 2, 4, 20, 99])
def test_of_few_values_the_99th_percentile_is_the_largest(count: int) -> None:
    assert percentile(range(count, 0, -1), 0.99) == count


def test_of_many_values_a_hundredth_is_above_the_99th_percentile() -> None:
    values = range(1000)
    assert sum(value > percentile(values, 0.99) for value in values) == 10
    assert percentile(values, 0.9) == 899
