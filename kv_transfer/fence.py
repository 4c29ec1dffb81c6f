"""When a decode worker may be sure that a peer writes nothing any more, where the peer was shown several ways in.

A session that falls back from one backend to the next has shown more than one region handle; each is taken back by itself, and
the answer comes from any thread.
"""

import threading
from collections.abc import Callable

from kv_transfer.ports import KvReceiver, RegionHandle


class Fence:
    """Tells once that a session's peer can never write here again: when every way in that it was shown is shut."""

    def __init__(self, fenced: Callable[[], None]) -> None:
        self._fenced = fenced
        self._lock = threading.Lock()
        self._open = 1  # the ways that may still be shown

    def revoke(self, receiver: KvReceiver, handle: RegionHandle) -> None:
        """Shuts one way."""
        with self._lock:
            self._open += 1
        receiver.revoke(handle, self._shut)

    def close(self) -> None:
        """No other way will be shown."""
        self._shut()

    def _shut(self) -> None:
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            self._fenced()
