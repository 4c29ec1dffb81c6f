"""A worker whose heads lie on several ranks, as one sender and one receiver of whole pages.

All ranks of a worker begin and end together, and their arenas lie in memory that its one process maps; they have the
same pages, each its heads' slice of every page. So sessions, tickets and the books of hand-offs know one worker with
whole pages, as if it had one rank; only here, where bytes move, there is a backend of its own for every rank:

    prefill worker, 2 ranks       decode worker, 4 ranks
                         ┌──▶ 0
    rank 0, heads 0 1 ───┴──▶ 1         one push of whole pages is one push
                         ┌──▶ 2         for each pair of ranks that share heads
    rank 1, heads 2 3 ───┴──▶ 3

Which handles such a worker gives, and reads, stands in `kv_transfer/handles.py`; a ticket is bound to all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from baton.errors import TransferError
from baton.ids import BlockId
from baton.layout import KvLayout
from baton.pages import PageWrite
from kv_transfer.handles import MAX_RANKS, Countdown, join_handles, split_handle
from kv_transfer.heads import plan_sender
from kv_transfer.memory.page_hash import Checksum, Hashes, Hashing, hash_rows
from kv_transfer.memory.pages import layer_pages
from kv_transfer.ports import Done, KvReceiver, KvSender, KvWriter, Lease, RegionHandle


def rank_layouts(whole: KvLayout, ranks: int) -> list[KvLayout]:
    """The slices of whole pages, rank by rank.

    Raises:
        TransferError: The heads cannot be shared out evenly.
    """
    if not 1 <= ranks <= MAX_RANKS or whole.num_kv_heads % ranks:
        raise TransferError(f"{whole.num_kv_heads} heads cannot be shared out to {ranks} ranks")
    rank = replace(whole, num_kv_heads=whole.num_kv_heads // ranks, tp_size=ranks)
    return [replace(rank, tp_rank=number) for number in range(ranks)]


class RankedReceiver:
    """A decode worker's arenas, one for each of several ranks (a `KvReceiver`).

    Args:
        receivers: Of the ranks, in order, all of one backend.
    """

    def __init__(self, receivers: Sequence[KvReceiver]) -> None:
        self._receivers = receivers

    def handle(self) -> RegionHandle:
        """See `KvReceiver`."""
        return join_handles([receiver.handle() for receiver in self._receivers])

    def revoke(self, handle: RegionHandle, gone: Callable[[], None]) -> None:
        """See `KvReceiver`: `gone` once the peer can write to no rank any more."""
        countdown = Countdown(len(self._receivers), lambda _: gone())
        for receiver, part in zip(self._receivers, split_handle(handle), strict=True):
            receiver.revoke(part, countdown.done_well)

    def close(self) -> None:
        """See `KvReceiver`."""
        for receiver in self._receivers:
            receiver.close()


class RankedSender:
    """A prefill worker's arenas, one for each of its ranks (a `KvSender`).

    Args:
        senders: Of the ranks, in order, all of one backend.
    """

    def __init__(self, senders: Sequence[KvSender]) -> None:
        self._senders = senders

    def connect(
        self,
        handle: RegionHandle,
        layout: KvLayout,
        peer: KvLayout | None = None,
        lease: Lease | None = None,
    ) -> KvWriter:
        """See `KvSender`: both layouts are of whole pages."""
        given = [handle] if len(self._senders) == 1 else split_handle(handle)
        if len(given) != len(self._senders):
            raise TransferError(f"the peer lets {len(given)} of {len(self._senders)} ranks in")
        regions = [split_handle(each) for each in given]
        if len({len(parts) for parts in regions}) > 1:
            raise TransferError("the peer lets some ranks in to more regions than others")
        if len(given) == len(regions[0]) == 1:
            return self._senders[0].connect(handle, layout, peer, lease)
        sources = rank_layouts(layout, len(self._senders))
        targets = rank_layouts(layout if peer is None else peer, len(regions[0]))
        writers: list[KvWriter] = []
        try:
            for sender, source, parts in zip(self._senders, sources, regions, strict=True):
                shared = sorted({part.target_rank for part in plan_sender(source, targets[0])})
                for rank in shared:
                    writer = sender.connect(parts[rank], source, targets[rank], lease)
                    writers.append(writer)  # those that are open when one fails
        except BaseException:
            for writer in writers:
                writer.close()
            raise
        return RankedWriter(writers)


class RankedWriter:
    """Open connections of the ranks of two workers, as one (a `KvWriter`)."""

    def __init__(self, writers: Sequence[KvWriter]) -> None:
        self._writers = writers

    def push(self, write: PageWrite, done: Done) -> None:
        """See `KvWriter`: `done` once every rank's slice has landed, or cannot land and no other is on its way."""
        countdown = Countdown(len(self._writers), done)
        for writer in self._writers:
            writer.push(write, countdown.done)

    def close(self) -> None:
        """See `KvWriter`."""
        for writer in self._writers:
            writer.close()


class RankedHashes:
    """Of the whole pages of several arenas in host memory (a `PageHashes`): what one arena with these pages hashes to."""

    def __init__(
        self,
        memories: Sequence[memoryview],
        layouts: Sequence[KvLayout],
        *,
        num_blocks: int,
        kind: Checksum,
    ) -> None:
        """Layouts are of the ranks, in order."""
        self._kind = kind
        self._ranks = [
            layer_pages(memory, layout, num_blocks)
            for memory, layout in zip(memories, layouts, strict=True)
        ]

    def of_layer(
        self, layer_index: int, blocks: Sequence[BlockId], parts: Sequence[slice] = ()
    ) -> Hashes:
        """See `PageHashes`."""
        hashes = np.empty(len(blocks), dtype=np.uint64)
        for place, block in enumerate(blocks):  # one by one: a page is copied for it
            page = np.concatenate([layers[layer_index][block] for layers in self._ranks])
            hashes[place] = hash_rows(self._kind, page[np.newaxis], [0], parts)[0]
        return hashes


def ranked_hashing(
    memories: Sequence[memoryview], layouts: Sequence[KvLayout], *, num_blocks: int
) -> Hashing:
    """How whole pages that lie on several ranks are hashed, the cheapest rule first.

    Raises:
        TransferError: An arena is smaller than its layout says.
    """
    return {
        kind: RankedHashes(memories, layouts, num_blocks=num_blocks, kind=kind)
        for kind in (Checksum.XXH3, Checksum.WORD_SUM)
    }


def joined_senders(ranks: Sequence[Mapping[str, KvSender]]) -> dict[str, KvSender]:
    """Backends by name, each as one sender of all ranks."""
    return {name: RankedSender([rank[name] for rank in ranks]) for name in ranks[0]}


def joined_receivers(ranks: Sequence[Mapping[str, KvReceiver]]) -> Mapping[str, KvReceiver]:
    """Backends by name, each as one receiver of all ranks; with one rank it is the backend's own."""
    if len(ranks) == 1:
        return ranks[0]
    return {name: RankedReceiver([rank[name] for rank in ranks]) for name in ranks[0]}
