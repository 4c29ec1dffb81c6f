"""Token ids in four bytes each: long prompts as the router carries them, never as so many Python numbers.

A prompt of 100,000 tokens is hashed and sent to two workers from the one `bytes` that it was parsed into.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np

_SIZE = 4


class PackedTokens(Sequence[int]):
    """An immutable sequence of token ids; equal to a tuple of the same ids.

    Args:
        packed: 32-bit numbers, little-endian.

    Raises:
        ValueError: The bytes are not whole numbers.
    """

    __slots__ = ("_ids", "packed")

    def __init__(self, packed: bytes) -> None:
        if len(packed) % _SIZE:
            raise ValueError(f"tokens are {_SIZE} bytes each")
        self.packed = packed
        self._ids = memoryview(packed).cast("I")

    @classmethod
    def of(cls, tokens: Iterable[int]) -> "PackedTokens":
        """The same ids, packed.

        Raises:
            OverflowError: One is negative or does not fit.
        """
        return tokens if isinstance(tokens, cls) else cls(array("I", tokens).tobytes())

    def highest(self) -> int:
        """The largest id; 0 if there is none."""
        return int(np.frombuffer(self.packed, "<u4").max(initial=0))

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> "PackedTokens": ...

    def __getitem__(self, index: "int | slice") -> "int | PackedTokens":
        if isinstance(index, slice):
            return PackedTokens(self._ids[index].tobytes())
        return self._ids[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedTokens):
            return self.packed == other.packed
        return isinstance(other, tuple) and tuple(self._ids) == other

    def __hash__(self) -> int:
        return hash(tuple(self._ids))

    def __reduce__(self) -> tuple[type["PackedTokens"], tuple[bytes]]:
        """Copied and pickled by its bytes: views cannot be."""
        return PackedTokens, (self.packed,)

    def __repr__(self) -> str:
        return f"PackedTokens({len(self)})"


NO_TOKENS = PackedTokens(b"")

Tokens = tuple[int, ...] | PackedTokens
"""What a prompt's ids come in: packed in the router, a tuple in an engine."""
