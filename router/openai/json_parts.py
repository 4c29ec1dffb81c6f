"""How many parts a body of JSON is made of, found before it is parsed: small parts cost the parser, and all who wait for
it, far more than their bytes say. How deep it is nested is bounded by the parser itself.
"""

import re

from baton.errors import InvalidRequestError

MAX_CONTAINERS = 65_536
"""Arrays and objects. The largest that anybody needs: thousands of messages with parts and tools."""

MAX_ELEMENTS = 3_000_000
"""Of all arrays and objects together: a prompt of two million token ids, and room for the rest."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def check_parts(raw: bytes) -> None:
    """Refuses what is made of too many parts.

    What stands inside strings looks the same at first sight, so a second look without them is taken where there is much of
    it. Bytes that are no JSON may pass; the parser refuses those.

    Raises:
        InvalidRequestError: There are too many.
    """
    if _fits(raw):
        return
    if not _fits(_STRING.sub(b"", raw)):
        raise InvalidRequestError(
            f"The body holds more than {MAX_CONTAINERS} arrays and objects, or more than {MAX_ELEMENTS} elements."
        )


def _fits(raw: bytes) -> bool:
    return raw.count(b"[") + raw.count(b"{") <= MAX_CONTAINERS and raw.count(b",") <= MAX_ELEMENTS
