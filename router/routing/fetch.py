"""What it would take to fetch KV from a pool instead of computing it: the price that routing puts on a pool's blocks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLink:
    """The way from a pool to a worker.

    Attributes:
        bytes_per_s: Measured rate of fetching; 0 when there is no pool.
        latency_s: From asking to the first byte.
    """

    bytes_per_s: float = 0.0
    latency_s: float = 0.001


NO_POOL = PoolLink()


def fetch_s(tokens: int, bytes_per_token: float, link: PoolLink) -> float:
    """Seconds for fetching the KV of `tokens` tokens; nothing takes none, and without a pool it takes for ever."""
    if tokens <= 0:
        return 0.0
    if link.bytes_per_s <= 0.0:
        return float("inf")
    return link.latency_s + tokens * bytes_per_token / link.bytes_per_s
