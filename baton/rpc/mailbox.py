"""From any thread to the event loop, in order and in batches: how an engine's thread talks to its service."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Items posted from any thread reach `receive` on the event loop, in the order of posting.

    However many are posted before the loop gets to them, it is woken once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Callable[[Item], None]) -> None:
        self._loop = loop
        self._receive = receive
        self._items: deque[Item] = deque()
        self._woken = False
        self._closed = False

    def post(self, item: Item) -> None:
        """Hands `item` over; never blocks. After `close` it is dropped."""
        if self._closed:
            return
        self._items.append(item)
        # Without a lock: `_deliver` clears the flag before it empties the queue, so an item is either seen by the
        # delivery that is under way or wakes the next one.
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def close(self) -> None:
        """Takes nothing more; what was posted is delivered while the loop runs."""
        self._closed = True

    def _deliver(self) -> None:
        self._woken = False
        while self._items:
            self._receive(self._items.popleft())
