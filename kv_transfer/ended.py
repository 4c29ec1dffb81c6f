"""The hand-offs that a decode worker is done with, so that a replayed or overtaken message cannot open them again."""

from collections import OrderedDict
from dataclasses import dataclass

from baton.errors import BatonError
from baton.ids import XferId

_MAX_ENDED = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a transfer ended, for those who ask after it."""

    at_s: float
    error: BatonError


class EndedTransfers:
    """Pure. Bounded in time and number."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._ended: OrderedDict[XferId, Ended] = OrderedDict()

    def find(self, xfer_id: XferId) -> Ended | None:
        """How it ended, if it did."""
        return self._ended.get(xfer_id)

    def add(self, xfer_id: XferId, error: BatonError, now_s: float) -> None:
        """It ended; the first word counts."""
        self._ended.setdefault(xfer_id, Ended(at_s=now_s, error=error))
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def forget_old(self, now_s: float) -> None:
        """Drops those whose messages cannot be on their way any more."""
        horizon_s = now_s - self._keep_s
        while self._ended and next(iter(self._ended.values())).at_s < horizon_s:
            self._ended.popitem(last=False)
