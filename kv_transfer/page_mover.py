"""How pages that lie scattered in one GPU's arena get to where they are scattered in another one that this process maps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from baton.block_ids import Numbers
from baton.errors import TransferError
from baton.layout import KvLayout
from kv_transfer.cuda import Rows, Stream
from kv_transfer.heads import LinkPlan
from kv_transfer.plan import check_pages, runs
from kv_transfer.ports import Push


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageRows:
    """The same part of scattered pages of one layer, from one arena to another.

    Attributes:
        source: Address of the part in page 0.
        source_pitch: From one page to the next.
        source_pages: Which pages, `[n]`.
        target: As `source`, in the other arena.
        target_pitch: As `source_pitch`.
        target_pages: As many.
        length: Bytes of the part.
    """

    source: int
    source_pitch: int
    source_pages: Numbers
    target: int
    target_pitch: int
    target_pages: Numbers
    length: int

    def addresses(self) -> Numbers:
        """Where each part is and where it goes, `[n, 2]`."""
        found = np.empty((len(self.source_pages), 2), dtype=np.int64)
        found[:, 0] = self.source + self.source_pages * self.source_pitch
        found[:, 1] = self.target + self.target_pages * self.target_pitch
        return found


@dataclass(frozen=True, slots=True)
class MappedArena:
    """Where an arena begins for this process, and how its pages lie."""

    address: int
    layout: KvLayout
    num_blocks: int

    def layer(self, index: int) -> int:
        """Address of the first page of a layer."""
        return self.address + self.layout.layer_offset(index, self.num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPair:
    """An arena of this process, a peer's, and what of each page goes over."""

    here: MappedArena
    there: MappedArena
    plan: LinkPlan

    def rows(self, push: Push) -> list[PageRows]:
        """What a push copies: of each page every slice that this pair shares.

        Raises:
            TransferError: It names a layer or page that one of the two has not got.
        """
        if len(push.source) != len(push.target):
            raise TransferError(f"{len(push.source)} pages for {len(push.target)}")
        target_layer = self.plan.target_layer(push.layer_index)
        source = check_pages(push.source, self.here.num_blocks)
        target = check_pages(push.target, self.there.num_blocks)
        return [
            PageRows(
                source=self.here.layer(push.layer_index) + part.source_offset,
                source_pitch=self.here.layout.page_layer_bytes,
                source_pages=source,
                target=self.there.layer(target_layer) + part.target_offset,
                target_pitch=self.there.layout.page_layer_bytes,
                target_pages=target,
                length=part.length,
            )
            for part in self.plan.slices
        ]


class PageMover(Protocol):
    """Copies scattered pages within the reach of one GPU."""

    def move(self, pages: Sequence[PageRows], stream: Stream) -> None:
        """Queues the copies; all addresses are device memory that this process maps. A page that is named twice as a target
        has to get the same bytes both times.
        """


class RowCopies(Protocol):
    """A GPU's copy engine."""

    def copy_rows(self, rows: Rows, stream: Stream) -> None:
        """Queues a copy between device memory and device memory."""


class DriverMover:
    """Moves pages with the copy engine: one copy for each run of neighbours. Good for large pages; a kernel begins many small
    copies at once (`baton_engine.kernels.triton.page_move.PageKernel`).
    """

    def __init__(self, driver: RowCopies) -> None:
        self._driver = driver

    def move(self, pages: Sequence[PageRows], stream: Stream) -> None:
        """See `PageMover`."""
        for part in pages:
            for begin, to, count in runs(part.source_pages.tolist(), part.target_pages.tolist()):
                rows = Rows(
                    source=part.source + begin * part.source_pitch,
                    source_pitch=part.source_pitch,
                    target=part.target + to * part.target_pitch,
                    target_pitch=part.target_pitch,
                    length=part.length,
                    count=count,
                )
                self._driver.copy_rows(rows, stream)
