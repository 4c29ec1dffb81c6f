"""Workers in one order, with the addresses of their records: what the C functions of `pricing.c` go through."""

import ctypes
from typing import Generic, TypeVar

from router.routing.numbers import WorkerNumbers
from router.routing.pricing_library import pricing_library

WorkerT = TypeVar("WorkerT", bound=WorkerNumbers)


class Side(Generic[WorkerT]):
    """Some workers; it lasts for many decisions, and keeps them and their records alive.

    Args:
        workers: In order.

    Attributes:
        workers: The same.
        addresses: Of their records, an array.
        slots: Slots of the prefix index among which theirs are.
    """

    __slots__ = ("_library", "addresses", "slots", "workers")

    def __init__(self, workers: tuple[WorkerT, ...]) -> None:
        self.workers = workers
        self.addresses = (ctypes.c_void_p * len(workers))(*map(ctypes.addressof, workers))
        self.slots = 1 + max((worker.slot for worker in workers), default=-1)
        self._library = pricing_library()

    def __len__(self) -> int:
        return len(self.workers)

    def all_ready(self, heard_s: float, moved_s: float) -> bool:
        """Whether nobody drains, or said nothing since `heard_s`, or has work and has not moved since `moved_s`. False
        where there is no C to find out: then the caller has to look.
        """
        if self._library is None:
            return False
        return bool(
            self._library.baton_all_ready(self.addresses, len(self.workers), heard_s, moved_s)
        )
