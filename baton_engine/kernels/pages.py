"""The kernels by which pages of an arena on a GPU are moved and checked, for the worker that hands them over to its transfers."""

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton_engine.cache.arena import KvArena

if TYPE_CHECKING:
    from baton_engine.kernels.triton.page_move import PageKernel
    from baton_engine.kernels.triton.page_sum import PageSums


@dataclass(frozen=True, slots=True, kw_only=True)
class PageKernels:
    """Of one arena.

    Attributes:
        mover: Copies scattered pages (a `kv_transfer.backends.cuda_ipc.PageMover`).
        sums: Hashes pages by `word_sum` (a `kv_transfer.memory.page_hash.PageHashes`).
    """

    mover: "PageKernel"
    sums: "PageSums"


def page_kernels(arena: KvArena) -> PageKernels | None:
    """Those of an arena on a GPU; None for one in host memory, and without Triton, where the driver's own copies have to do."""
    if arena.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from baton_engine.kernels.triton.page_move import PageKernel
    from baton_engine.kernels.triton.page_sum import PageSums

    layers = [arena.page_bytes(index) for index in range(len(arena.layout.layers))]
    return PageKernels(mover=PageKernel(arena.device), sums=PageSums(layers))
