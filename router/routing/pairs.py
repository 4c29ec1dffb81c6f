"""Which pairs of workers cannot hand KV over, though each of the two may be well:
until their link is known to work again, or for good.

A pair whose link carries nothing (a partition, a port that a filter swallows) gets no request until the prefill worker
has tried the link without one: after pauses that grow with each failure, and with some chance in them, since one
partition breaks many pairs at once. A pair that does not fit stays apart until one of the two is started anew.
Meanwhile the policy chooses among the other pairs, or has the decode worker compute the prompt itself,
which it always can.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from random import Random

from baton.backoff import Backoff
from baton.errors import BatonError, IncompatibleError
from baton.ids import WorkerIdentity

PairKey = tuple[WorkerIdentity, WorkerIdentity]
"""Who prefills, and who decodes."""

_NEVER = float("inf")
_PROBE_S = 30.0
"""A probe without an outcome has failed after this long:
twice what its worker takes at most to connect and to map the memory.
"""
_MAX_PROBES = 32
"""Under way at once; the others wait for their turn."""
_JITTER = 0.25
"""Each pause is longer or shorter by up to this part of it."""


class ProbeOutcome(Enum):
    """What became of a probe."""

    CARRIES = "carries"
    FAILED = "failed"
    UNANSWERED = "unanswered"


@dataclass(slots=True, eq=False)
class _Broken:
    """One pair that failed last.

    Attributes:
        failures: In a row, that of a request and those of the probes since.
        next_s: When its link is probed next; while that is under way, when the probe is given up.
        probed: Whether a probe is under way.
    """

    failures: int
    next_s: float
    probed: bool = False


class BrokenPairs:
    """For one router. Pure, as the dispatcher, its one owner.

    Args:
        backoff: How long it is before the next probe after so many failures in a row.
        rng: Spreads the pauses.
    """

    def __init__(
        self, backoff: Backoff = Backoff(first_s=1.0, max_s=15.0), rng: Random | None = None
    ) -> None:
        self._backoff = backoff
        self._rng = rng or Random()
        self._broken: dict[PairKey, _Broken] = {}
        self._outcomes: Counter[ProbeOutcome] = Counter()

    def __len__(self) -> int:
        return len(self._broken)

    @property
    def outcomes(self) -> Mapping[ProbeOutcome, int]:
        """How many probes have ended in which way."""
        return self._outcomes

    def allows(self, prefill: WorkerIdentity, decode: WorkerIdentity) -> bool:
        """Whether `prefill` may be asked to hand KV over to `decode`."""
        return (prefill, decode) not in self._broken

    def failed(
        self, prefill: WorkerIdentity, decode: WorkerIdentity, error: BatonError, now_s: float
    ) -> float | None:
        """A request's hand-off failed by the way between the two.

        Returns:
            Seconds until the first probe, infinitely many if the two do not fit; None where the pair is broken already,
            since hand-offs that began together fail together.
        """
        if (prefill, decode) in self._broken:
            return None
        broken = self._broken[prefill, decode] = _Broken(failures=0, next_s=now_s)
        self._pause(broken, error, now_s)
        return broken.next_s - now_s

    def due(self, now_s: float) -> list[PairKey]:
        """Pairs whose links are to be probed now; `probed` is to tell the outcome of each.
        Those that were not answered count as failed.
        """
        under_way = 0
        for broken in self._broken.values():
            if broken.probed and now_s >= broken.next_s:
                self._outcomes[ProbeOutcome.UNANSWERED] += 1
                self._pause(broken, None, now_s)
            under_way += broken.probed
        waiting = [pair for pair, held in self._broken.items() if self._is_due(held, now_s)]
        due = sorted(waiting, key=lambda pair: self._broken[pair].next_s)[: _MAX_PROBES - under_way]
        for pair in due:
            self._broken[pair].probed, self._broken[pair].next_s = True, now_s + _PROBE_S
        return due

    def probed(
        self,
        prefill: WorkerIdentity,
        decode: WorkerIdentity,
        error: BatonError | None,
        now_s: float,
    ) -> bool:
        """The outcome of a probe; whether the pair, which was broken, is whole again."""
        broken = self._broken.get((prefill, decode))
        if broken is None or not broken.probed:
            return False  # whole again, or given up as unanswered
        if error is None:
            self._outcomes[ProbeOutcome.CARRIES] += 1
            return self.succeeded(prefill, decode)
        self._outcomes[ProbeOutcome.FAILED] += 1
        self._pause(broken, error, now_s)
        return False

    def succeeded(self, prefill: WorkerIdentity, decode: WorkerIdentity) -> bool:
        """The link carries pages; whether the pair was broken."""
        return self._broken.pop((prefill, decode), None) is not None

    def forget(self, identity: WorkerIdentity) -> None:
        """This start of a worker is gone."""
        self._broken = {pair: held for pair, held in self._broken.items() if identity not in pair}

    def _is_due(self, broken: _Broken, now_s: float) -> bool:
        return not broken.probed and now_s >= broken.next_s

    def _pause(self, broken: _Broken, error: BatonError | None, now_s: float) -> None:
        broken.failures += 1
        broken.probed = False
        if isinstance(error, IncompatibleError):
            broken.next_s = _NEVER
            return
        spread = self._rng.uniform(1.0 - _JITTER, 1.0 + _JITTER)
        broken.next_s = now_s + spread * self._backoff.wait_s(broken.failures)
