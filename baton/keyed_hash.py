"""The hash behind block keys, tickets, seals and proofs: BLAKE2b (RFC 7693), keyed,
from Python's standard library (ADR 0030).
"""

from hashlib import blake2b

KEY_SIZE = 32
"""Of keys that are derived, in bytes; `keyed_hash` takes up to 64."""


def keyed_hash(content: bytes, key: bytes, size: int = 32) -> bytes:
    """A message authentication code of `content`, `size` bytes (at most 64). An empty key makes it a plain hash.

    Raises:
        ValueError: `key` has more than 64 bytes.
    """
    return blake2b(content, key=key, digest_size=size).digest()


def derive_key(secret: bytes, purpose: str, size: int = KEY_SIZE) -> bytes:
    """The key for one purpose, out of a secret that serves many.

    Args:
        secret: Of any length, with at least as much entropy as the key should have.
        purpose: A constant without a NUL; keys of different purposes tell nothing of each other.
        size: Of the key, in bytes.
    """
    return blake2b(purpose.encode() + b"\0" + secret, digest_size=size).digest()
