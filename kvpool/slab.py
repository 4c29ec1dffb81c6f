"""The memory in which a node's blocks lie, and the door through which the workers of its host map it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from baton.errors import ConfigError
from kv_transfer.region_server import serve_region
from kv_transfer.regions import SharedRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What a worker needs to map the slab.

    Attributes:
        path: Unix socket that gives the descriptor.
        token: Shown there, once.
        num_slots: Of the slab.
        slot_bytes: Of each.
    """

    path: str
    token: bytes
    num_slots: int
    slot_bytes: int


class Slab:
    """Slots of one size in one shared region.

    Args:
        memory_bytes: What there is; as many slots as fit are made.
        slot_bytes: Of each.
        path: Unix socket that gives the region's descriptor to whoever was invited.

    Attributes:
        region: The memory.
        num_slots: That fit.
        slot_bytes: Of each.
        path: As given.

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
        self.region = SharedRegion.create(self.num_slots * slot_bytes)
        self._gate = serve_region(self.region, path)

    @property
    def size_bytes(self) -> int:
        """Of the region."""
        return self.region.size_bytes

    def invite(self, gone: Callable[[], None]) -> Welcome:
        """Lets one worker map the slab once; `gone` is called, on another thread, when it has let go."""
        return Welcome(
            path=self.path,
            token=self._gate.grant(gone),
            num_slots=self.num_slots,
            slot_bytes=self.slot_bytes,
        )

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot."""
        return self.region.memoryview[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def right(
        self, slots: Sequence[int], checksums: Sequence[bytes], block_bytes: int
    ) -> list[bool]:
        """Whether each slot holds what its checksums say. Blocks; for threads that nobody waits for.

        Args:
            slots: Which.
            checksums: Of each, a 64-bit number per layer, little-endian.
            block_bytes: That each block takes of its slot; the layers share them evenly.
        """
        return [
            _is_right(self.slot(slot)[:block_bytes], np.frombuffer(sums, dtype="<u8"))
            for slot, sums in zip(slots, checksums, strict=True)
        ]

    def close(self) -> None:
        """Lets nobody in any more; workers that map the slab see their connection end."""
        self._gate.close()
        self.region.close()


def _is_right(block: memoryview, sums: npt.NDArray[np.uint64]) -> bool:
    layer_bytes = len(block) // len(sums)
    time.sleep(0)  # hashing a short layer keeps the interpreter's lock
    return all(
        xxhash.xxh3_64_intdigest(block[at * layer_bytes : (at + 1) * layer_bytes]) == said
        for at, said in enumerate(sums.tolist())
    )
