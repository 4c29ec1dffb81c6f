"""Where the tenants document comes from: a file, or Redis. Asked again and again,
each gives it only when it changed.
"""

import asyncio
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from baton.errors import ConfigError, UnavailableError
from baton.redis_link import RefusedValues, asked
from baton.seal import HEAD_BYTES, Seal, SealError
from baton.telemetry.logs import get_logger
from router.tenants.document import TenantsDocument, parse

if TYPE_CHECKING:
    from redis.asyncio import Redis

MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
_SETTLING_S = 0.5
_SETTLING_LOOKS = 20
_DOCUMENT = "tenants:document"
_REPLACE = """
local found = redis.pcall('GETRANGE', KEYS[1], 0, math.max(#ARGV[1] - 1, 0))
if found ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""
"""Puts a document where what begins with the first argument lies, or where nothing does if that is empty."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edition:
    """One state of the document, with the key files that it names.

    Attributes:
        document: Parsed and checked.
        key_files: Content of each, by the name that the document calls it; none where they are not read.
    """

    document: TenantsDocument
    key_files: dict[str, str]


class TenantSource(Protocol):
    """Gives the document."""

    async def next_edition(self) -> Edition | None:
        """What is there, if it is other than the last time; None if it is the same.

        Raises:
            ConfigError: It cannot be read, which is tried again the next time; or it is wrong: until it changes again the
                answer is None.
            UnavailableError: Redis gives no answer, or has no document and none has been read so far.
        """


class FileSource:
    """A file. Key files that it names by relative paths lie beside it, and are watched as well.

    Args:
        path: Of the document.
        reads_keys: Key files are read; else they need not be on this host.
    """

    def __init__(self, path: Path, *, reads_keys: bool = True) -> None:
        self._path = path
        self._reads_keys = reads_keys
        self._key_paths: dict[str, Path] = {}
        self._seen: tuple[object, ...] | None = None
        self._digest = b""

    async def next_edition(self) -> Edition | None:
        """See `TenantSource`. Looks at sizes and times first, and reads only when they are others. Who writes in place
        empties the file first: after the first time it is read once it has stood still.
        """
        seen = await asyncio.to_thread(self._states)
        if seen == self._seen:
            return None
        if self._seen is not None:
            seen = await self._settled(seen)
        return await asyncio.to_thread(self._read_edition, seen)

    def _states(self) -> tuple[object, ...]:
        return _states((self._path, *self._key_paths.values()))

    async def _settled(self, seen: tuple[object, ...]) -> tuple[object, ...]:
        for _ in range(_SETTLING_LOOKS):
            await asyncio.sleep(_SETTLING_S)
            before, seen = seen, await asyncio.to_thread(self._states)
            if seen == before:
                return seen
        raise ConfigError(f"{self._path}: it, or a key file that it names, changes all the time")

    def _read_edition(self, seen: tuple[object, ...]) -> Edition | None:
        held, self._digest = self._digest, b""
        self._seen = ()  # what cannot be read is tried again
        text = _read(self._path)
        try:
            document = parse(text, str(self._path))
        except ConfigError:
            self._seen = seen
            raise
        named = _key_files(document) if self._reads_keys else []
        self._key_paths = {name: self._path.parent / name for name in named}
        key_files = {name: _read(path) for name, path in self._key_paths.items()}
        self._seen, self._digest = seen, _digest(text, *key_files.values())
        return None if self._digest == held else Edition(document=document, key_files=key_files)


class RedisSource:
    """One key: the document, sealed with the cluster's secret. What others put there, an older document or none at all
    changes nothing. Where Redis has lost the document, or has an older one of the cluster's (after a failover, or from
    a backup), the one that holds is put there again, as it was sealed: for whoever starts later. Key files that it
    names lie on this host, and are watched as well.

    Args:
        redis: Where it is.
        prefix: Of all keys.
        secret: Of the cluster.
        refused: Is told of a document that is not believed.
        reads_keys: As a `FileSource`'s.
    """

    def __init__(
        self,
        redis: "Redis",
        prefix: str,
        secret: bytes,
        refused: RefusedValues,
        *,
        reads_keys: bool = True,
    ) -> None:
        self._redis = redis
        self._reads_keys = reads_keys
        self._key = f"{prefix}:{_DOCUMENT}"
        self._seal = Seal(secret, _DOCUMENT)
        self._refused = refused
        self._replace = redis.register_script(_REPLACE)
        self._seen: tuple[bytes | None, tuple[object, ...]] | None = None
        self._key_paths: dict[str, Path] = {}
        self._held = b""
        """The newest document that was found, as it was sealed; empty before the first."""
        self._held_ms = 0
        """When it was sealed: an older one may still let in who was shut out since."""

    async def next_edition(self) -> Edition | None:
        """See `TenantSource`. Asks for the head of what is there first."""
        head = await _text(self._redis, self._key, HEAD_BYTES)
        keys = await asyncio.to_thread(_states, self._key_paths.values())
        if (head, keys) == self._seen:
            return None
        found = await _text(self._redis, self._key, HEAD_BYTES + MAX_DOCUMENT_BYTES)
        source = f"redis: {self._key}"
        if found == b"":
            if not self._held:
                raise UnavailableError(f"{source}: no document there: publish it, again if need be")
            await self._put_back(found)
            return None
        sealed = found or b""
        self._seen = (sealed[: HEAD_BYTES + 1] if found else None, keys)
        try:
            opened = self._seal.open(self._key, sealed, MAX_DOCUMENT_BYTES)
            if opened.sealed_ms < self._held_ms:
                self._seen = None
                await self._put_back(sealed)
                raise SealError("older than the one that holds")
            text = opened.content.decode()
        except ValueError as error:
            self._refused.note("tenants", [str(error)])
            raise ConfigError(f"{source}: {error}") from error
        self._refused.note("tenants", [])
        self._held, self._held_ms = sealed, opened.sealed_ms
        return await asyncio.to_thread(self._read_edition, text, source)

    async def _put_back(self, lies: bytes) -> None:
        """Puts the document that holds where `lies` is, unless something else is there by now."""
        arguments = [lies[: HEAD_BYTES + 1], self._held]
        if await asked(self._replace(keys=[self._key], args=arguments)) == 1:
            _log.warning("Redis had lost the tenants document, or had an older one: it is put back")

    def _read_edition(self, text: str, source: str) -> Edition:
        document = parse(text, source)
        named = _key_files(document) if self._reads_keys else []
        self._key_paths = {name: Path(name) for name in named}
        keys = _states(self._key_paths.values())
        assert self._seen is not None
        (head, _), self._seen = self._seen, None  # what cannot be read is tried again
        key_files = {name: _read(path) for name, path in self._key_paths.items()}
        self._seen = (head, keys)
        return Edition(document=document, key_files=key_files)


async def publish(redis: "Redis", prefix: str, secret: bytes, text: str) -> int:
    """Puts a document into Redis, for all routers and pool nodes; its version, which grows.

    Raises:
        ConfigError: It is wrong; what was there stays.
        UnavailableError: Redis gives no answer.
    """
    parse(text, "the document")
    key, seal = f"{prefix}:{_DOCUMENT}", Seal(secret, _DOCUMENT)
    before = await _text(redis, key, HEAD_BYTES + MAX_DOCUMENT_BYTES)
    try:
        least_ms = seal.open(key, before or b"", MAX_DOCUMENT_BYTES).sealed_ms + 1
    except SealError:
        least_ms = 0
    sealed_ms = max(seal.now_ms(), least_ms)
    await asked(redis.set(key, seal.close(key, text.encode(), sealed_ms)))
    return sealed_ms


async def _text(redis: "Redis", key: str, end: int) -> bytes | None:
    """What lies there, its first `end + 1` bytes at most: none where there is nothing, None where it is no text."""
    async with redis.pipeline(transaction=True) as pipeline:
        pipeline.getrange(key, 0, end)
        (value,) = await asked(pipeline.execute(raise_on_error=False))
    return value if isinstance(value, bytes) else None


def _key_files(document: TenantsDocument) -> list[str]:
    return [issuer.jwks_file or issuer.key_file or "" for issuer in document.jwt]


def _states(paths: Iterable[Path]) -> tuple[object, ...]:
    return tuple(_state(path) for path in paths)


def _state(path: Path) -> tuple[int, ...] | None:
    """What changes when the file is written to or replaced; None if there is no file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
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
    except ValueError as error:  # a NUL in its name
        raise ConfigError(f"{str(path)!r}: {error}") from error


def _digest(*texts: str) -> bytes:
    hasher = hashlib.sha256()
    for text in texts:
        encoded = text.encode()
        hasher.update(len(encoded).to_bytes(8, "big") + encoded)
    return hasher.digest()
