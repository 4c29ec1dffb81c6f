"""The directory of a pool with several nodes, in Redis: one small record per block, one script per step.

All records lie in one hash: no names to make for a long chain, and a third fewer bytes than with a key each. A record holds the
block's replicas and four-byte hashes of whose it is (`record.lua`), about 110 bytes of Redis' memory for a block with one replica.

A node has a number there for as long as its lease holds; when it ends, all its replicas are void with it, without being touched.
The other nodes' renewals sweep their records out by and by; where no node renews at all, everything goes after a week.

The scripts make their keys' names from the prefix, so the directory lies on one Redis, not spread over a cluster of them.
"""

import json
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np
import numpy.typing as npt
import xxhash

from baton.errors import PoolUnavailableError, UnavailableError
from baton.ids import BlockKey, Incarnation, WorkerId, WorkerIdentity
from baton.redis_link import asked
from kvpool.messages import (
    DirectoryChanges,
    NodeState,
    Renewal,
    Replica,
    Selection,
    Stored,
    TenantPart,
    Tier,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

Replicas = tuple[Replica, ...]

_CODE_OF_TIER = {Tier.DRAM: b"\x00", Tier.SSD: b"\x01"}
_LIFE_MS = 7 * 24 * 3600 * 1000
_REMEMBERED_FLUSHES = 64
_MOST_AT_ONCE = 1024
"""Blocks per script: Redis serves no other client meanwhile."""

_Reply = TypeVar("_Reply")
_Args = list[str | bytes | int]


class FoundChain(Sequence[Replicas]):
    """The replicas of the leading blocks of a chain, none of them empty.

    Args:
        entries: One per replica, in the chain's order, as `lookup.lua` packs them.
        several: Pairs of four bytes each: a block, and how many replicas it has. The others have one.
        nodes: By the numbers that stand in the entries.
    """

    def __init__(self, entries: bytes, several: bytes, nodes: Mapping[int, WorkerIdentity]) -> None:
        self._nodes = nodes
        self._entries = np.frombuffer(entries, dtype=_ENTRY)
        self._begins = _begins(len(self._entries), np.frombuffer(several, dtype="<u4"))

    def __len__(self) -> int:
        return len(self._begins) - 1

    @overload
    def __getitem__(self, at: int) -> Replicas: ...
    @overload
    def __getitem__(self, at: slice) -> list[Replicas]: ...
    def __getitem__(self, at: int | slice) -> Replicas | list[Replicas]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        block = range(len(self))[at]
        return self._between(int(self._begins[block]), int(self._begins[block + 1]))

    def __iter__(self) -> Iterator[Replicas]:
        replicas = self._between(0, len(self._entries))
        if len(replicas) == len(self):
            return zip(replicas, strict=True)
        begins = self._begins.tolist()
        return (replicas[begin:end] for begin, end in pairwise(begins))

    def _between(self, begin: int, end: int) -> Replicas:
        nodes = self._nodes
        return tuple(
            Replica(node=nodes[number], tier=_TIER_OF_CODE[tier], epoch=high << 32 | low)
            for _, number, tier, low, high in self._entries[begin:end].tolist()
        )


class RedisDirectory:
    """A `Directory` that several nodes share. Every method raises `PoolUnavailableError` when Redis gives no answer.

    Args:
        redis: Whose replies are bytes.
        prefix: Of all keys; clusters that share a Redis need different ones.
    """

    def __init__(self, redis: "Redis", *, prefix: str) -> None:
        self._prefix = f"{prefix}:pool"
        self._lookup = redis.register_script(_script("lookup.lua"))
        self._publish = redis.register_script(_script("publish.lua"))
        self._renew = redis.register_script(_script("renew.lua"))
        self._retire = redis.register_script(_script("retire.lua"))
        self._nodes = redis.register_script(_script("nodes.lua"))
        self._flush = redis.register_script(_script("flush.lua"))

    async def publish(self, node: WorkerIdentity, changes: DirectoryChanges) -> None:
        """See `Directory`."""
        parts = max(len(changes.stored), len(changes.removed))
        for begin in range(0, parts, _MOST_AT_ONCE):
            turn = slice(begin, begin + _MOST_AT_ONCE)
            removed = b"".join(changes.removed[turn])
            stored = b"".join(map(_stored_bytes, changes.stored[turn]))
            args: _Args = [self._prefix, _name(node), removed, stored]
            await _answer(self._publish(args=args))

    async def lookup(self, keys: Sequence[BlockKey]) -> FoundChain:
        """See `Directory`."""
        args: _Args = [self._prefix, b"".join(keys)]
        entries, several, *states = await _answer(self._lookup(args=args))
        nodes = {
            int.from_bytes(number, "little"): _state(state).node
            for number, state in zip(states[::2], states[1::2], strict=True)
        }
        return FoundChain(entries, several, nodes)

    async def renew(self, state: NodeState, lease_s: float, flushes: int) -> Renewal:
        """See `Directory`."""
        said, parts = _state_bytes(state), _parts_bytes(state)
        args: _Args = [
            self._prefix,
            _name(state.node),
            said,
            _ms(lease_s),
            flushes,
            _LIFE_MS,
            parts,
        ]
        anew, count, missed, *words = await _answer(self._renew(args=args))
        selections = tuple(_selection(word) for word in reversed(words))
        if missed > len(selections):
            selections = (Selection(),)
        return Renewal(anew=bool(anew), flushes=count, selections=selections)

    async def nodes(self) -> tuple[NodeState, ...]:
        """See `Directory`."""
        said = await _answer(self._nodes(args=[self._prefix]))
        return tuple(map(_state, said[::2], said[1::2]))

    async def retire(self, node: WorkerIdentity) -> None:
        """See `Directory`."""
        await _answer(self._retire(args=[self._prefix, _name(node)]))

    async def flush(self, selection: Selection) -> int:
        """See `Directory`."""
        hashes = b"".join(map(_hash, (selection.tenant, selection.scope, selection.model)))
        words = json.dumps([selection.tenant, selection.scope, selection.model])
        args: _Args = [self._prefix, hashes, words, _REMEMBERED_FLUSHES]
        return int(await _answer(self._flush(args=args)))


async def _answer(reply: Awaitable[_Reply]) -> _Reply:
    try:
        return await asked(reply)
    except UnavailableError as error:
        raise PoolUnavailableError(f"the pool's directory: {error.message}") from error


def _script(name: str) -> str:
    folder = resources.files("kvpool.directory")
    return (folder / "record.lua").read_text() + (folder / name).read_text()


def _name(node: WorkerIdentity) -> str:
    return f"{node.worker_id}@{node.incarnation:x}"


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _hash(text: str) -> bytes:
    """Four bytes; all of them zero for no text, and only then."""
    if not text:
        return bytes(4)
    return (xxhash.xxh32_intdigest(text.encode()) | 1).to_bytes(4, "little")


def _stored_bytes(stored: Stored) -> bytes:
    owner = stored.owner
    return b"".join(
        (
            stored.key,
            _hash(owner.tenant),
            _hash(owner.scope),
            _hash(owner.model),
            _CODE_OF_TIER[stored.tier],
            stored.epoch.to_bytes(6, "little"),
        )
    )


def _state_bytes(state: NodeState) -> bytes:
    node = state.node
    said = {
        "worker_id": node.worker_id,
        "incarnation": node.incarnation,
        "address": state.address,
        "failure_domain": state.failure_domain,
        "free_bytes": state.free_bytes,
        "capacity_bytes": state.capacity_bytes,
        "sick": state.sick,
    }
    return json.dumps(said).encode()


def _parts_bytes(state: NodeState) -> bytes:
    if not state.parts:
        return b""
    said = [(part.tenant, part.size_bytes, part.active) for part in state.parts]
    return json.dumps(said).encode()


def _state(packed: bytes, parts: bytes = b"") -> NodeState:
    said = json.loads(packed)
    node = WorkerIdentity(
        worker_id=WorkerId(said.pop("worker_id")), incarnation=Incarnation(said.pop("incarnation"))
    )
    said_parts = json.loads(parts) if parts else ()
    return NodeState(
        node=node,
        parts=tuple(
            TenantPart(tenant=tenant, size_bytes=size_bytes, active=active)
            for tenant, size_bytes, active in said_parts
        ),
        **said,
    )


def _selection(word: bytes) -> Selection:
    tenant, scope, model = json.loads(word)
    return Selection(tenant=tenant, scope=scope, model=model)


_ENTRY = np.dtype(
    [
        ("head", "V16"),
        ("node", "<u4"),
        ("tier", "u1"),
        ("epoch_low", "<u4"),
        ("epoch_high", "<u2"),
    ]
)
"""One replica: a record of the directory that has no other."""

_TIER_OF_CODE = (Tier.DRAM, Tier.SSD)


def _begins(num_entries: int, several: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Where each block's entries begin, `[num_blocks + 1]`; the last one is where they all end."""
    if not len(several):
        return np.arange(num_entries + 1)
    blocks, counts = several[::2].astype(np.int64), several[1::2].astype(np.int64)
    sizes = np.ones(num_entries - int((counts - 1).sum()), dtype=np.int64)
    sizes[blocks] = counts
    return np.concatenate(([0], np.cumsum(sizes)))
