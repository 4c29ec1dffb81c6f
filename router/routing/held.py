"""How much of a prompt each worker holds: numbers by slot, as C writes them (`table.c`) and reads them (`pricing.c`)."""

import ctypes
from collections.abc import Iterator, Mapping
from functools import lru_cache


class HeldBySlot(Mapping[int, int]):
    """Leading blocks or tokens of one prompt by slot of the prefix index; slots that hold none are not in it.

    Args:
        slots: So many there are.

    Attributes:
        numbers: The same for C.
        slots: As many as there are.
    """

    __slots__ = ("numbers", "slots")

    def __init__(self, slots: int) -> None:
        self.numbers = _numbers(slots)()
        self.slots = slots

    @classmethod
    def covering(cls, held: Mapping[int, int], slots: int) -> "HeldBySlot":
        """`held` with at least that many slots: itself if it has them, a copy if not."""
        if isinstance(held, cls) and held.slots >= slots:
            return held
        copy = cls(max(slots, 1 + max(held, default=-1)))
        for slot, count in held.items():
            copy.put(slot, count)
        return copy

    def put(self, slot: int, count: int) -> None:
        """Sets what the worker at `slot` holds."""
        self.numbers[slot] = count

    def __getitem__(self, slot: int) -> int:
        count = self.numbers[slot] if 0 <= slot < self.slots else 0
        if not count:
            raise KeyError(slot)
        return count

    def get(self, slot: int, default: int = 0) -> int:  # type: ignore[override]  # nothing held is 0
        """What the worker at `slot` holds, or `default`."""
        count = self.numbers[slot] if 0 <= slot < self.slots else 0
        return count or default

    def __iter__(self) -> Iterator[int]:
        return (slot for slot, count in enumerate(self.numbers) if count)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@lru_cache(maxsize=64)
def _numbers(slots: int) -> type[ctypes.Array[ctypes.c_int64]]:
    return ctypes.c_int64 * slots
