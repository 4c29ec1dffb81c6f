"""The hand-offs of a decode worker: those under way, and those that are over, so that a replayed or overtaken message cannot open
them again.

Kept by the ledger (`ledger.py`), which says what may happen to them.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from baton.errors import BatonError, InvariantError, TransferError
from baton.ids import XferId
from kv_transfer.ledger_messages import LedgerAction
from kv_transfer.peers import PeerBook
from kv_transfer.ticket import Permit
from kv_transfer.transfer import Transfer
from kv_transfer.transfer_state import TransferState

_MAX_ENDED = 65_536
OVER = "this transfer is over already"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    at_s: float
    error: BatonError


class TransferBook:
    """Pure. What is over is bounded in time and number.

    Args:
        keep_s: How long it is remembered that a transfer is over.
        checksums: Whether commits must carry them.
    """

    def __init__(self, *, keep_s: float, checksums: bool) -> None:
        self._keep_s = keep_s
        self._checksums = checksums
        self._open: dict[XferId, Transfer] = {}
        self._ended: OrderedDict[XferId, _Ended] = OrderedDict()

    def __len__(self) -> int:
        """Those under way."""
        return len(self._open)

    def __iter__(self) -> Iterator[Transfer]:
        """Those under way; they may end meanwhile."""
        return iter(tuple(self._open.values()))

    def find(self, xfer_id: XferId) -> Transfer | None:
        """It, while it is under way."""
        return self._open.get(xfer_id)

    def ended_with(self, xfer_id: XferId) -> BatonError | None:
        """What it ended with; None if it did not, or long ago."""
        ended = self._ended.get(xfer_id)
        return ended.error if ended else None

    def open(self, permit: Permit, state: TransferState, now_s: float) -> Transfer:
        """The first word of it."""
        transfer = Transfer(permit=permit, state=state, since_s=now_s, checksums=self._checksums)
        self._open[permit.xfer_id] = transfer
        return transfer

    def shut(self, xfer_id: XferId, error: BatonError, now_s: float) -> None:
        """It is over, perhaps before its first word came; what it first ended with counts."""
        self._open.pop(xfer_id, None)
        self._ended.setdefault(xfer_id, _Ended(at_s=now_s, error=error))
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def kept(
        self, transfer: Transfer, actions: list[LedgerAction], now_s: float
    ) -> list[LedgerAction]:
        """`actions`, which followed of an event that may have been the transfer's last."""
        if transfer.over:
            self.shut(transfer.xfer_id, transfer.error or TransferError(OVER), now_s)
        return actions

    def quarantined(self, peers: PeerBook) -> int:
        """Pages that nobody may use, because a prefill worker that was lost may still write there."""
        return sum(
            len(transfer.grant.blocks)
            for transfer in self
            if transfer.grant
            and any(part.session not in peers for part in transfer.parts.writers())
        )

    def forget_old(self, now_s: float) -> None:
        """Drops those that are over and whose messages cannot be on their way any more."""
        horizon_s = now_s - self._keep_s
        while self._ended and next(iter(self._ended.values())).at_s < horizon_s:
            self._ended.popitem(last=False)

    def check_integrity(self) -> None:
        """Raises InvariantError if it contradicts itself."""
        for xfer_id, transfer in self._open.items():
            transfer.check_integrity()
            if xfer_id != transfer.xfer_id or xfer_id in self._ended:
                raise InvariantError(f"transfer {xfer_id} is over and still here: {transfer!r}")
