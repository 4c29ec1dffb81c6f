"""API keys: made here, kept as digests, found without telling how close a guess was.

A key is 256 random bits, so that a plain SHA-256 of it is as good as a slow hash: there is nothing to guess. What
people make up themselves is refused when it is short.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from typing import Generic, TypeVar

from baton.errors import ConfigError

PREFIX = "baton-"
MIN_KEY_CHARS = 24
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_ID_DIGITS = 8
_Owner = TypeVar("_Owner")


def new_key() -> str:
    """A fresh API key."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """What stands in the tenants file for `key`: `sha256:` and 64 hexadecimal digits."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def check_strength(key: str) -> None:
    """Refuses what could be guessed.

    Raises:
        ConfigError: It is short.
    """
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(f"an API key must have at least {MIN_KEY_CHARS} characters", param="key")


def is_hash(text: str) -> bool:
    """Whether `text` has the form of `hash_key`'s result."""
    return _HASH.fullmatch(text) is not None


def key_id(key_hash: str) -> str:
    """A short name for a key, for audit and logs: digits of its digest, of no use to find the key itself."""
    return key_hash.removeprefix("sha256:")[:_ID_DIGITS]


class KeyRing(Generic[_Owner]):
    """Finds the owner of a key among any number of them.

    Keys are looked up by a hash keyed with a number drawn at start, so that a client cannot know which keys share a
    place; what is there is compared in constant time. An unknown key is compared as well.

    Args:
        owners: Digests as `hash_key` writes them, each with whose it is.
    """

    def __init__(self, owners: Iterable[tuple[str, _Owner]]) -> None:
        self._pepper = secrets.token_bytes(32)
        self._nobody = secrets.token_bytes(32)
        self._owners: dict[bytes, tuple[bytes, _Owner]] = {}
        for key_hash, owner in owners:
            digest = bytes.fromhex(key_hash.removeprefix("sha256:"))
            self._owners[self._place(digest)] = (digest, owner)

    def find(self, key: str) -> _Owner | None:
        """Whose key this is."""
        known, owner = self._look(key)
        return owner if known else None

    def __contains__(self, key: str) -> bool:
        return self._look(key)[0]

    def _look(self, key: str) -> tuple[bool, _Owner | None]:
        given = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        expected, owner = self._owners.get(self._place(given), (self._nobody, None))
        return hmac.compare_digest(given, expected), owner

    def _place(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._pepper, digest_size=16).digest()
