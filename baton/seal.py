"""Seals values that lie where others could write too, as in Redis: with a key of the cluster,
bound to a name and a time.

32 bytes   BLAKE2b of name, time and content, keyed for this kind of value
 8 bytes   when it was sealed, ms since 1970, little-endian
 the rest  content
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from time import time

from baton.keyed_hash import derive_key, keyed_hash

MAC_BYTES = 32
HEAD_BYTES = MAC_BYTES + 8
MAX_SKEW_S = 300.0
"""How far the clocks of two hosts may be apart."""


class SealError(ValueError):
    """A value that is not taken; the text is one of a few, fit for a log."""


class SealTimeError(SealError):
    """A value of this cluster's that is not taken by the clock here. By another process' clock it may be good: who
    refuses it leaves it where it is.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsealed:
    """What was sealed.

    Attributes:
        content: The bytes.
        sealed_ms: When, by the clock of the process that sealed them.
    """

    content: bytes
    sealed_ms: int


class Seal:
    """Of one kind of value. Values of one kind do not pass for another kind's, nor under another name.

    Args:
        secret: Of the cluster.
        kind: A constant.
        wall_s: Seconds since 1970.
    """

    def __init__(self, secret: bytes, kind: str, wall_s: Callable[[], float] = time) -> None:
        self._key = derive_key(secret, f"baton 2026 sealed {kind}")
        self._wall_s = wall_s

    def now_ms(self) -> int:
        """What the time is."""
        return round(self._wall_s() * 1000)

    def close(self, name: str, content: bytes, sealed_ms: int | None = None) -> bytes:
        """Seals `content`, now if nothing else is said."""
        at = (self.now_ms() if sealed_ms is None else sealed_ms).to_bytes(8, "little")
        return self._mac(name, at, content) + at + content

    def open(self, name: str, sealed: bytes, max_bytes: int) -> Unsealed:
        """What was sealed under `name`, however long ago.

        Raises:
            SealError: Nothing was, by this cluster; or it is too long.
            SealTimeError: It was, by a clock that is further ahead than clocks are.
        """
        if len(sealed) > HEAD_BYTES + max_bytes:
            raise SealError("too long")
        mac, at = sealed[:MAC_BYTES], sealed[MAC_BYTES:HEAD_BYTES]
        content = sealed[HEAD_BYTES:]
        if not hmac.compare_digest(mac, self._mac(name, at, content)):
            raise SealError("not sealed with this cluster's secret")
        sealed_ms = int.from_bytes(at, "little")
        if sealed_ms > self.now_ms() + MAX_SKEW_S * 1000:
            raise SealTimeError("sealed in the future: do the hosts' clocks differ?")
        return Unsealed(content=content, sealed_ms=sealed_ms)

    def check_age(self, opened: Unsealed, life_s: float) -> None:
        """For what holds for `life_s` only.

        Raises:
            SealTimeError: That is over.
        """
        if opened.sealed_ms < self.now_ms() - (life_s + MAX_SKEW_S) * 1000:
            raise SealTimeError("out of date: an old value, or do the hosts' clocks differ?")

    def _mac(self, name: str, at: bytes, content: bytes) -> bytes:
        named = name.encode(errors="surrogatepass")
        return keyed_hash(len(named).to_bytes(4, "little") + named + at + content, self._key)
