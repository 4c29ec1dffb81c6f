"""Workers in one order, with the addresses of their records: what the C functions of `pricing.c` go through."""

import ctypes
from typing import Generic, TypeVar

from router.routing.numbers import WorkerNumbers

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

    __slots__ = ("addresses", "slots", "workers")

    def __init__(self, workers: tuple[WorkerT, ...]) -> None:
        self.workers = workers
        self.addresses = (ctypes.c_void_p * len(workers))(*map(ctypes.addressof, workers))
        self.slots = 1 + max((worker.slot for worker in workers), default=-1)

    def __len__(self) -> int:
        return len(self.workers)
