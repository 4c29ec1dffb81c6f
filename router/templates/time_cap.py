"""A bound on how long a piece of Python may run in a thread: chat templates come with models, and may loop for ever.

A thread cannot be killed, but the interpreter can be asked to raise an exception in it. It does so between two
bytecodes, so what loops inside a single call of C is not stopped: chat templates have those weighed first (`router.templates.sizes`).
"""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")
_CHECK_S = 0.05


class TimeCapError(Exception):
    """It took too long."""


class TimeCap:
    """Runs things in any number of threads, each for so long at most. One thread of its own watches them.

    Args:
        limit_s: How long each may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._running: dict[int, float] = {}
        self._wanted = threading.Event()
        self._watcher: threading.Thread | None = None
        self._closed = False

    def run(self, work: Callable[[], _Result]) -> _Result:
        """What `work` returns.

        Raises:
            TimeCapError: It took too long; it was stopped where it was.
        """
        thread = threading.get_ident()
        self._begin(thread)
        arrived = False
        try:
            return work()
        except TimeCapError:
            arrived = True
            raise
        finally:
            self._end(thread, arrived=arrived)

    def close(self) -> None:
        """Ends the watching thread."""
        self._closed = True
        self._wanted.set()
        if self._watcher is not None:
            self._watcher.join()

    def _begin(self, thread: int) -> None:
        with self._lock:
            self._running[thread] = time.monotonic() + self._limit_s
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="time cap", daemon=True)
                self._watcher.start()
        self._wanted.set()

    def _end(self, thread: int, *, arrived: bool) -> None:
        with self._lock:
            in_time = self._running.pop(thread, None) is not None
        while not in_time and not arrived:
            # The exception is on its way: it must arrive here, and nowhere later.
            time.sleep(0.001)

    def _watch(self) -> None:
        while not self._closed:
            self._wanted.wait()
            time.sleep(min(_CHECK_S, self._limit_s / 4))
            with self._lock:
                now_s = time.monotonic()
                for thread in [t for t, until_s in self._running.items() if until_s <= now_s]:
                    del self._running[thread]
                    _raise_in(thread)
                if not self._running:
                    self._wanted.clear()


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(TimeCapError)
    )
