"""Ranges of TCP ports as people write them: `7100-7199`."""

import re

MIN_PORTS = 16
_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})")
_WITH_PORT = re.compile(r"(?!unix:).*:(\d{1,5})")


def parse_ports(text: str) -> range | None:
    """The ports of a range, both ends among them, or None if `text` names none from 1 to 65535."""
    match = _RANGE.fullmatch(text.replace(" ", ""))
    if match is None:
        return None
    first, last = int(match.group(1)), int(match.group(2))
    return range(first, last + 1) if 1 <= first <= last <= 65535 else None


def port_of(address: str) -> int | None:
    """The port of `host:port`; None if it names none, as a Unix socket's address."""
    match = _WITH_PORT.fullmatch(address)
    if match is None or int(match.group(1)) > 65535:
        return None
    return int(match.group(1))


def is_wildcard(address: str) -> bool:
    """Whether `host:port` stands for every address of its host, and so for none by which others could reach it."""
    return address.rpartition(":")[0].strip("[]") in ("0.0.0.0", "::", "*")  # noqa: S104  # compared, not bound
