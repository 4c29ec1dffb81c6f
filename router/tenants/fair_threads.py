"""Threads for what takes long about a request, shared by tenants: each has its turn (`router.generation.grammars`,
`router.text.long_texts`).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

_Result = TypeVar("_Result")


class FairThreads:
    """Of each tenant one piece of work at a time is with the threads, which take these in the order in which they come:
    nobody waits for more than one piece of each other tenant. For one event loop.

    Args:
        threads: How many there are.
        name: Begins their names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        # A tenant's lock lasts as long as somebody holds it or waits for it.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, tenant_id: str, work: Callable[[], _Result]) -> _Result:
        """What `work` returns, or raises. If this is cancelled before a thread has begun the work, it is not done; after
        that it is finished, and its tenant has no other turn before.
        """
        loop, turn = asyncio.get_running_loop(), self._turn_of(tenant_id)
        await turn.acquire()
        try:
            working = self._pool.submit(work)
        except RuntimeError:  # closed
            turn.release()
            raise
        working.add_done_callback(lambda _: loop.call_soon_threadsafe(turn.release))
        return await asyncio.wrap_future(working)

    def close(self) -> None:
        """Ends the threads. Blocks until the work that they have begun is finished; the rest is cancelled."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _turn_of(self, tenant_id: str) -> asyncio.Lock:
        turn = self._turns.get(tenant_id)
        if turn is None:
            turn = self._turns[tenant_id] = asyncio.Lock()
        return turn
