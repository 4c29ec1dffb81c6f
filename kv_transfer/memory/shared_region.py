"""Shared memory in which a worker's KV arenas live, so that a peer on the same host can write into them.

A region is an anonymous file (memfd): it has no name anywhere, so nothing is left behind whatever is killed. Its size
is sealed: a peer that could shrink it would make the owner's next access a SIGBUS. The descriptor reaches peers through
a region server, which also knows when they have unmapped it (`serve_region`, `attach_region`).
"""

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton import cgroups
from baton.errors import OutOfMemoryError, TransferError, UnreachableError
from kv_transfer.memory.attach import AttachToken, attach
from kv_transfer.memory.region_server import RegionServer

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_CGROUP_UNLIMITED = 1 << 60
_MOST_POPULATED_BYTES = 16 << 30
_POPULATED_AT_ONCE_BYTES = 16 << 20
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
"""Since Linux 5.14 and 6.1; unknown to `mmap`."""
HUGE_PAGES_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class SharedRegion:
    """One mapped, sealed memfd. The owner creates it, peers attach to it by descriptor.

    Closing drops the descriptor and this mapping; views that others still hold keep the memory alive until they go.
    """

    def __init__(self, fd: int, size_bytes: int, *, wants_huge_pages: bool = False) -> None:
        """Maps `fd` and takes ownership of it; use `create` or `attach`."""
        self._fd = fd
        self._wants_huge_pages = wants_huge_pages
        self._mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED)
        self._view = memoryview(self._mapping)
        self._closed = threading.Event()
        self._populating = threading.Thread(target=self._populate, name="populate", daemon=True)
        if size_bytes <= _MOST_POPULATED_BYTES:
            self._populating.start()

    @classmethod
    def create(cls, size_bytes: int, setting: str = "kv_cache_memory_bytes") -> "SharedRegion":
        """A new zeroed region whose memory is taken now, not at first touch.

        Args:
            size_bytes: Of the region.
            setting: That says so.

        Raises:
            OutOfMemoryError: The machine or its cgroup has not got that much.
        """
        available = available_bytes()
        if size_bytes > available:
            raise _out_of_memory(size_bytes, available, setting)
        fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(
                fd, size_bytes
            )  # before memory is taken, which by its size may be in huge pages
            os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size_bytes, wants_huge_pages=shared_huge_pages() == "advise")
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
                raise _out_of_memory(size_bytes, available, setting) from error
            raise

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> "SharedRegion":
        """Maps a peer's region and takes ownership of `fd`.

        Raises:
            TransferError: It is not of that size, or its owner could still shrink it.
        """
        try:
            found = os.fstat(fd).st_size
            if found != size_bytes:
                raise TransferError(f"the peer's region has {found} bytes, expected {size_bytes}")
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise TransferError("the peer's region is not sealed against resizing")
            return cls(fd, size_bytes)
        except (OSError, TransferError) as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise TransferError(f"the peer's region cannot be mapped: {error}") from error
            raise

    @property
    def fd(self) -> int:
        """Descriptor to hand to peers; stays this object's."""
        return self._fd

    @property
    def size_bytes(self) -> int:
        """Size of the region."""
        return len(self._mapping)

    @property
    def memoryview(self) -> memoryview:
        """The region's bytes, writable."""
        return self._view

    def close(self) -> None:
        """Drops the descriptor and the mapping; harmless when repeated."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._populating.ident is not None:
            self._populating.join()
        os.close(self._fd)
        try:
            self._view.release()
            self._mapping.close()
        except BufferError:
            # Something (an engine's tensors) still views the bytes; the mapping goes with the last such view.
            return

    def _populate(self) -> None:
        """Without this the first push to every page of a peer would pay for a page fault. Nobody waits for it: it takes
        from 80 ms per GiB up to some seconds, in a virtual machine whose host gives the memory only now.

        Where the host gives huge pages to shared memory that asks for them, what of the region fills such pages is moved
        into them first, three seconds per GiB, since KV in them is read and handed over faster
        (`docs/guides/kubernetes.md`). Only its owner asks: they are charged to the cgroup of whoever does.
        """
        libc = ctypes.CDLL(None)
        first = ctypes.c_char.from_buffer(self._mapping)
        for offset in range(0, len(self._mapping), _POPULATED_AT_ONCE_BYTES):
            # In pieces, for whatever else changes this process's mappings waits for each.
            length = min(_POPULATED_AT_ONCE_BYTES, len(self._mapping) - offset)
            piece = ctypes.c_void_p(ctypes.addressof(first) + offset), ctypes.c_size_t(length)
            if self._wants_huge_pages:
                libc.madvise(*piece, _MADV_COLLAPSE)
            if libc.madvise(*piece, _MADV_POPULATE_WRITE):
                self._view[offset : offset + length : mmap.PAGESIZE].tobytes()  # an older kernel
            if self._closed.is_set():
                return


def shared_huge_pages() -> str:
    """When this host gives huge pages to shared memory: `never`, to what asks for them (`advise`) ...; `unknown` where
    Linux does not say.
    """
    try:
        told = HUGE_PAGES_SWITCH.read_text()
    except OSError:
        return "unknown"
    return told.partition("[")[2].partition("]")[0]


def available_bytes() -> int:
    """Memory that can be taken now: the machine's, or what its cgroups leave if that is less."""
    return min(psutil.virtual_memory().available, _cgroup_bytes_left())


def _cgroup_bytes_left() -> int:
    """What the tightest cgroup on the way to the root leaves (v2, or v1's memory controller). Files that were read, as a
    model's weights were, count as used there, but give way: what is left is taken as kubelet takes it.
    """
    left = _CGROUP_UNLIMITED
    for folder in cgroups.folders("memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = cgroups.number(folder / limit_name)
            used = cgroups.number(folder / used_name)
            if limit is not None and used is not None:
                needed = max(used - _inactive_file_bytes(folder), 0)
                left = min(left, max(limit - needed, 0))
    return left


def _inactive_file_bytes(folder: Path) -> int:
    """Of a cgroup and those below it."""
    lines = cgroups.read(folder / "memory.stat").splitlines()
    stat = dict(line.split(maxsplit=1) for line in lines)
    return int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)  # v1, v2


def _out_of_memory(asked: int, available: int, setting: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"{setting}: {asked} bytes ({asked / 2**30:.2f} GiB) were asked for, "
        f"{available} bytes ({available / 2**30:.2f} GiB) are available",
        param=setting,
    )


_ATTACHED = b"A"


def serve_region(region: SharedRegion, path: str) -> RegionServer:
    """Serves the region's descriptor on the Unix socket `path`.

    Raises:
        OSError: The socket cannot be bound.
    """

    def give(peer: socket.socket, _token: bytes, _key: bytes) -> None:
        socket.send_fds(peer, [_ATTACHED], [region.fd])

    return RegionServer(f"unix:{path}", give)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A peer's mapped region. Closing it tells the owner that nothing more will be written."""

    region: SharedRegion
    connection: socket.socket

    def close(self) -> None:
        """Unmaps first: the owner may reuse the memory as soon as the connection ends."""
        self.region.close()
        self.connection.close()


def attach_region(path: str, token: bytes, size_bytes: int) -> Attachment:
    """Gets and maps the region that `token` stands for. Blocks for at most a few seconds.

    Raises:
        TransferError: No process serves there, the token is refused, or the region is not of that size.
    """
    connection = attach(AttachToken(secret=token, address=f"unix:{path}")).connection
    try:
        answer, fds, _, _ = socket.recv_fds(connection, len(_ATTACHED), 1)
        if answer != _ATTACHED or len(fds) != 1:
            raise TransferError("the peer refused the region's token")
        region = SharedRegion.attach(fds[0], size_bytes)
    except OSError as error:
        connection.close()
        raise UnreachableError(f"the peer's region at {path} cannot be reached: {error}") from error
    except TransferError:
        connection.close()
        raise
    return Attachment(region=region, connection=connection)
