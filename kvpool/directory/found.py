"""What a directory in Redis found of a chain, in columns: a long chain's replicas become objects where somebody looks at them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import overload

import numpy as np
import numpy.typing as npt

from baton.ids import WorkerIdentity
from kvpool.messages import Replica, Tier

Replicas = tuple[Replica, ...]

_ENTRY = np.dtype(
    [
        ("head", "V16"),
        ("node", "<u4"),
        ("tier", "u1"),
        ("epoch_low", "<u4"),
        ("epoch_high", "<u2"),
    ]
)
"""One replica: a record of the directory that has no other."""

_TIERS = (Tier.DRAM, Tier.SSD)


class FoundChain(Sequence[Replicas]):
    """The replicas of the leading blocks of a chain, none of them empty.

    Args:
        entries: One per replica, in the chain's order, as `lookup.lua` packs them.
        several: Pairs of four bytes each: a block, and how many replicas it has. The others have one.
        nodes: By the numbers that stand in the entries.
    """

    def __init__(self, entries: bytes, several: bytes, nodes: Mapping[int, WorkerIdentity]) -> None:
        self._nodes = nodes
        self._entries = np.frombuffer(entries, dtype=_ENTRY)
        self._begins = _begins(len(self._entries), np.frombuffer(several, dtype="<u4"))

    def __len__(self) -> int:
        return len(self._begins) - 1

    @overload
    def __getitem__(self, at: int) -> Replicas: ...
    @overload
    def __getitem__(self, at: slice) -> list[Replicas]: ...
    def __getitem__(self, at: int | slice) -> Replicas | list[Replicas]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        block = range(len(self))[at]
        return self._between(int(self._begins[block]), int(self._begins[block + 1]))

    def __iter__(self) -> Iterator[Replicas]:
        replicas = self._between(0, len(self._entries))
        if len(replicas) == len(self):
            return zip(replicas, strict=True)
        begins = self._begins.tolist()
        return (replicas[begin:end] for begin, end in pairwise(begins))

    def _between(self, begin: int, end: int) -> Replicas:
        nodes = self._nodes
        return tuple(
            Replica(node=nodes[number], tier=_TIERS[tier], epoch=high << 32 | low)
            for _, number, tier, low, high in self._entries[begin:end].tolist()
        )


def _begins(num_entries: int, several: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Where each block's entries begin, `[num_blocks + 1]`; the last one is where they all end."""
    if not len(several):
        return np.arange(num_entries + 1)
    blocks, counts = several[::2].astype(np.int64), several[1::2].astype(np.int64)
    sizes = np.ones(num_entries - int((counts - 1).sum()), dtype=np.int64)
    sizes[blocks] = counts
    return np.concatenate(([0], np.cumsum(sizes)))
