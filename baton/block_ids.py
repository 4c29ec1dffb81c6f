"""Page ids, and the same as an array for code outside Python: made once,
in however many layers the pages are written.
"""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from baton.ids import BlockId

Numbers = npt.NDArray[np.int64]
"""Page numbers as code outside Python wants them."""


class BlockIds(tuple[BlockId, ...]):
    """A tuple that keeps its numbers, and which are the lowest and the highest."""

    @cached_property
    def numbers(self) -> Numbers:
        """`[len(self)]`; not to be written to."""
        return np.fromiter(self, dtype=np.int64, count=len(self))

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest; of no ids (0, 0)."""
        return bounds_of(self.numbers)


def bounds_of(numbers: Numbers) -> tuple[int, int]:
    """The lowest and the highest; of no ids (0, 0)."""
    return (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)


def numbers_of(blocks: tuple[BlockId, ...]) -> Numbers:
    """The ids as an array `[len(blocks)]`, which is not to be written to."""
    if isinstance(blocks, BlockIds):
        return blocks.numbers
    return np.fromiter(blocks, dtype=np.int64, count=len(blocks))


def cut(blocks: tuple[BlockId, ...], begin: int, end: int) -> tuple[BlockId, ...]:
    """The ids from `begin` to `end`; their numbers are cut from the whole's, where it keeps any."""
    if begin == 0 and end >= len(blocks):
        return blocks
    part = BlockIds(blocks[begin:end])
    if isinstance(blocks, BlockIds):
        part.__dict__["numbers"] = blocks.numbers[begin:end]
    return part
