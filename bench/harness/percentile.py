"""Percentiles, also of few values."""

import math
from collections.abc import Iterable


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest of the values that as large a share of them does not exceed; of few values the largest.

    `statistics.quantiles` goes beyond the largest one where there are fewer values than percentiles.

    Raises:
        IndexError: There are no values.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
