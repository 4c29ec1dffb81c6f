"""The directory of one node's disk tier: made if need be, and locked while this node uses it."""

import errno
import fcntl
import os
from pathlib import Path

from baton.errors import ConfigError

_LOCK = "lock"
_OPERATORS_FAULT = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)


class Folder:
    """Holds a directory until it is closed or its process has ended, however it ends.

    What lies there is what people have asked and been answered, as numbers: only this user may read it.

    Args:
        path: Of the directory.

    Raises:
        ConfigError: Another process holds it, others may write there, or it cannot be made or used as things are set up.
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
