"""The memory in which a node's blocks lie, and the socket through which the workers of its host map it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from baton.block_ids import Numbers
from baton.errors import ConfigError
from baton.ids import LayerName
from baton.layout import KvLayout
from kv_transfer.memory.pages import Pages
from kv_transfer.memory.shared_region import SharedRegion, serve_region
from kvpool.hashed_copy import Hashes, copy_hashed

_SCRATCH_BYTES = 512 << 10
"""What fits a core's own cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabOffer:
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
        path: Unix socket that gives the region's descriptor to whatever shows a token.

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
        self.region = SharedRegion.create(self.num_slots * slot_bytes, "pool.memory_bytes")
        try:
            self._server = serve_region(self.region, path)
        except OSError:
            self.region.close()
            raise

    @property
    def size_bytes(self) -> int:
        """Of the region."""
        return self.region.size_bytes

    def offer(self, gone: Callable[[], None]) -> SlabOffer:
        """Lets one worker map the slab once; `gone` is called, on another thread, when it has let go."""
        return SlabOffer(
            path=self.path,
            token=self._server.issue_token(gone),
            num_slots=self.num_slots,
            slot_bytes=self.slot_bytes,
        )

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot."""
        return self.region.memoryview[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def right(
        self, slots: Sequence[int], checksums: Sequence[bytes], block_bytes: int
    ) -> list[bool]:
        """Whether each slot holds what its checksums say. Blocks, and lets other threads run meanwhile.

        Args:
            slots: Which.
            checksums: Of each, a 64-bit number per layer, little-endian; of all of them as many.
            block_bytes: That each block takes of its slot; the layers share them evenly.
        """
        if not slots:
            return []
        said = np.frombuffer(b"".join(checksums), dtype="<u8").reshape(len(slots), -1)
        num_layers = said.shape[1]
        memory = np.frombuffer(self.region.memoryview, dtype=np.uint8)
        rows = memory[: self.size_bytes].reshape(self.num_slots, self.slot_bytes)
        ends = [at * (block_bytes // num_layers) for at in range(num_layers + 1)]
        found = [_hashes(rows[:, begin:end], np.array(slots)) for begin, end in pairwise(ends)]
        right: list[bool] = (said == np.stack(found, axis=1)).all(axis=1).tolist()
        return right

    def close(self) -> None:
        """Admits no process any more; workers that map the slab see their connection end."""
        self._server.close()
        self.region.close()


def _hashes(layer: Pages, slots: Numbers) -> Hashes:
    """What each slot's part of one layer hashes to. The quickest way to hash rows is to copy them to where a core has
    them at hand.
    """
    rows_at_once = max(1, _SCRATCH_BYTES // layer.shape[1])
    scratch = np.empty((rows_at_once, layer.shape[1]), dtype=np.uint8)
    rows = np.arange(rows_at_once)
    turns = [slots[at : at + rows_at_once] for at in range(0, len(slots), rows_at_once)]
    return np.concatenate([copy_hashed(layer, scratch, turn, rows[: len(turn)]) for turn in turns])


_DTYPE, _BYTES_PER_ROW = "float16", 4
"""A page is rows of one key and one value; here one of each, as long as need be."""


def slab_layout(slot_bytes: int) -> KvLayout:
    """Of a slab with slots of so many bytes. Nodes with slots of another size refuse each other by `head_dim`.

    Raises:
        ConfigError: No block of any model has that size.
    """
    head_dim, odd = divmod(slot_bytes, _BYTES_PER_ROW)
    if odd or not head_dim:
        raise ConfigError(f"block_bytes: {slot_bytes} is not a multiple of {_BYTES_PER_ROW}")
    return KvLayout(
        model_fingerprint="pool",
        dtype=_DTYPE,
        block_tokens=1,
        num_kv_heads=1,
        head_dim=head_dim,
        layers=(LayerName("slots"),),
    )
