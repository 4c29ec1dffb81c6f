"""Where an arena lies, as transports that register memory have to know it.

The KV arena of an engine on a CPU is host memory. One on a GPU is device memory: its address means something to the GPU and
to an adapter that reaches it, and nothing here may read it.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from baton.errors import InvariantError, TransferError
from baton.layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSpan:
    """The bytes of one arena.

    Attributes:
        address: Of the first byte, in this process.
        size_bytes: How many.
        device: Index of the GPU that holds them; None for host memory.
        view: The bytes themselves where the CPU may touch them; keeps them alive.
    """

    address: int
    size_bytes: int
    device: int | None = None
    view: memoryview | None = None

    @classmethod
    def of_host(cls, view: memoryview) -> Self:
        """Host memory that `view` shows."""
        address = np.frombuffer(view, dtype=np.uint8).ctypes.data
        return cls(address=int(address), size_bytes=len(view), view=view)

    @property
    def host_view(self) -> memoryview:
        """The bytes of an arena in host memory."""
        if self.view is None:
            raise InvariantError("the arena is not in host memory")
        return self.view

    def check_holds(self, layout: KvLayout, num_blocks: int) -> None:
        """Refuses a span that is too small.

        Raises:
            TransferError: Names both sizes.
        """
        if self.size_bytes < layout.region_bytes(num_blocks):
            raise TransferError(
                f"an arena of {self.size_bytes} bytes cannot hold {num_blocks} pages"
            )
