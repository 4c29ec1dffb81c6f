"""Which bytes go where: from the pages a prefill step completed to the pages that the decode worker granted.

Pure. Which part of each page is written, where the two workers spread the heads differently, is told by `heads.py`.

    prompt blocks   0   1   2   3   4   5        6 blocks, the first 2 are held by the decode worker
    granted                 7   9   4   1        its pages for the rest, in prompt order
    exported            31  32  33               this step completed blocks 1 to 3
    pushed                  32→7  33→9
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.block_ids import BlockIds, Numbers, bounds_of, cut, numbers_of
from baton.errors import TransferError
from baton.ids import BlockId
from baton.pages import PageWrite


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Pages on the decode worker.

    Attributes:
        held_blocks: Leading blocks of the prompt that are there already and are not sent.
        blocks: Pages for the blocks from `held_blocks` on, in prompt order.
    """

    held_blocks: int
    blocks: tuple[BlockId, ...]


def check_grant(grant: Grant, *, num_blocks: int, region_blocks: int) -> None:
    """Refuses a grant that does not cover the prompt exactly or names pages outside the peer's region.

    Raises:
        TransferError: Names what is wrong.
    """
    if grant.held_blocks + len(grant.blocks) != num_blocks:
        raise TransferError(
            f"granted {grant.held_blocks} held and {len(grant.blocks)} new pages for {num_blocks} blocks"
        )
    check_pages(grant.blocks, region_blocks)
    if len(set(grant.blocks)) != len(grant.blocks):
        raise TransferError("granted the same page twice")


def check_source(write: PageWrite, *, num_blocks: int, num_layers: int) -> None:
    """Refuses pages that lie outside the prompt or name no layer.

    Raises:
        TransferError: Names what is wrong.
    """
    if not 0 <= write.layer_index < num_layers:
        raise TransferError(f"layer {write.layer_index} of {num_layers}")
    if write.first_block < 0 or write.end_block > num_blocks:
        raise TransferError(
            f"blocks {write.first_block} to {write.end_block} of a prompt of {num_blocks}"
        )


def check_pages(pages: tuple[BlockId, ...], region_blocks: int) -> Numbers:
    """The page ids as an array, none of them outside a region.

    Raises:
        TransferError: Names the id.
    """
    try:
        numbers = numbers_of(pages)
    except OverflowError as error:
        raise _no_page(
            next(page for page in pages if not 0 <= page < region_blocks), region_blocks
        ) from error
    lowest, highest = pages.bounds if isinstance(pages, BlockIds) else bounds_of(numbers)
    if len(numbers) and (lowest < 0 or highest >= region_blocks):
        raise _no_page(lowest if lowest < 0 else highest, region_blocks)
    return numbers


def _no_page(page: int, region_blocks: int) -> TransferError:
    return TransferError(f"page {page} of a region of {region_blocks}")


def place(write: PageWrite, grant: Grant) -> PageWrite | None:
    """`write` as it is pushed: with its pages on the peer, without those that the peer holds.
    None when it holds all of them.
    """
    skipped = max(grant.held_blocks - write.first_block, 0)
    source = cut(write.source, skipped, len(write.source))
    if not source:
        return None
    first = write.first_block + skipped
    begin = first - grant.held_blocks
    target = cut(grant.blocks, begin, begin + len(source))
    return replace(write, first_block=first, source=source, target=target)


def runs(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int, int]]:
    """Splits a copy into (source, target, count) runs that are contiguous on both sides."""
    found: list[tuple[int, int, int]] = []
    begin = 0
    for index in range(1, len(source) + 1):
        if (
            index < len(source)
            and source[index] == source[index - 1] + 1
            and target[index] == target[index - 1] + 1
        ):
            continue
        found.append((source[begin], target[begin], index - begin))
        begin = index
    return found
