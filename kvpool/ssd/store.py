"""The disk tier of a pool node: `ExtentStore` over files in one directory. The node's threads call it;
nothing here runs by itself.

    write    erase what the extent held ──▶ header and bytes ──▶ record in the journal
    read     header and bytes ──▶ compared with the block's key, epoch and the hash of each layer
    start    journal ──▶ blocks

Killed, at any moment: everything that was written is still there, since the system has it. After a restart a block is
held if its record was written, and its bytes were written before that.

Power lost: nothing is waited for but a rewritten journal, before it takes the old one's name, and the journal when it
is closed. What the system had not put on the disk yet (it begins with blocks at once, with the journal within half a
minute or so) is lost, in whatever order; the journal may then speak of bytes that never arrived, or not know of an
erasure. Such blocks are found out when they are read, so a block is read right or not at all, as ever. To wait for the
disk after every block would cost a cache more than it is worth: what is lost with the power is computed again. What
was flushed (`forget`) is waited for: it is never held again.
"""

import errno
import fcntl
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from baton.errors import ConfigError
from kvpool.messages import DiskBlock, Erase, FlushMark
from kvpool.ssd.extents import Extents, extent_bytes
from kvpool.ssd.journal import recover

_JOURNAL_BYTES = 4096
"""That an extent's records may take, those that are void and those of a new journal beside included."""
_LOCK = "lock"
_OPERATORS_FAULT = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)


class SsdStore:
    """`ExtentStore`. Erasures, and calls about different extents, may come from different threads at once;
    `close` comes after the last of them.

    Args:
        directory: Where the files are; no other node may use it meanwhile.
        size_bytes: That they may take. They are made as they are needed, and never shrink.
        slot_bytes: The size of the largest block. With another one than before, what the disk held is forgotten.

    Raises:
        ConfigError: Another node uses the directory, it cannot be used as things are set up,
            or there is no room for a block.
        OSError: The disk fails, is full, or can only be read: the node does without.
    """

    def __init__(self, directory: Path, size_bytes: int, slot_bytes: int) -> None:
        self._num_extents = _num_extents(size_bytes, slot_bytes)
        with ExitStack() as undo:
            self._folder = LockedDirectory(directory)
            undo.callback(self._folder.close)
            self._extents = Extents(directory, self._num_extents, slot_bytes)
            undo.callback(self._extents.close)
            self._journal, self._found = recover(
                directory,
                self._extents.present,
                slot_bytes=slot_bytes,
                num_extents=self._num_extents,
            )
            undo.pop_all()

    @property
    def num_extents(self) -> int:
        """See `ExtentStore`; fewer than the bytes divided by a slot, since each has a header and records."""
        return self._num_extents

    def write(self, block: DiskBlock, data: memoryview) -> None:
        """See `ExtentStore`; `data` begins with the block.

        Raises:
            CorruptKvError: It has other bytes or checksums than a block has.
            OSError: The disk fails or has no room; the extent holds nothing.
        """
        self._journal.vacate(block.extent)
        self._extents.write(block, data)
        self._journal.wrote(block)

    def read(self, block: DiskBlock, into: memoryview) -> None:
        """See `ExtentStore`; the block is put at the beginning of `into`, which has anything in it if this raises."""
        self._extents.read(block, into)

    def erase(self, extent: int, epoch: int) -> None:
        """See `ExtentStore`. The bytes stay until others are written over them; they are not found any more.

        Raises:
            OSError: It could not be recorded yet; it will be before anything else is.
        """
        self._journal.erase(extent, epoch)

    @property
    def flush_mark(self) -> FlushMark | None:
        """See `ExtentStore`."""
        return self._journal.flush_mark

    def forget(self, erased: Sequence[Erase], mark: FlushMark | None = None) -> None:
        """See `ExtentStore`. From any thread, whatever is written or read meanwhile.

        Raises:
            OSError: It could not be recorded yet, or may not be on the disk; it will be recorded before anything else.
        """
        self._journal.forget(erased, mark)

    def recover(self) -> list[DiskBlock]:
        """See `ExtentStore`; says it once, since a disk may hold many."""
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        """See `ExtentStore`; waits until the journal is on the disk.

        Raises:
            OSError: It may not be there.
        """
        with ExitStack() as last:
            last.callback(self._folder.close)
            last.callback(self._extents.close)
            self._journal.close()


def _num_extents(size_bytes: int, slot_bytes: int) -> int:
    each = extent_bytes(slot_bytes) + _JOURNAL_BYTES
    if size_bytes < each:
        raise ConfigError(
            f"pool.ssd_bytes: {size_bytes} bytes have no room for a block, which takes {each}",
            param="pool.ssd_bytes",
        )
    return size_bytes // each


class LockedDirectory:
    """Holds a directory until it is closed or its process has ended, however it ends.

    What lies there is what people have asked and been answered, as numbers: only this user may read it.

    Args:
        path: Of the directory.

    Raises:
        ConfigError: Another process holds it, others may write there,
            or it cannot be made or used as things are set up.
        OSError: The disk fails, or can only be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(path)
            self._fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in _OPERATORS_FAULT:
                raise _unusable(f"{path}: {error.strerror}") from error
            raise
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            if isinstance(error, BlockingIOError):
                raise _unusable(f"{path} is in use by another pool node") from error
            raise

    def close(self) -> None:
        """Lets others have the directory; a second time has no effect."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _check_private(path: Path) -> None:
    # Checksums find damage, not a process that writes what it likes and hashes it.
    facts = path.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise _unusable(f"{path}: other users may write there; name a directory of this user's own")


def _unusable(reason: str) -> ConfigError:
    return ConfigError(f"pool.ssd_dir: {reason}", param="pool.ssd_dir")
