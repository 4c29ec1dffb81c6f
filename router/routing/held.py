"""How much of a prompt each worker holds: numbers by slot, as C writes them (`table.c`) and reads them (`pricing.c`)."""

from array import array
from collections.abc import Iterator, Mapping


class HeldBySlot(Mapping[int, int]):
    """Leading blocks or tokens of one prompt by slot of the prefix index; slots that hold none are not in it.

    Args:
        slots: So many there are.

    Attributes:
        address: Of the numbers.
        slots: As many as they are.
    """

    __slots__ = ("_held", "address", "slots")

    def __init__(self, slots: int) -> None:
        self._held = array("q", bytes(8 * slots))
        self.slots = slots
        self.address = self._held.buffer_info()[0]

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
        self._held[slot] = count

    def __getitem__(self, slot: int) -> int:
        count = self._held[slot] if 0 <= slot < len(self._held) else 0
        if not count:
            raise KeyError(slot)
        return count

    def get(self, slot: int, default: int = 0) -> int:  # type: ignore[override]  # nothing held is 0
        """What the worker at `slot` holds, or `default`."""
        count = self._held[slot] if 0 <= slot < len(self._held) else 0
        return count or default

    def __iter__(self) -> Iterator[int]:
        return (slot for slot, count in enumerate(self._held) if count)

    def __len__(self) -> int:
        return len(self._held) - self._held.count(0)
