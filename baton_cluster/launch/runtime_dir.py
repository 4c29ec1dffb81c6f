"""The directory of a running cluster's sockets, and the lock that tells a living cluster from the leavings of a dead
one.

The lock is a `flock` on one file description that the launcher opens and every child inherits: the kernel holds it as
long as any of these processes lives, and lets go when the last one is gone, however it died. So no process has to
trust a pid in a file. The last one out, launcher or child, takes the directory away.
"""

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from baton.errors import ConfigError

ROUTER_SOCKET = "router.sock"

_LOCK = "lock"
_POOL = "pool"
_MAX_SOCKET_PATH = 107  # sun_path of Linux, without the final zero
_LONGEST_NAME = "hybrid-1000"
"""Of a launcher's children."""


def parent_dir() -> Path:
    """Where the runtime directories of this user's clusters lie."""
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"


def default_dir(port: int) -> Path:
    """The runtime directory of the cluster whose router listens on `port`."""
    return parent_dir() / str(port)


def running_clusters() -> list[Path]:
    """Runtime directories, at the default place, of clusters that live."""
    parent = parent_dir()
    if not parent.is_dir():
        return []
    return sorted(path for path in parent.iterdir() if is_alive(path))


def is_alive(path: Path) -> bool:
    """Whether any process of the cluster at `path` lives."""
    try:
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(fd)
    finally:
        os.close(fd)


class RuntimeDir:
    """A directory that this process holds.

    Attributes:
        path: Where it is.
        lock_fd: The lock; a process that inherits it holds the directory too.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd

    @classmethod
    def claim(cls, path: Path, longest_name: str = _LONGEST_NAME) -> "RuntimeDir":
        """Makes the directory, or takes over what a dead cluster left there.

        Args:
            path: Of the directory.
            longest_name: Of those whose sockets are to lie there.

        Raises:
            ConfigError: It belongs to another user or to a living cluster, or cannot be made.
        """
        _check_length(path, longest_name)
        try:
            if path.parent == parent_dir():
                _make_private(path.parent)
            lock_fd = _acquire(path)
        except OSError as error:
            raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from error
        for leftover in (*_sockets(path), path / _POOL):
            leftover.unlink(missing_ok=True)
        return cls(path, lock_fd)

    def socket_address(self, name: str) -> str:
        """gRPC address of the child `name`."""
        return socket_address(self.path, name)

    def note_pool(self, address: str) -> None:
        """Writes down where the pool's node listens, which need not be in this directory, for others to find.

        Raises:
            ConfigError: It cannot be written, as on a full disk.
        """
        try:
            (self.path / _POOL).write_text(address, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self.path}: {(error.strerror or str(error)).lower()}") from error

    def forget(self, name: str) -> None:
        """Removes the sockets of a child that is gone."""
        for its in (name, for_peers(name)):
            for socket in (self.path / f"{its}.sock", kv_socket(self.path, its)):
                socket.unlink(missing_ok=True)

    def release(self) -> None:
        """Lets go; the last process to do so removes the directory."""
        leave(self.path, self.lock_fd)


def _acquire(path: Path) -> int:
    while True:
        _make_private(path)
        try:
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # The last process of an earlier cluster removed the directory just now.
        if not _try_lock(fd):
            os.close(fd)
            raise ConfigError(f"{path}: another cluster is running there")
        if _still_there(path, fd):
            return fd
        os.close(
            fd
        )  # Removed between our open and our lock: the file that we hold has no name any more.


def socket_address(path: Path, name: str) -> str:
    """gRPC address of the child `name` of the cluster at `path`."""
    return f"unix:{path / name}.sock"


def for_peers(name: str) -> str:
    """Under which name the pool's node `name` has its sockets for other nodes."""
    return f"{name}-peers"


def pool_address(path: Path) -> str:
    """Where the pool's node of the cluster at `path` listens; empty if it has none."""
    try:
        return (path / _POOL).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def kv_socket(path: Path, name: str) -> Path:
    """Where the child `name` gives the descriptor of its KV memory to peers: a decode worker's arena,
    the pool's slab.
    """
    return path / f"{name}.kv.sock"


def leave(path: Path, lock_fd: int) -> None:
    """Lets go of the lock, and removes the directory if no other process holds it."""
    os.close(lock_fd)
    try:
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if _try_lock(fd) and _still_there(path, fd):
            _remove(path)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    for file in (*_sockets(path), path / _POOL, path / _LOCK):
        file.unlink(missing_ok=True)
    try:
        path.rmdir()
    except OSError:
        return  # An operator's own directory with other things in it: not ours to remove.


def _sockets(path: Path) -> Iterator[Path]:
    for file in path.glob("*.sock"):
        if stat.S_ISSOCK(file.lstat().st_mode):
            yield file


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _still_there(path: Path, lock_fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(lock_fd), os.stat(path / _LOCK))
    except FileNotFoundError:
        return False


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = directory.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise ConfigError(f"{directory}: not a directory of this user's own")
    if facts.st_mode & 0o022:
        raise ConfigError(f"{directory}: other users may write there (chmod 700 it)")


def _check_length(path: Path, name: str) -> None:
    if len(os.fsencode(kv_socket(path, name))) > _MAX_SOCKET_PATH:
        raise ConfigError(f"{path}: too long for a Unix socket of {name}; set cluster.runtime_dir")
