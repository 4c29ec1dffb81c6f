"""Sizes in bytes as people write them: `4GiB`, `512M`, `1.5g`, `2GB`, `65536`."""

import re

_SIZE = re.compile(r"^\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?b?)\s*$", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int | None:
    """Bytes that `text` names, or None if it names no size.

    `K`, `Ki` and `KiB` are powers of 1024, as memory is counted; only an explicit `KB`, `MB`, … is a power of 1000.
    """
    match = _SIZE.match(text)
    if match is None:
        return None
    number, letter, suffix = match.group(1), match.group(2).lower(), match.group(3).lower()
    base = 1000 if letter and suffix == "b" else 1024
    return int(float(number) * base ** _POWER[letter])


def format_size(size_bytes: float) -> str:
    """`size_bytes` for people, in powers of 1024: `512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
