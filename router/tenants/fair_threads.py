"""Threads for what takes long about a request, shared by tenants: each has its turn (`router.generation.grammars`,
`router.text`).
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Piece(Generic[_Result]):
    """Work, and what is told of its end."""

    work: Callable[[], _Result]
    done: Future[_Result]


class FairThreads:
    """A thread that is free takes a piece of the next tenant, and one that had its turn comes behind all others: nobody
    waits for more than one piece of each other tenant, and for what the threads have begun. The threads choose, not
    the event loop, which may be slow to run while they have work.

    Args:
        threads: How many there are.
        name: Begins their names.
        each: How many of them may work for one tenant at a time.
    """

    def __init__(self, threads: int, name: str, *, each: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._each = each
        self._lock = threading.Lock()
        # By tenant, in the order of their turns.
        self._waiting: dict[str, deque[_Piece[Any]]] = {}
        self._running: Counter[str] = Counter()

    async def run(self, tenant_id: str, work: Callable[[], _Result]) -> _Result:
        """What `work` returns, or raises. If this is cancelled before a thread has begun the work, it is not done;
        after that it is finished, and counts for its tenant until then.
        """
        done = Future[_Result]()
        with self._lock:
            self._waiting.setdefault(tenant_id, deque()).append(_Piece(work, done))
        try:
            self._pool.submit(self._work_off)
        except RuntimeError:  # closed, or no thread can be started
            done.cancel()
            raise
        result = asyncio.wrap_future(done)
        # An error's traceback holds this frame: what it knows would be kept until a late collection.
        del work, done
        try:
            return await result
        finally:
            del result

    def close(self) -> None:
        """Ends the threads. Blocks until the work that they have begun is finished; whoever waits for other work gets a
        RuntimeError.
        """
        with self._lock:
            left = [piece for pieces in self._waiting.values() for piece in pieces]
            self._waiting.clear()
        for piece in left:
            if piece.done.set_running_or_notify_cancel():
                piece.done.set_exception(RuntimeError("the threads have ended"))
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _work_off(self) -> None:
        """Does what waits, until nothing is left, or only of tenants for which others work: who ends takes that."""
        while (taken := self._take()) is not None:
            tenant_id, piece = taken
            try:
                _do(piece)
            finally:
                del taken, piece
                with self._lock:
                    self._running[tenant_id] -= 1
                    self._running += Counter()  # without those that are at 0
                    if tenant_id in self._waiting:
                        self._waiting[tenant_id] = self._waiting.pop(tenant_id)  # behind all others

    def _take(self) -> tuple[str, _Piece[Any]] | None:
        with self._lock:
            while (tenant_id := self._next_tenant()) is not None:
                pieces = self._waiting.pop(tenant_id)
                piece = pieces.popleft()
                if pieces:
                    self._waiting[tenant_id] = pieces
                if piece.done.set_running_or_notify_cancel():
                    self._running[tenant_id] += 1
                    return tenant_id, piece
        return None

    def _next_tenant(self) -> str | None:
        return next((one for one in self._waiting if self._running[one] < self._each), None)


def _do(piece: _Piece[Any]) -> None:
    work, done = piece.work, piece.done
    del piece
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  # whoever waits is told, of whatever it is
        done.set_exception(error)
    else:
        done.set_result(result)
    finally:
        del work, done
