"""Says which extent holds which block, also after the process was killed: records at the end of a file, one per change.

A record is written when the bytes it speaks of are, and an extent's erasure before other bytes go there. So at whatever moment a
process dies, the file has the beginning of what it did, and the last record may be torn: it does not count (`kvpool.ssd.recovery`).

Once there are three records per extent, those that count are written to a file beside, which then takes the journal's name.
"""

import errno
import os
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from threading import Lock

from baton.telemetry.logs import get_logger
from kvpool.messages import DiskBlock
from kvpool.ssd.raw_file import sync_directory
from kvpool.ssd.records import Erased, decode, encode_begins, encode_erased, encode_holds
from kvpool.ssd.sealed_log import SealedLog, frames

_NOTHING = -1
_MOST_RECORDS_PER_EXTENT = 3
_READ_BYTES = 1 << 20

_log = get_logger(__name__)


class Journal:
    """The file while blocks come and go. Its methods may be called from any thread; a call may wait for a rewrite of the file.

    Args:
        path: Of the file.
        log: The same, open.
        slot_bytes: The size of the largest block.
        num_extents: How many there are.
        held: What the file says they hold.
    """

    def __init__(
        self,
        path: Path,
        log: SealedLog,
        *,
        slot_bytes: int,
        num_extents: int,
        held: Iterable[DiskBlock],
    ) -> None:
        self._path = path
        self._log = log
        self._slot_bytes = slot_bytes
        self._lock = Lock()
        self._epochs = array("q", [_NOTHING]) * num_extents
        self._owed: dict[int, int] = {}
        self._compacts_above = _MOST_RECORDS_PER_EXTENT * num_extents
        for block in held:
            self._epochs[block.extent] = block.epoch

    def wrote(self, block: DiskBlock) -> None:
        """A block's bytes are in its extent.

        Raises:
            OSError: That could not be recorded; after a restart the extent holds nothing.
        """
        with self._lock:
            self._pay()
            self._log.append(encode_holds(block))
            self._epochs[block.extent] = block.epoch
            self._compact_if_due()

    def erase(self, extent: int, epoch: int) -> None:
        """An extent holds nothing any more, if it held a block of that epoch.

        Raises:
            OSError: That could not be recorded yet; it will be before anything else is.
        """
        with self._lock:
            if self._epochs[extent] == epoch:
                self._let_go(extent)
            self._pay()
            self._compact_if_due()

    def vacate(self, extent: int) -> None:
        """Other bytes are about to be written to an extent, whatever it held.

        Raises:
            OSError: That could not be recorded; the extent is not to be written to.
        """
        with self._lock:
            if self._epochs[extent] != _NOTHING:
                self._let_go(extent)
            self._pay()

    def close(self) -> None:
        """Lets go of the file, once it is on the disk or that has failed (`OSError`). A second time has no effect."""
        with self._lock:
            if self._log.closed:
                return
            try:
                self._log.sync()
            finally:
                self._log.close()

    def _let_go(self, extent: int) -> None:
        self._owed[extent] = self._epochs[extent]
        self._epochs[extent] = _NOTHING

    def _pay(self) -> None:
        while self._owed:
            extent, epoch = next(iter(self._owed.items()))
            self._log.append(encode_erased(Erased(extent=extent, epoch=epoch)))
            del self._owed[extent]

    def _compact_if_due(self) -> None:
        if len(self._log) <= self._compacts_above:
            return
        try:
            log = begin_log(self._path, self._slot_bytes, self._records_that_count())
        except OSError as error:
            self._compacts_above = 2 * len(self._log)
            _log.warning("the journal of the pool's disk stays long", reason=str(error))
            return
        self._log, old = log, self._log
        self._compacts_above = _MOST_RECORDS_PER_EXTENT * len(self._epochs)
        old.close()

    def _records_that_count(self) -> Iterator[bytes]:
        # An extent's epochs may repeat after a restart. The order stays, so the last record is the one that counts again.
        end = 0
        with self._path.open("rb", buffering=_READ_BYTES) as file:
            for frame in frames(file):
                block, end = decode(frame.record), frame.end
                if isinstance(block, DiskBlock) and self._epochs[block.extent] == block.epoch:
                    yield frame.record
        if end != self._log.size_bytes:
            raise OSError(errno.EIO, "the journal does not read as it was written")


def begin_log(path: Path, slot_bytes: int, records: Iterable[bytes]) -> SealedLog:
    """Writes a journal beside the one at `path`, which it then replaces: at any moment there is the one or the other, whole.

    Raises:
        OSError: It could not be written; the journal at `path` is as it was.
    """
    beside = path.with_suffix(".new")
    log = SealedLog(beside)
    try:
        log.extend(chain((encode_begins(slot_bytes),), records))
        log.sync()
        os.replace(beside, path)
    except OSError:
        log.close()
        beside.unlink(missing_ok=True)
        raise
    try:
        sync_directory(path.parent)
    except OSError as error:
        # A power loss may bring the old one back, which has other bytes in its extents than it says: those are misses.
        _log.warning("the new journal may be lost with the power", reason=str(error))
    return log
