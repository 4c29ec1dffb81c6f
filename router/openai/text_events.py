"""A stream's common event: only its text is new, all around it was written once."""

from collections.abc import Callable

import msgspec

from router.openai.choices import Delta

CUT = b"\0"
"""Stands for the text while an event is written in advance: JSON never holds this byte."""


class TextEvents:
    """Events of choices that gained some text and nothing else that is shown.

    Args:
        write: Writes the event of one choice, with `CUT` in the place of the text's JSON.
    """

    def __init__(self, write: Callable[[int], bytes]) -> None:
        self._write = write
        self._around: dict[int, list[bytes]] = {}

    def __call__(self, delta: Delta) -> bytes:
        """The event for one delta."""
        around = self._around.get(delta.index)
        if around is None:
            around = self._around[delta.index] = self._write(delta.index).split(CUT)
        before, after = around
        return before + msgspec.json.encode(delta.text) + after
