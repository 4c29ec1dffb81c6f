"""A benchmark that is asked to stop takes along what it has started."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM inside, as of a time limit, ends the process through its `finally`s, as Ctrl-C does.
    For the main thread.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
