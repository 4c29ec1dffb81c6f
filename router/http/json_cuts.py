"""Where the members of a large JSON object, or the elements of an array, begin and end:
found before any Python object is made of it.

Parsing JSON takes up to a microsecond per value, and nothing else runs meanwhile. So a large body is cut into pieces
that are parsed one at a time, and one that holds too many values is refused before. Looking for the cuts takes a few
milliseconds per MiB, in steps between which the event loop runs.

Cuts are commas outside of strings, at the depth that is asked for. What lies between two of them need not be JSON:
whoever parses the pieces finds out. If every piece is JSON, so is the whole.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_STEP_BYTES = 32 * 1024
_QUOTE, _BACKSLASH = ord('"'), ord("\\")

_OPENS, _CLOSES, _PARTS = 1, -1, 2
_KIND = np.zeros(256, np.int8)
for _sign, _kind in ((b"{[", _OPENS), (b"}]", _CLOSES), (b",:", _PARTS)):
    for _byte in _sign:
        _KIND[_byte] = _kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What lies between two cuts.

    Attributes:
        begin: Where it begins.
        end: Where it ends.
        values: Signs between its values, strings apart: about as many as it has keys and values.
    """

    begin: int
    end: int
    values: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """An object or array, cut.

    Attributes:
        pieces: Its members or elements, in order; one that is empty if it has none.
        containers: Objects and arrays in it, at any depth.
        commas: Commas in it, at any depth.
    """

    pieces: Sequence[Piece]
    containers: int
    commas: int


class TooManyPiecesError(Exception):
    """A container has more members or elements than were asked for."""


class _Scan:
    """Reads the signs of JSON step by step; carries over what lies across the end of a step."""

    def __init__(self) -> None:
        self._in_string = False
        self._escapes = False
        self._depth = 0
        self._values = 0
        self.containers = 0
        self.commas = 0

    def step(self, text: npt.NDArray[np.uint8]) -> tuple[list[int], list[int]]:
        """Places of the commas at depth 1 in `text`, and the signs that were read before each,
        from the very beginning.
        """
        quotes = text == _QUOTE
        self._strike_escaped(text, quotes)
        inside = np.cumsum(quotes, dtype=np.uint8) & 1  # counts that overflow stay odd or even
        if self._in_string:
            inside ^= 1
        self._in_string = bool(inside[-1])
        kinds = _KIND[text]
        kinds[inside == 1] = 0
        places = np.flatnonzero(kinds)
        kinds = kinds[places]
        depths = self._depth + np.cumsum(np.where(kinds == _PARTS, 0, kinds), dtype=np.int64)
        commas = text[places] == ord(",")
        values = self._values + np.cumsum(kinds != _CLOSES, dtype=np.int64)
        if len(places):
            self._depth, self._values = int(depths[-1]), int(values[-1])
        self.containers += int(np.count_nonzero(kinds == _OPENS))
        self.commas += int(np.count_nonzero(commas))
        cuts = np.flatnonzero(commas & (depths == 1))
        return places[cuts].tolist(), values[cuts].tolist()

    @property
    def values(self) -> int:
        """Signs read so far."""
        return self._values

    def _strike_escaped(self, text: npt.NDArray[np.uint8], quotes: npt.NDArray[np.bool_]) -> None:
        """Takes the quotes out of `quotes` that follow a backslash which is not escaped itself."""
        begun, self._escapes = self._escapes, False
        slashes = np.flatnonzero(text == _BACKSLASH)
        if begun:
            quotes[0] = False
        if not len(slashes):
            return
        # Within a run of backslashes every other one escapes what follows it, beginning with the first.
        first = np.ones(len(slashes), np.bool_)
        first[1:] = np.diff(slashes) != 1
        place_in_run = slashes - np.maximum.accumulate(np.where(first, slashes, 0))
        if begun and slashes[0] == 0:
            run = np.cumsum(first) == 1
            place_in_run[run] += 1
        escaped = slashes[place_in_run % 2 == 0] + 1
        if len(escaped) and escaped[-1] == len(text):
            self._escapes, escaped = True, escaped[:-1]
        quotes[escaped] = False


async def cut(raw: bytes, begin: int, end: int, *, most: int) -> Container:
    """The object or array that `raw` holds from `begin` to `end`, its brackets included, cut at its commas.

    Raises:
        TooManyPiecesError: It has more than `most` members or elements.
    """
    text = np.frombuffer(raw, np.uint8)
    scan = _Scan()
    pieces: list[Piece] = []
    at, values_before = begin + 1, 1
    for offset in range(begin, end, _STEP_BYTES):
        if offset > begin:
            await asyncio.sleep(0)
        places, values = scan.step(text[offset : min(offset + _STEP_BYTES, end)])
        if len(pieces) + len(places) >= most:
            raise TooManyPiecesError
        for place, count in zip(places, values, strict=True):
            pieces.append(Piece(begin=at, end=offset + place, values=count - values_before))
            at, values_before = offset + place + 1, count
    pieces.append(Piece(begin=at, end=end - 1, values=scan.values - values_before))
    return Container(pieces=pieces, containers=scan.containers, commas=scan.commas)
