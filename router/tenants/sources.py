"""Where the tenants document comes from: a file, or Redis. Asked again and again, each gives it only when it changed."""

import asyncio
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from baton.errors import ConfigError
from baton.redis_link import asked
from router.tenants.document import TenantsDocument, parse

if TYPE_CHECKING:
    from redis.asyncio import Redis

MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
_DOCUMENT = "tenants:{document}:text"
_VERSION = "tenants:{document}:version"
# One hash tag, so that a Redis cluster keeps both in one place.


@dataclass(frozen=True, slots=True, kw_only=True)
class Edition:
    """One state of the document, with the key files that it names.

    Attributes:
        document: Parsed and checked.
        key_files: Content of each, by the name that the document calls it.
    """

    document: TenantsDocument
    key_files: dict[str, str]


class TenantSource(Protocol):
    """Gives the document."""

    async def next_edition(self) -> Edition | None:
        """What is there, if it is other than the last time; None if it is the same.

        Raises:
            ConfigError: It cannot be read, or is wrong. Said once; until it changes again the answer is None.
            UnavailableError: Redis gives no answer.
        """


class FileSource:
    """A file. Key files that it names by relative paths lie beside it, and are watched as well.

    Args:
        path: Of the document.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key_paths: dict[str, Path] = {}
        self._seen: tuple[object, ...] | None = None
        self._digest = b""

    async def next_edition(self) -> Edition | None:
        """See `TenantSource`. Looks at sizes and times first, and reads only when they are others."""
        return await asyncio.to_thread(self._next_edition)

    def _next_edition(self) -> Edition | None:
        seen = tuple(_state(path) for path in (self._path, *self._key_paths.values()))
        if seen == self._seen:
            return None
        self._seen = seen
        text = _read(self._path)
        document = parse(text, str(self._path))
        self._key_paths = {name: self._path.parent / name for name in _key_files(document)}
        key_files = {name: _read(path) for name, path in self._key_paths.items()}
        digest = _digest(text, *key_files.values())
        if digest == self._digest:
            return None
        self._digest = digest
        return Edition(document=document, key_files=key_files)


class RedisSource:
    """Two keys: the document, and a version that grows whenever it is published.

    Args:
        redis: Where they are.
        prefix: Of all keys.
    """

    def __init__(self, redis: "Redis", prefix: str) -> None:
        self._redis = redis
        self._document_key = f"{prefix}:{_DOCUMENT}"
        self._version_key = f"{prefix}:{_VERSION}"
        self._version: str | None = ""

    async def next_edition(self) -> Edition | None:
        """See `TenantSource`. Asks for the version first."""
        if await asked(self._redis.get(self._version_key)) == self._version:
            return None
        keys = [self._document_key, self._version_key]
        text, version = await asked(self._redis.mget(keys))
        self._version = None if version is None else str(version)
        source = f"redis: {self._document_key}"
        return await asyncio.to_thread(_edition, str(text or ""), source)

    async def publish(self, text: str) -> int:
        """Puts a document there, for all routers; its version.

        Raises:
            ConfigError: It is wrong; what was there stays.
            UnavailableError: Redis gives no answer.
        """
        parse(text, "the document")
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.set(self._document_key, text)
            pipeline.incr(self._version_key)
            _, version = await asked(pipeline.execute())
        return int(version)


def _edition(text: str, source: str) -> Edition:
    document = parse(text, source)
    key_files = {name: _read(Path(name)) for name in _key_files(document)}
    return Edition(document=document, key_files=key_files)


def _key_files(document: TenantsDocument) -> list[str]:
    return [issuer.jwks_file or issuer.key_file or "" for issuer in document.jwt]


def _state(path: Path) -> tuple[int, ...] | None:
    """What changes when the file is written to or replaced; None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise ConfigError(f"{path}: more than {MAX_DOCUMENT_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error


def _digest(*texts: str) -> bytes:
    hasher = hashlib.sha256()
    for text in texts:
        encoded = text.encode()
        hasher.update(len(encoded).to_bytes(8, "big") + encoded)
    return hasher.digest()
