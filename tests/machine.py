"""Which tests may run at the same time: the processes of one run tell each other by locks."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TESTS = Path(__file__).resolve().parent


class Machine:
    """The machine that the processes of one test run share. Each process has one of its own;
    a process that ends gives up its place.

    A test that is to be alone waits until the others have ended. Whoever comes later waits behind it,
    so that it gets its turn.

    Args:
        queue: Locked by the one process that is next.
        running: Locked by the processes whose tests run. Two folders,
            whose locks need no files that somebody would have to remove.
    """

    def __init__(self, queue: Path = _TESTS.parent, running: Path = _TESTS) -> None:
        self._queue = os.open(queue, os.O_RDONLY)
        self._running = os.open(running, os.O_RDONLY)

    @contextmanager
    def taken(self, *, alone: bool) -> Iterator[None]:
        """Waits for the machine, or for a share of it."""
        fcntl.flock(self._queue, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._running, fcntl.LOCK_UN)
