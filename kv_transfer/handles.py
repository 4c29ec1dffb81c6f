"""Handles of several regions as one, in place of a backend's own.

A region handle lets one process attach once. A worker whose heads lie on several ranks has a region for each, and
attaches to each of a peer's regions once for each of its own ranks. So what crosses at the handshake may be a list of
handles, of the same backend:

    sender with 1 rank, receiver with 1         the backend's own handle
    sender with 1 rank, receiver with R         [R handles], one for each of its ranks
    sender with S ranks                         [S of the above], one for each rank that attaches
"""

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.errors import TransferError, UnreachableError
from kv_transfer.ports import Done, KvReceiver, RegionHandle

MAX_RANKS = 64
_MAGIC = b"BRNK\x01"
_COUNT = struct.Struct("<H")
_LENGTH = struct.Struct("<I")


def join_handles(handles: Sequence[RegionHandle]) -> RegionHandle:
    """All of them as one; they are of one backend, and of as many pages."""
    packed = [_MAGIC, _COUNT.pack(len(handles))]
    for handle in handles:
        packed += [_LENGTH.pack(len(handle.opaque)), handle.opaque]
    return replace(handles[0], opaque=b"".join(packed))


def split_handle(handle: RegionHandle) -> list[RegionHandle]:
    """What was joined; a backend's own handle is one.

    Raises:
        TransferError: It is damaged, or names more ranks than there can be.
    """
    opaque, at = handle.opaque, len(_MAGIC) + _COUNT.size
    if not opaque.startswith(_MAGIC):
        return [handle]
    try:
        (count,) = _COUNT.unpack_from(opaque, len(_MAGIC))
        parts: list[RegionHandle] = []
        for _ in range(min(count, MAX_RANKS)):
            (length,) = _LENGTH.unpack_from(opaque, at)
            at += _LENGTH.size
            parts.append(replace(handle, opaque=opaque[at : at + length]))
            at += length
    except struct.error as error:
        raise TransferError("a handle of several regions is cut off") from error
    if not parts or len(parts) != count or at != len(opaque):
        raise TransferError(f"a handle of {len(opaque)} bytes is none of {count} regions")
    return parts


def handle_for(receiver: KvReceiver, ranks: int) -> RegionHandle:
    """What a peer with so many ranks needs: a handle for each."""
    if ranks == 1:
        return receiver.handle()
    return join_handles([receiver.handle() for _ in range(ranks)])


def revoke_for(
    receiver: KvReceiver, handle: RegionHandle, ranks: int, gone: Callable[[], None]
) -> None:
    """`KvReceiver.revoke` of what `handle_for` gave; `gone` once none of the peer's ranks can write here again."""
    if ranks == 1:
        receiver.revoke(handle, gone)
        return
    countdown = Countdown(ranks, lambda _: gone())
    for part in split_handle(handle):
        receiver.revoke(part, countdown.done_well)


class Countdown:
    """Answers once, when all have answered: with a fault if there was one, the one that ends the connection first."""

    def __init__(self, count: int, done: Done) -> None:
        self._left = count
        self._done = done
        self._error: TransferError | None = None
        self._lock = threading.Lock()

    def done(self, error: TransferError | None) -> None:
        """One has answered. From any thread."""
        with self._lock:
            if self._error is None or isinstance(error, UnreachableError):
                self._error = error or self._error
            self._left -= 1
            last = self._left == 0
        if last:
            self._done(self._error)

    def done_well(self) -> None:
        """One has answered, without a fault."""
        self.done(None)
