"""The memory in which a node's blocks lie, and the door through which the workers of its host map it."""

from collections.abc import Callable

from baton.errors import ConfigError
from kv_transfer.region_server import serve_region
from kv_transfer.regions import SharedRegion


class Slab:
    """Slots of one size in one shared region.

    Args:
        memory_bytes: What there is; as many slots as fit are made.
        slot_bytes: Of each.
        path: Unix socket that gives the region's descriptor to whoever was invited.

    Raises:
        ConfigError: Not one slot fits.
        OutOfMemoryError: The machine has not got the memory.
        OSError: The socket cannot be bound.
    """

    def __init__(self, *, memory_bytes: int, slot_bytes: int, path: str) -> None:
        self.num_slots = memory_bytes // slot_bytes
        self.slot_bytes = slot_bytes
        self.path = path
        if self.num_slots < 1:
            raise ConfigError(
                f"pool.memory_bytes is {memory_bytes}, but one block takes {slot_bytes} bytes",
                param="pool.memory_bytes",
            )
        self._region = SharedRegion.create(self.num_slots * slot_bytes)
        self._gate = serve_region(self._region, path)

    @property
    def size_bytes(self) -> int:
        """Of the region."""
        return self._region.size_bytes

    def invite(self, gone: Callable[[], None]) -> bytes:
        """A token with which one worker may map the slab once; `gone` is called, on another thread, when it has let go."""
        return self._gate.grant(gone)

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot."""
        return self._region.memoryview[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def close(self) -> None:
        """Lets nobody in any more; workers that map the slab see their connection end."""
        self._gate.close()
        self._region.close()
