"""Which pairs of workers cannot hand KV over, though each of the two may be well: for a pause, or for good.

A pair whose way carries nothing (a partition, a port that a filter swallows) is left alone for a pause that grows with each
failure, and then tried with one hand-off before it is trusted again. A pair that does not fit stays apart until one of the two
is started anew. Meanwhile the policy chooses among the other pairs, or has the decode worker compute the prompt itself.
"""

from dataclasses import dataclass

from baton.backoff import Backoff
from baton.errors import BatonError, IncompatibleError
from baton.ids import WorkerIdentity

_FOR_GOOD = float("inf")
_TRIAL_S = 30.0
"""A trial without an outcome counts as none after this long, and another may begin."""


@dataclass(slots=True, eq=False)
class _Broken:
    """One pair that failed last.

    Attributes:
        failures: In a row.
        until_s: When it may be tried next.
        in_trial: Whether it is being tried again, by one hand-off.
    """

    failures: int = 0
    until_s: float = 0.0
    in_trial: bool = False


class BrokenPairs:
    """For one router. Pure, as the dispatcher, its one owner.

    Args:
        backoff: How long a pair is left alone after so many failures in a row.
    """

    def __init__(self, backoff: Backoff = Backoff(first_s=1.0, max_s=60.0)) -> None:
        self._backoff = backoff
        self._broken: dict[tuple[WorkerIdentity, WorkerIdentity], _Broken] = {}

    def allows(self, prefill: WorkerIdentity, decode: WorkerIdentity, now_s: float) -> bool:
        """Whether `prefill` may be asked to hand KV over to `decode`."""
        broken = self._broken.get((prefill, decode))
        return broken is None or now_s >= broken.until_s

    def chosen(self, prefill: WorkerIdentity, decode: WorkerIdentity, now_s: float) -> None:
        """A hand-off begins: the only one for now, where the pair failed last."""
        broken = self._broken.get((prefill, decode))
        if broken is not None and now_s >= broken.until_s:
            broken.until_s, broken.in_trial = now_s + _TRIAL_S, True

    def failed(
        self, prefill: WorkerIdentity, decode: WorkerIdentity, error: BatonError, now_s: float
    ) -> float | None:
        """A hand-off failed by the way between the two; how long they are left alone now. None where that was known: hand-offs
        that began together fail together.
        """
        broken = self._broken.setdefault((prefill, decode), _Broken())
        if now_s < broken.until_s and not broken.in_trial:
            return None
        broken.failures += 1
        fits = not isinstance(error, IncompatibleError)
        pause_s = self._backoff.wait_s(broken.failures) if fits else _FOR_GOOD
        broken.until_s, broken.in_trial = now_s + pause_s, False
        return pause_s

    def succeeded(self, prefill: WorkerIdentity, decode: WorkerIdentity) -> None:
        """KV was handed off."""
        self._broken.pop((prefill, decode), None)

    def forget(self, identity: WorkerIdentity) -> None:
        """This start of a worker is gone."""
        self._broken = {pair: held for pair, held in self._broken.items() if identity not in pair}
