"""What one page hashes to: 64 bits of its bytes in one layer, by a rule that both sides of a hand-off know.

`XXH3` where a CPU reads the pages. A GPU computes it badly: each step of it waits for the one before. `WORD_SUM` is a sum over
the page's words, each mixed with its place, so that any order of adding will do and every thread takes a few words:

    sum over i of  mix(word[i] + (i + 1) * golden)   modulo 2^64, words of 8 bytes, little-endian

`mix` is splitmix64's finaliser, one to one: a page in which one word differs never has the same sum, others have it by chance only
(2^-64). Both find what goes wrong by itself; neither keeps out anybody who means harm (docs/adr/0010).
"""

from collections.abc import Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt
import xxhash

from baton.errors import TransferError
from kv_transfer.page_copy import Pages

WORD_BYTES = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

Hashes = npt.NDArray[np.uint64]


class Checksum(Enum):
    """A rule; the value is its name in the handshake."""

    XXH3 = "xxh3"
    WORD_SUM = "word_sum"


def hash_rows(
    kind: Checksum, pages: Pages, rows: Sequence[int], parts: Sequence[slice] = ()
) -> Hashes:
    """The hash of each of `rows` of `pages` `[num_pages, page_layer_bytes]`; of `parts` of each, one after the other, if any are
    named.

    Raises:
        TransferError: Parts are not of whole words, and the rule wants words.
    """
    if kind is Checksum.WORD_SUM:
        return _word_sums(pages, rows, parts)
    if parts:
        return np.array([_xxh3_of_parts(pages[row], parts) for row in rows], dtype=np.uint64)
    return np.array([xxhash.xxh3_64_intdigest(pages[row]) for row in rows], dtype=np.uint64)


def mixed(words: Hashes, places: Hashes) -> Hashes:
    """`mix(word + (place + 1) * golden)`. Overwrites `words`."""
    with np.errstate(over="ignore"):
        words += (places + np.uint64(1)) * _GOLDEN
        words ^= words >> np.uint64(30)
        words *= _MIX_1
        words ^= words >> np.uint64(27)
        words *= _MIX_2
        words ^= words >> np.uint64(31)
    return words


def _word_sums(pages: Pages, rows: Sequence[int], parts: Sequence[slice]) -> Hashes:
    sums = np.zeros(len(rows), dtype=np.uint64)
    begin = 0
    for part in parts or (slice(0, pages.shape[1]),):
        taken = np.ascontiguousarray(pages[np.asarray(rows, dtype=np.int64), part])
        if taken.shape[1] % WORD_BYTES:
            raise TransferError(f"{taken.shape[1]} bytes of a page are not whole words to add up")
        words = taken.view(np.uint64)
        end = begin + words.shape[1]
        sums += mixed(words, np.arange(begin, end, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
        begin = end
    return sums


def _xxh3_of_parts(page: npt.NDArray[np.uint8], parts: Sequence[slice]) -> int:
    whole = xxhash.xxh3_64()
    for part in parts:
        whole.update(page[part].data)
    return whole.intdigest()
