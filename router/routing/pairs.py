"""Which pairs of workers cannot hand KV over, though each of the two may be well:
until their link is known to work again, or for good.

A pair whose link carries nothing (a partition, a port that a filter swallows) gets no request until the prefill worker
has tried the link without one: after pauses that grow with each failure, and with some chance in them, since one
partition breaks many pairs at once. A pair that does not fit stays apart until one of the two is started anew.
Meanwhile the policy chooses among the other pairs, or has the decode worker compute the prompt itself,
which it always can.

A worker whose hand-offs fail with several peers, one after the other and with no success in between, is *cut off*: its
port is filtered, or its network is gone, and each further peer would cost a request its patience. It is nobody's pair,
and in place of its pairs' links one link is tried at a time, with a peer drawn from all of them: the first that carries
ends it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from baton.backoff import Backoff
from baton.errors import BatonError, IncompatibleError
from baton.ids import Role, WorkerIdentity

PairKey = tuple[WorkerIdentity, WorkerIdentity]
"""Who prefills, and who decodes."""

End = tuple[WorkerIdentity, Role]
"""A worker as the one side of its pairs, PREFILL or DECODE."""

_CUT_OFF_BY = 3
"""So many different peers in a row: two may have a fault of their own in common, as those of one host have."""
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
    """One pair that failed last, or one worker that is cut off.

    Attributes:
        failures: In a row, that of a request and those of the probes since.
        next_s: When its link is probed next; while that is under way, when the probe is given up.
        probed: The pair whose probe is under way; None without one.
    """

    failures: int
    next_s: float
    probed: PairKey | None = None


def _nobody(_end: End, _now_s: float) -> Sequence[WorkerIdentity]:
    return ()


class BrokenPairs:
    """For one router. Pure, as the dispatcher, its one owner.

    Args:
        backoff: How long it is before the next probe after so many failures in a row.
        rng: Spreads the pauses, and draws whom a worker that is cut off is tried with.
        peers: Those that a worker could be paired with at that time.
    """

    def __init__(
        self,
        backoff: Backoff = Backoff(first_s=1.0, max_s=15.0),
        rng: Random | None = None,
        peers: Callable[[End, float], Sequence[WorkerIdentity]] = _nobody,
    ) -> None:
        self._backoff = backoff
        self._rng = rng or Random()
        self._peers = peers
        self._broken: dict[PairKey, _Broken] = {}
        self._failed: dict[End, set[WorkerIdentity]] = {}  # peers in a row
        self._cut_off: dict[End, _Broken] = {}
        self._outcomes: Counter[ProbeOutcome] = Counter()

    def __len__(self) -> int:
        return len(self._broken)

    @property
    def outcomes(self) -> Mapping[ProbeOutcome, int]:
        """How many probes have ended in which way."""
        return self._outcomes

    def allows(self, prefill: WorkerIdentity, decode: WorkerIdentity) -> bool:
        """Whether `prefill` may be asked to hand KV over to `decode`."""
        if (prefill, decode) in self._broken:
            return False
        # Mostly there is none, and this is asked of many pairs.
        return not self._cut_off or not self._is_cut_off(prefill, decode)

    def cuts_off(self, worker: WorkerIdentity, side: Role) -> bool:
        """Whether it is left out as the one that prefills in pairs, or as the one that decodes."""
        return (worker, side) in self._cut_off

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
        # What does not fit says nothing of the other peers, and costs no request its patience.
        if not isinstance(error, IncompatibleError):
            self._count_failure(prefill, decode, now_s)
        return broken.next_s - now_s

    def due(self, now_s: float) -> list[PairKey]:
        """Pairs whose links are to be probed now; `probed` is to tell the outcome of each.
        Those that were not answered count as failed.
        """
        under_way = 0
        for held in (*self._broken.values(), *self._cut_off.values()):
            if held.probed is not None and now_s >= held.next_s:
                self._outcomes[ProbeOutcome.UNANSWERED] += 1
                self._pause(held, None, now_s)
            under_way += held.probed is not None
        waiting: list[tuple[float, PairKey | None, End | None, _Broken]] = []
        for end, held in self._cut_off.items():
            if _is_due(held, now_s):
                waiting.append((held.next_s, None, end, held))
        for pair, held in self._broken.items():
            if _is_due(held, now_s) and not self._is_cut_off(*pair):
                waiting.append((held.next_s, pair, None, held))
        waiting.sort(key=lambda waits: waits[0])
        due: list[PairKey] = []
        for _, known, cut_off, held in waiting:
            if under_way + len(due) >= _MAX_PROBES:
                break
            chosen = known if cut_off is None else self._drawn(cut_off, now_s)
            if chosen is not None:
                held.probed, held.next_s = chosen, now_s + _PROBE_S
                due.append(chosen)
        return due

    def probed(
        self,
        prefill: WorkerIdentity,
        decode: WorkerIdentity,
        error: BatonError | None,
        now_s: float,
    ) -> bool:
        """The outcome of a probe; whether the pair, which was broken or of a worker that was cut off, is whole again."""
        pair = (prefill, decode)
        asked = [self._broken.get(pair), *(self._cut_off.get(end) for end in _ends(*pair))]
        probed = [held for held in asked if held is not None and held.probed == pair]
        if not probed:
            return False  # whole again, or given up as unanswered
        if error is None:
            self._outcomes[ProbeOutcome.CARRIES] += 1
            return self.succeeded(prefill, decode)
        self._outcomes[ProbeOutcome.FAILED] += 1
        for held in probed:
            # A worker that does not fit one peer may still reach the next one.
            alone = held is not self._broken.get(pair)
            self._pause(held, None if alone else error, now_s)
        return False

    def succeeded(self, prefill: WorkerIdentity, decode: WorkerIdentity) -> bool:
        """The link carries pages; whether the pair was broken, or one of the two cut off."""
        restored = self._broken.pop((prefill, decode), None) is not None
        for end in _ends(prefill, decode):
            self._failed.pop(end, None)
            restored |= self._cut_off.pop(end, None) is not None
        return restored

    def forget(self, identity: WorkerIdentity) -> None:
        """This start of a worker is gone."""
        self._broken = {pair: held for pair, held in self._broken.items() if identity not in pair}
        self._failed = {end: row for end, row in self._failed.items() if identity not in end}
        self._cut_off = {end: held for end, held in self._cut_off.items() if identity not in end}
        for row in self._failed.values():
            row.discard(identity)

    def _count_failure(self, prefill: WorkerIdentity, decode: WorkerIdentity, now_s: float) -> None:
        ends = _ends(prefill, decode)
        if any(end in self._cut_off for end in ends):
            return  # that says nothing of the other one
        for end, peer in zip(ends, (decode, prefill), strict=True):
            self._failed.setdefault(end, set()).add(peer)
        end = max(ends, key=lambda end: len(self._failed[end]))
        if len(self._failed[end]) < _CUT_OFF_BY:
            return
        worker, side = end
        peers_side = Role.PREFILL if side is Role.DECODE else Role.DECODE
        for peer in self._failed.pop(end):
            self._failed.get((peer, peers_side), set()).discard(worker)
        held = self._cut_off[end] = _Broken(failures=0, next_s=now_s)
        self._pause(held, None, now_s)

    def _is_cut_off(self, prefill: WorkerIdentity, decode: WorkerIdentity) -> bool:
        return any(end in self._cut_off for end in _ends(prefill, decode))

    def _drawn(self, end: End, now_s: float) -> PairKey | None:
        """Whom a worker that is cut off is tried with; None where nobody is there."""
        peers = self._peers(end, now_s)
        if not peers:
            return None
        worker, peer = end[0], self._rng.choice(peers)
        return (peer, worker) if end[1] is Role.DECODE else (worker, peer)

    def _pause(self, broken: _Broken, error: BatonError | None, now_s: float) -> None:
        broken.failures += 1
        broken.probed = None
        if isinstance(error, IncompatibleError):
            broken.next_s = _NEVER
            return
        spread = self._rng.uniform(1.0 - _JITTER, 1.0 + _JITTER)
        broken.next_s = now_s + spread * self._backoff.wait_s(broken.failures)


def _ends(prefill: WorkerIdentity, decode: WorkerIdentity) -> tuple[End, End]:
    return (prefill, Role.PREFILL), (decode, Role.DECODE)


def _is_due(held: _Broken, now_s: float) -> bool:
    return held.probed is None and now_s >= held.next_s
