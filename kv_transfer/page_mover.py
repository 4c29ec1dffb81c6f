"""How pages that lie scattered in one GPU's arena get to where they are scattered in another one that this process maps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.cuda import CudaDriver, Rows, Stream
from kv_transfer.plan import runs


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRows:
    """The same part of scattered pages of one layer, from one arena to another.

    Attributes:
        source: Address of the part in page 0.
        source_pitch: From one page to the next.
        source_pages: Which pages.
        target: As `source`, in the other arena.
        target_pitch: As `source_pitch`.
        target_pages: As many.
        length: Bytes of the part.
    """

    source: int
    source_pitch: int
    source_pages: Sequence[int]
    target: int
    target_pitch: int
    target_pages: Sequence[int]
    length: int


class PageMover(Protocol):
    """Copies scattered pages within the reach of one GPU."""

    def move(self, pages: PageRows, stream: Stream) -> None:
        """Queues the copies; all addresses are device memory that this process maps."""


class DriverMover:
    """Moves pages with the copy engine: one copy for each run of neighbours. Good for large pages; a kernel begins many small
    copies at once (`engine.kernels.page_pack.PageKernel`).
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def move(self, pages: PageRows, stream: Stream) -> None:
        """See `PageMover`."""
        for begin, to, count in runs(pages.source_pages, pages.target_pages):
            rows = Rows(
                source=pages.source + begin * pages.source_pitch,
                source_pitch=pages.source_pitch,
                target=pages.target + to * pages.target_pitch,
                target_pitch=pages.target_pitch,
                length=pages.length,
                count=count,
            )
            self._driver.copy_rows(rows, stream)
