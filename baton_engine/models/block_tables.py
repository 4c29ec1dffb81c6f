"""The block tables of the texts that steps compute, kept from step to step: a text's table changes by a page every few
tokens, and only what changed is written and sent to the device.

    kept      row of   pages                 a step of texts 7, 9 and 4, and a padding row
    row 0     NOBODY   0  0  0  0            rows     [2 1 3 0]
    row 1     text 9   5  6  0  0            tables   kept[rows][:, :width]
    row 2     text 7   3  8  2  0
    row 3     text 4   1  0  0  0

What is known of a kept row is its content, so a row that goes to another text costs the pages in which the two differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from baton.errors import EngineError
from baton.ids import BlockId
from baton_engine.scheduling.plan import Row

NOBODY = 0
"""The kept row of zeros, for rows of a step that are padding."""
_FEWEST_ROWS, _LEAST_WIDTH = 16, 16
_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChanges:
    """What a step needs of the kept tables.

    Attributes:
        rows: `[num_rows]` int64, the kept row of each of the step's; never `NOBODY`.
        places: `[num_changes]` int64, where the kept tables, as one flat array, have changed; none without a device.
        pages: `[num_changes]` int32, what stands there now.
        width: Pages of the step's longest text.
    """

    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    pages: NDArray[np.int32]
    width: int


class BlockTables:
    """Kept tables of one device. One step at a time.

    Args:
        block_tokens: Tokens per page.
        num_blocks: Pages of the arena.
        device: Where a second copy is kept, for kernels; None where they read the host's memory.
        page_stride: Pages of the arena count as so many in the tables.
        shift: By how many places the tokens of a row stand before their own.
    """

    def __init__(
        self,
        block_tokens: int,
        num_blocks: int,
        device: torch.device | None,
        *,
        page_stride: int = 1,
        shift: int = 0,
    ) -> None:
        self._block_tokens = block_tokens
        self._shift = shift
        self._num_blocks = num_blocks
        self._page_stride = page_stride
        self._kept = np.zeros((_FEWEST_ROWS, _LEAST_WIDTH), np.int32)
        self._pages: list[list[BlockId]] = [[] for _ in range(_FEWEST_ROWS)]
        self._row_of: dict[int, int] = {}  # by the identity of a text; used last, last
        self._device = device
        self._sent = self._all_on_device()
        self._unsent: list[NDArray[np.int64]] = []

    def update(self, rows: Sequence[Row]) -> TableChanges:
        """Brings the tables of `rows` up to date.

        Raises:
            EngineError: A page lies outside the arena; the step cannot be computed, the next one can.
        """
        ends = [row.start + row.num_tokens - self._shift for row in rows]
        needed = [-(-end // self._block_tokens) for end in ends]
        width = max(needed)
        self._make_room(len(rows) + 1, width)
        used = [self._row(row) for row in rows]
        for at, row, count in zip(used, rows, needed, strict=True):
            changed = self._write(at, row, count)
            if len(changed) and self._sent is not None:
                self._unsent.append(changed)
        places = np.concatenate(self._unsent) if self._unsent else _NOTHING
        return TableChanges(
            rows=np.array(used, np.int64),
            places=places,
            pages=self._kept.reshape(-1)[places],
            width=width,
        )

    def pages_at(self, rows: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int32]:
        """`[n]`, what stands at each of `places` of each of the kept `rows`."""
        pages: NDArray[np.int32] = self._kept[rows, places]
        return pages

    def gather(
        self, width: int, rows: torch.Tensor, places: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        """The tables of the kept `rows` of the last update, on the device, once `pages` are written to `places` there:
        `[num_rows, width]` int32. What lies behind a text's pages is of no meaning, but no page outside the arena.
        """
        if self._sent is None:
            return self.gather_on_host(width, rows.numpy())
        if len(places):
            self._sent.view(-1).index_copy_(0, places, pages)
        self._unsent.clear()  # not before: a step that breaks off here is sent again
        return self._sent[:, :width].index_select(0, rows)

    def gather_on_host(self, width: int, rows: NDArray[np.int64]) -> torch.Tensor:
        """The same, where kernels read the host's memory."""
        return torch.from_numpy(self._kept[rows, :width])

    def _row(self, row: Row) -> int:
        """The kept row of a text; one of its own from its first step on, or since others took the last one."""
        text = id(row.seq)
        at = self._row_of.pop(text, None)
        if at is None and len(self._row_of) + 1 < len(self._kept):
            at = len(self._row_of) + 1
        elif at is None:
            at = self._row_of.pop(next(iter(self._row_of)))
        self._row_of[text] = at
        return at

    def _write(self, at: int, row: Row, count: int) -> NDArray[np.int64]:
        """Makes the kept row `at` begin with the text's first `count` pages; returns where it changed,
        of all rows as one.
        """
        known, pages = self._pages[at], row.seq.blocks
        if len(known) == len(pages) == count and known == pages:
            return _NOTHING  # as in most steps of a decode
        pages = pages[:count]
        same = min(len(known), count)
        first = same if known[:same] == pages[:same] else 0
        new = np.array(pages[first:], np.int64)
        if len(new) and not 0 <= int(new.min()) <= int(new.max()) < self._num_blocks:
            raise EngineError(f"a block table names a page outside the arena's {self._num_blocks}")
        self._pages[at] = pages if count >= len(known) else pages + known[count:]
        kept = self._kept[at, first:count]
        new = (new * self._page_stride).astype(np.int32)
        changed = np.flatnonzero(kept != new)
        kept[changed] = new[changed]
        return changed + (at * self._kept.shape[1] + first)

    def _make_room(self, num_rows: int, width: int) -> None:
        """At least so many rows, that of nobody included, of so many pages; then all is sent anew."""
        rows, columns = self._kept.shape
        if num_rows <= rows and width <= columns:
            return
        shape = (max(rows, 2 * num_rows), columns if width <= columns else 2 * width)
        larger = np.zeros(shape, np.int32)
        larger[:rows, :columns] = self._kept
        self._kept = larger
        self._pages += [[] for _ in range(len(larger) - rows)]
        self._sent = self._all_on_device()
        self._unsent.clear()

    def _all_on_device(self) -> torch.Tensor | None:
        if self._device is None:
            return None
        return torch.from_numpy(self._kept.copy()).to(self._device)
