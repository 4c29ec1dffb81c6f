"""Learns how long a piece of work takes, from what it took before."""

from collections.abc import Sequence
from math import exp, isfinite, log
from operator import mul

from baton.errors import InvariantError

_KEEP = 1.0 - 1.0 / 64
"""What a measurement loses of its weight with each that follows: some 64 count."""

_FADE, _CHANGED = 0.5, 3
_RIDGE = 0.02
"""How strongly a coefficient that the measurements do not tell apart is held to its share of the prior."""

_SWEEPS = 12
_FIRST_SPREAD, _WIDEST, _NARROWEST = 1.0, 3.0, 0.03
_CLIP = 3.0
_SHORTEST_S, _LONGEST_S = 1e-7, 3600.0


class Fit:
    """Seconds as a sum of non-negative coefficients times features, refitted with every measurement.

    Least squares of the error relative to the measurement, with exponential forgetting, solved by coordinate descent
    under the constraint that no coefficient is negative. Three things make it calm:

    - The prior is trusted in its proportions only. One common factor says how much faster or slower this worker is than
      the prior; it is known after the first measurement, and what the features cannot tell apart keeps to it.
    - Because errors are relative to what was measured, one that took far too long counts little.
    - A measurement that is off by more than three times what is usual counts as one that is off by that much, so a
      stall moves the coefficients a little (Huber's loss with a scale of its own). Three such in a row, all to the same
      side, are no stall but a change: what was measured before fades at once.

    Pure. Constant memory; a measurement costs some 20 µs.

    Args:
        prior: Coefficients to begin with, all above zero.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        if not prior or min(prior) <= 0.0:
            raise InvariantError(f"a prior has to be above zero: {prior}")
        self._prior = tuple(prior)
        size = len(self._prior)
        self._shares = [1.0] * size
        """Coefficients as multiples of the prior's."""
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._weight = 0.0
        self._log_factor = 0.0
        self._spread = _FIRST_SPREAD
        self._run = 0
        """Measurements in a row that were off by too much; below zero if they were too quick."""

    @property
    def coefficients(self) -> tuple[float, ...]:
        """One per feature, in seconds."""
        return tuple(s * p for s, p in zip(self._shares, self._prior, strict=True))

    @property
    def taught(self) -> bool:
        """Whether there was a measurement."""
        return self._weight > 0.0

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for `features`."""
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def measure(self, features: Sequence[float], seconds: float) -> None:
        """Takes one measurement; what cannot be one (no number, no time, nothing done) is ignored."""
        parts = [x * p for x, p in zip(features, self._prior, strict=True)]
        by_prior = sum(parts)
        if not (isfinite(seconds) and isfinite(by_prior)) or seconds <= 0.0 or by_prior <= 0.0:
            return
        seconds = min(max(seconds, _SHORTEST_S), _LONGEST_S)
        expected = sum(map(mul, self._shares, parts))
        if self._weight > 0.0 and expected > 0.0:
            seconds = expected * exp(self._clipped(log(seconds / expected)))
        keep = _FADE if abs(self._run) >= _CHANGED else _KEEP
        self._accumulate([part / seconds for part in parts], keep)
        self._weight = self._weight * keep + 1.0
        self._rescale((log(seconds / by_prior) - self._log_factor) / self._weight)
        self._solve(exp(self._log_factor))

    def check_integrity(self) -> None:
        """Raises `InvariantError` when a coefficient is negative or no number."""
        if not all(isfinite(share) and share >= 0.0 for share in self._shares):
            raise InvariantError(f"coefficients {self.coefficients}")

    def _clipped(self, deviation: float) -> float:
        """The logarithm of measured over expected, within what is believed; learns what is usual."""
        bound = _CLIP * self._spread
        clipped = min(max(deviation, -bound), bound)
        self._count_run(clipped, deviation)
        wider = abs(clipped) - self._spread
        self._spread = min(max(self._spread + 0.1 * wider, _NARROWEST), _WIDEST)
        return clipped

    def _count_run(self, clipped: float, deviation: float) -> None:
        if clipped == deviation:
            self._run = 0
        elif deviation > 0:
            self._run = max(self._run, 0) + 1
        else:
            self._run = min(self._run, 0) - 1

    def _accumulate(self, relative: list[float], keep: float) -> None:
        """Adds a measurement: its parts by the prior, each as a share of what was measured."""
        for i, x in enumerate(relative):
            row = self._products[i]
            for j, y in enumerate(relative):
                row[j] = row[j] * keep + x * y
            self._targets[i] = self._targets[i] * keep + x

    def _rescale(self, log_step: float) -> None:
        """Moves the common factor and all shares with it: what the measurements tell apart is put right after."""
        self._log_factor += log_step
        step = exp(log_step)
        self._shares = [share * step for share in self._shares]

    def _solve(self, factor: float) -> None:
        """Minimises the squared errors plus the ridge's pull towards `factor`, from where the shares stand."""
        ridge = _RIDGE / (factor * factor)
        shares = self._shares
        for _ in range(_SWEEPS):
            for i, row in enumerate(self._products):
                others = sum(map(mul, row, shares)) - row[i] * shares[i]
                pulled = self._targets[i] - others + ridge * factor
                shares[i] = max(0.0, pulled / (row[i] + ridge))
