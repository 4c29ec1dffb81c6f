"""A file that is read and written at offsets. The only place where the disk tier calls the system to change a file's
bytes.
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

Bytes = bytes | bytearray | memoryview


class RawFile:
    """An open file of this user's own, made if it is not there. Every method may raise `OSError`;
    after `close` all of them do.

    Args:
        path: Of the file.
        empty: Whether to begin with nothing in it.
    """

    def __init__(self, path: Path, *, empty: bool = False) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if empty else 0)
        self._fd = os.open(path, flags, 0o600)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._fd < 0

    @property
    def size_bytes(self) -> int:
        """How long the file is."""
        return os.fstat(self._number).st_size

    def write_at(self, offset: int, *parts: Bytes) -> None:
        """Writes `parts`, one after the other. All of it is there when this returns; any part of it if this raises."""
        rest = _views(parts)
        while rest:
            done = os.pwritev(self._number, rest, offset)
            if done == 0:
                raise OSError(errno.EIO, "the disk takes no bytes and does not say why")
            offset += done
            rest = _without(rest, done)

    def read_at(self, offset: int, *parts: Bytes) -> int:
        """Fills `parts`, one after the other. Returns how many bytes there were: fewer where the file ends."""
        rest, total = _views(parts), 0
        while rest:
            done = os.preadv(self._number, rest, offset + total)
            if done == 0:
                break
            total += done
            rest = _without(rest, done)
        return total

    def allocate(self, begin: int, end: int) -> None:
        """Has the file reach from `begin` to `end` at least, with room on the disk for all of that."""
        os.posix_fallocate(self._number, begin, end - begin)

    def cut(self, size_bytes: int) -> None:
        """What comes after `size_bytes` is gone."""
        os.ftruncate(self._number, size_bytes)

    def not_again_soon(self, offset: int, size_bytes: int) -> None:
        """This part will not be read soon: what was written goes to the disk now, and out of the system's cache."""
        os.posix_fadvise(self._number, offset, size_bytes, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Returns once what was written is on the disk, whatever happens to the power."""
        os.fdatasync(self._number)

    def close(self) -> None:
        """Lets go of the file; a second time has no effect. Nothing may be reading or writing it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def _number(self) -> int:
        if self._fd < 0:
            raise OSError(errno.EBADF, "the file is closed")
        return self._fd


def sync_directory(path: Path) -> None:
    """Returns once files that were renamed in `path` are there under their new names, whatever happens to the power."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _views(parts: Sequence[Bytes]) -> list[memoryview]:
    return [view for view in (memoryview(part).cast("B") for part in parts) if len(view)]


def _without(views: list[memoryview], done: int) -> list[memoryview]:
    while views and done >= len(views[0]):
        done -= len(views.pop(0))
    if done:
        views[0] = views[0][done:]
    return views
