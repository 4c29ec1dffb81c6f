"""Full pages that wait to be put into the pool: between the engine, which fills them, and the publisher, which is slower."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from baton.pages import PublishedPage


class PublishQueue:
    """A `baton_engine.ports.BlockSink` that forgets the oldest pages when there are too many: they are the ones most likely to have
    been handed out again. Pages themselves are not held; see `PublishedPage.generation`.

    Offered to by one thread, taken from by another.

    Args:
        capacity: Pages that may wait.
        wake: Called after each offer, on the engine's thread; must not block.
    """

    def __init__(self, capacity: int, wake: Callable[[], None]) -> None:
        self._pages: deque[PublishedPage] = deque(maxlen=capacity)
        self._wake = wake
        self._lock = threading.Lock()
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def dropped(self) -> int:
        """Pages that were forgotten so far."""
        return self._dropped

    def offer(self, pages: Sequence[PublishedPage]) -> None:
        """See BlockSink."""
        with self._lock:
            room = (self._pages.maxlen or 0) - len(self._pages)
            self._dropped += max(0, len(pages) - room)
            self._pages.extend(pages)
        self._wake()

    def clear(self) -> int:
        """Forgets every page that waits. Returns how many these were."""
        with self._lock:
            num_pages = len(self._pages)
            self._dropped += num_pages
            self._pages.clear()
        return num_pages

    def take(self, most: int) -> list[PublishedPage]:
        """The oldest pages of one owner, in order; empty when none wait."""
        taken: list[PublishedPage] = []
        with self._lock:
            while self._pages and len(taken) < most:
                if taken and _owner(self._pages[0]) != _owner(taken[0]):
                    break
                taken.append(self._pages.popleft())
        return taken


def _owner(page: PublishedPage) -> tuple[str, str]:
    return page.tenant, page.scope
