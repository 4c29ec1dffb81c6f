"""Which pages the KV of a text takes where a model's layers form groups, and in which order they are told.

Every group of layers has pages of its own, all from one arena. A group with a window keeps the token blocks that hold
one of the last `window` tokens: what the token behind the text attends to, and what the text's last token attended to,
should it be computed again. All pages of a text are one list, token block by token block, in each of them group by
group:

    two groups, the second with a window of 4 tokens; 9 tokens in blocks of 2

    token block   0   1   2   3   4
    group 0       0   1   2   4   6
    group 1               3   5   7

So the pages of leading token blocks lead the list: what a prefix cache holds, and what a chunk has completed.
Windows are given group by group, 0 for none; an empty list is one group without a window.
"""

from collections.abc import Iterator, Sequence


def first_block(num_tokens: int, block_tokens: int, window: int) -> int:
    """The first token block that a group keeps of `num_tokens` tokens."""
    return max(0, num_tokens - window) // block_tokens if window else 0


def num_pages(
    num_tokens: int,
    block_tokens: int,
    windows: Sequence[int],
    *,
    num_blocks: int | None = None,
) -> int:
    """Pages of a text.

    Args:
        num_tokens: In the text.
        block_tokens: In a page.
        windows: Of the groups.
        num_blocks: Only those of so many leading token blocks; None for all.
    """
    end = -(-num_tokens // block_tokens)
    if num_blocks is not None:
        end = min(end, num_blocks)
    return sum(
        max(0, end - first_block(num_tokens, block_tokens, window)) for window in windows or (0,)
    )


def pages_in_order(
    num_tokens: int, block_tokens: int, windows: Sequence[int], *, start: int, end: int
) -> Iterator[tuple[int, int]]:
    """Token block and group of each page of the text's token blocks from `start` to before `end`, in order."""
    firsts = [first_block(num_tokens, block_tokens, window) for window in windows or (0,)]
    for block in range(start, end):
        for group, first in enumerate(firsts):
            if block >= first:
                yield block, group
