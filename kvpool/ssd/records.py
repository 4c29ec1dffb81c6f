"""What a journal's records say, as bytes: little-endian, nothing in them is ever run or unpickled.

begins   kind | "BATONSSD" | version (4) | bytes of a slot (8) | 16 random bytes
holds    kind | extent (8) | epoch (8) | bytes (8) | position (8) | 5 lengths (2 each) | key | tenant | scope | model | checksums
erased   kind | extent (8) | epoch (8)
"""

import errno
import os
import struct
from dataclasses import dataclass
from functools import lru_cache

from baton.ids import BlockKey
from kvpool.messages import DiskBlock, Owner

VERSION = 1
"""Of these records, and of how blocks lie in extents."""

_BEGINS, _HOLDS, _ERASED = 0, 1, 2
_MAGIC = b"BATONSSD"
_LONGEST_PART = 0xFFFF

_BEGIN_RECORD = struct.Struct("<B8sIQ16s")
_HOLDS_HEAD = struct.Struct("<BQQQQ5H")
_ERASED_RECORD = struct.Struct("<BQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Begins:
    """The first record of a journal.

    Attributes:
        version: Of what follows.
        slot_bytes: The size of the largest block.
    """

    version: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """An extent holds nothing from here on, if it held a block of that epoch.

    Attributes:
        extent: Index of the extent.
        epoch: Of the use that is over.
    """

    extent: int
    epoch: int


Record = Begins | DiskBlock | Erased


def encode_begins(slot_bytes: int) -> bytes:
    """The first record of a new journal; no two are the same."""
    return _BEGIN_RECORD.pack(_BEGINS, _MAGIC, VERSION, slot_bytes, os.urandom(16))


def encode_holds(block: DiskBlock) -> bytes:
    """An extent holds `block` from here on.

    Raises:
        OSError: Its owner has a name, or it has more layers, than a record has room for (`ENAMETOOLONG`).
    """
    owner = block.owner
    names = [_encoded(name) for name in (owner.tenant, owner.scope, owner.model)]
    parts = [block.key, *names, block.checksums]
    if max(map(len, parts)) > _LONGEST_PART:
        raise OSError(errno.ENAMETOOLONG, "the block's owner or checksums are too long to record")
    head = _HOLDS_HEAD.pack(
        _HOLDS, block.extent, block.epoch, block.size_bytes, block.position, *map(len, parts)
    )
    return head + b"".join(parts)


def encode_erased(erased: Erased) -> bytes:
    """An extent holds nothing from here on."""
    return _ERASED_RECORD.pack(_ERASED, erased.extent, erased.epoch)


def decode(record: bytes) -> Record | None:
    """What a record says; None where this version of the code does not know."""
    kind = record[0] if record else None
    if kind == _HOLDS and len(record) >= _HOLDS_HEAD.size:
        return _decode_holds(record)
    if kind == _ERASED and len(record) == _ERASED_RECORD.size:
        _, extent, epoch = _ERASED_RECORD.unpack(record)
        return Erased(extent=extent, epoch=epoch)
    if kind == _BEGINS and len(record) == _BEGIN_RECORD.size:
        _, magic, version, slot_bytes, _ = _BEGIN_RECORD.unpack(record)
        return Begins(version=version, slot_bytes=slot_bytes) if magic == _MAGIC else None
    return None


def _decode_holds(record: bytes) -> DiskBlock | None:
    _, extent, epoch, size_bytes, position, *lengths = _HOLDS_HEAD.unpack_from(record)
    if len(record) != _HOLDS_HEAD.size + sum(lengths):
        return None
    parts, begin = [], _HOLDS_HEAD.size
    for length in lengths:
        parts.append(record[begin : begin + length])
        begin += length
    key, tenant, scope, model, checksums = parts
    return DiskBlock(
        extent=extent,
        epoch=epoch,
        key=BlockKey(key),
        owner=_owner(tenant, scope, model),
        size_bytes=size_bytes,
        position=position,
        checksums=checksums,
    )


@lru_cache(maxsize=4096)
def _owner(tenant: bytes, scope: bytes, model: bytes) -> Owner:
    # A disk holds many blocks of few owners.
    return Owner(tenant=_decoded(tenant), scope=_decoded(scope), model=_decoded(model))


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "surrogatepass")
