"""How large what a chat template makes would be, told before it is made.

Between two steps of a template a time cap can end it (`router.templates.time_cap`). Within one step, a single call of C, nothing can: so
whatever makes much of little is weighed first. Sizes are characters, or entries of a list; of whole numbers, bits.
"""

import re
from collections.abc import Mapping
from string import Formatter
from typing import Any

from jinja2.exceptions import SecurityError

MAX_WIDTH = 10_000
"""The widest that a text is padded to."""

MAX_BITS = 65_536
"""Of a whole number."""

MAX_PARTS = 1_000_000
"""Values within values that are written out as one text."""

_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")
_NUMBER = re.compile(r"\d+")


class TemplateSizeError(SecurityError):
    """A template makes too much of too little."""


def length(value: object) -> int:
    """Of a text or a list; 0 for what has none."""
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def written(value: object) -> int:
    """About how long `value` is as text, everything in it included.

    Raises:
        TemplateSizeError: It has too many parts.
    """
    size, parts, waiting = 0, 0, [value]
    while waiting:
        part = waiting.pop()
        parts += 1
        if parts > MAX_PARTS:
            raise TemplateSizeError(f"more than {MAX_PARTS} values are written as one text")
        if isinstance(part, Mapping):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set | frozenset):
            waiting += part
        size += length(part) if isinstance(part, str | bytes) else 8
    return size


def product(left: object, right: object) -> int:
    """Of `left * right`.

    Raises:
        TemplateSizeError: It is too large a number.
    """
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return 0
    if isinstance(left, int):
        left, right = right, left
    return length(left) * max(0, right) if isinstance(right, int) else 0


def power(left: object, right: object) -> int:
    """Of `left ** right`.

    Raises:
        TemplateSizeError: It is too large a number.
    """
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(0, right))
    return 0


def filled(left: object, right: object) -> int:
    """Of `left % right`, where `left` is a text with places to fill.

    Raises:
        TemplateSizeError: A place is too wide, or as wide as a value says.
    """
    if not isinstance(left, str):
        return 0
    places = _PERCENT.findall(left)
    widths = [_width(width) for place in places for width in place if width]
    return len(left) + sum(widths) + len(places) * written(right)


def formatted(text: str, *arguments: object, **named: object) -> int:
    """Of `text.format(...)`.

    Raises:
        TemplateSizeError: As `filled`.
    """
    size = len(text)
    filling = written([*arguments, *named.values()])
    for _, name, spec, _ in Formatter().parse(text):
        if spec and "{" in spec:
            raise TemplateSizeError("a place in a text is as wide as a value says")
        size += sum(map(_width, _NUMBER.findall(spec or "")))
        size += filling if name is not None else 0
    return size


def padded(text: str, width: Any = 0, *_: object) -> int:
    """Of a text that is padded to `width`.

    Raises:
        TemplateSizeError: That is too wide.
    """
    return len(text) + _width(width)


def replaced(text: str, old: str, new: str, *_: object, **__: object) -> int:
    """Of `text` with `new` in all places of `old`."""
    places = text.count(old)
    return len(text) + places * max(0, len(new) - len(old))


def joined(separator: str, parts: object) -> int:
    """Of `parts` with `separator` between them.

    Raises:
        TemplateSizeError: They are too many, or not all there yet.
    """
    if not isinstance(parts, str | list | tuple | dict):
        raise TemplateSizeError("only lists are joined here")
    return written(parts) + len(separator) * len(parts)


def untabbed(text: str, tabsize: int = 8) -> int:
    """Of `text` with spaces for its tabs."""
    return len(text) + text.count("\t") * _width(tabsize)


def timed(form: str) -> int:
    """Of a time written in a `form` of strftime's.

    Raises:
        TemplateSizeError: It is padded too far.
    """
    return 16 * len(form) + sum(map(_width, _NUMBER.findall(form)))


def _width(width: object) -> int:
    digits = str(width)
    if not digits.lstrip("-").isdecimal() or len(digits) > 9 or abs(int(digits)) > MAX_WIDTH:
        raise TemplateSizeError(f"a text is padded to more than {MAX_WIDTH} characters")
    return abs(int(digits))


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateSizeError(f"a number has more than {MAX_BITS} bits")
