"""The directory of a pool with several nodes, in Redis: one small record per block, one script per step.

All records lie in one hash: no names to make for a long chain, and a third fewer bytes than with a key each. A record
holds the block's replicas and four-byte hashes of whose it is (`record.lua`),
about 110 bytes of Redis' memory for a block with one replica.

A node has a number there for as long as its lease holds; when it ends, all its replicas are void with it, without being
touched. The other nodes' renewals sweep their records out by and by; where no node renews at all,
everything goes after a week.

The scripts make their keys' names from the prefix, so the directory lies on one Redis,
not spread over a cluster of them.

Others may write there. What a node says of itself, of tenants and of flushes is sealed with the cluster's secret: nodes
connect to its addresses and drop blocks for it. Records of blocks are not, for their size: a false one costs a question
to a node that knows better, and whoever reads a block verifies its bytes. Whatever else is wrong is counted, passed
over and, where it is in the way, removed.
"""

import asyncio
import random
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt
import xxhash

from baton.errors import OverloadedError, PoolUnavailableError, UnavailableError
from baton.ids import BlockKey, WorkerIdentity
from baton.redis_link import RefusedValues, asked
from kvpool.directory.statements import Flush, Statements, missed_flushes
from kvpool.messages import (
    DirectoryChanges,
    NodeState,
    Renewal,
    Replica,
    Selection,
    Stored,
    Tier,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

Replicas = tuple[Replica, ...]

_CODE_OF_TIER = {Tier.DRAM: b"\x00", Tier.SSD: b"\x01"}
_LIFE_MS = 7 * 24 * 3600 * 1000
_MOST_AT_ONCE = 1024
"""Blocks per script: Redis serves no other client meanwhile."""

_MOST_REPLICAS = 8
_FLUSH_TRIES = 128
_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
"""Between two of them: at most, per try before it, and ever."""

_Args = list[str | bytes | int]


class FoundChain(Sequence[Replicas]):
    """The replicas of the leading blocks of a chain, none of them empty.

    Args:
        entries: One per replica, in the chain's order.
        begins: Where each block's entries begin, `[num_blocks + 1]`; the last one is where they all end.
        nodes: By the numbers that stand in the entries; none is missing.
    """

    def __init__(
        self,
        entries: npt.NDArray[np.void],
        begins: npt.NDArray[np.int64],
        nodes: Mapping[int, WorkerIdentity],
    ) -> None:
        self._nodes = nodes
        self._entries = entries
        self._begins = begins

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
        secret: Of the cluster: what others seal with it is believed.
        refused: Is told of what is not.
    """

    def __init__(
        self, redis: "Redis", *, prefix: str, secret: bytes, refused: RefusedValues
    ) -> None:
        self._prefix = f"{prefix}:pool2"  # 2: what nodes say is sealed
        self._statements = Statements(secret, self._prefix)
        self._refused = refused
        self._told_late: set[int] = set()
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
            self._note("pool_publish", await _answer(self._publish(args=args)), [])

    async def lookup(self, keys: Sequence[BlockKey]) -> FoundChain:
        """See `Directory`."""
        args: _Args = [self._prefix, b"".join(keys)]
        reply, faults = await _answer(self._lookup(args=args)), list[str]()
        packed, several, *said = _texts(reply, 1, least=2)
        nodes = {
            int.from_bytes(number, "little"): state.node
            for number, sealed in zip(said[::2], said[1::2], strict=False)
            if (state := self._state(sealed, faults)) is not None
        }
        found = found_chain(packed, several, len(keys), nodes, faults)
        self._note("pool_lookup", reply, faults)
        return found

    async def renew(self, state: NodeState, lease_s: float, flushes: int) -> Renewal:
        """See `Directory`. A number that a clock gave which was far ahead says nothing of the flushes since then."""
        if self._statements.is_ahead(flushes):
            flushes = 0
        args: _Args = [
            self._prefix,
            _name(state.node),
            self._statements.seal_state(state, lease_s),
            _ms(lease_s),
            flushes.to_bytes(8, "little"),
            _LIFE_MS,
            self._statements.seal_parts(state, lease_s),
        ]
        reply, faults = await _answer(self._renew(args=args)), list[str]()
        told = self._told(_texts(reply, 2), faults)
        missed = missed_flushes(told, flushes, self._told_late)
        self._told_late |= missed.late
        self._note("pool_renew", reply, faults)
        return Renewal(anew=bool(reply[1]), flushes=missed.latest, selections=missed.selections)

    async def nodes(self) -> tuple[NodeState, ...]:
        """See `Directory`."""
        reply, faults = await _answer(self._nodes(args=[self._prefix])), list[str]()
        said = _texts(reply, 1)
        states = [
            self._with_parts(state, parts, faults)
            for sealed, parts in zip(said[::2], said[1::2], strict=False)
            if (state := self._state(sealed, faults)) is not None
        ]
        self._note("pool_nodes", reply, faults)
        return tuple(states)

    async def retire(self, node: WorkerIdentity) -> None:
        """See `Directory`."""
        args: _Args = [self._prefix, _name(node)]
        self._note("pool_retire", await _answer(self._retire(args=args)), [])

    async def flush(self, selection: Selection) -> int:
        """See `Directory`. Tries again where another node flushes at the same moment. An operator's flush is asked of all
        nodes at once: one that finds another's of the same selection, later than its own call, has no need of one.

        Raises:
            InvalidRequestError: A name in the selection is longer than any is.
            OverloadedError: Others flushed with every try.
        """
        hashes = b"".join(map(_hash, (selection.tenant, selection.scope, selection.model)))
        latest, previous = b"", 0
        before: int | None = None
        for attempt in range(_FLUSH_TRIES):
            # A try fails only where another one succeeds, so each has its turn; sooner where not all try at the same time.
            await asyncio.sleep(random.uniform(0.0, min(attempt * _PAUSE_S, _LONGEST_PAUSE_S)))
            sealed = self._statements.seal_flush(selection, previous)
            args: _Args = [self._prefix, hashes, sealed, latest]
            reply = await _answer(self._flush(args=args))
            words, faults = _texts(reply, 2), list[str]()
            told = self._told(words, faults)
            self._note("pool_flush", reply, faults)
            if reply[1]:
                return self._statements.open_flush(sealed).number
            if latest == (words[0] if words else b""):
                raise _no_reply()  # nothing would have kept the script from it
            latest = words[0] if words else b""
            previous = max((flush.number for flush in told), default=0)
            if before is None:
                before = previous  # what was there when this call began
            same = max((flush.number for flush in told if flush.selection == selection), default=0)
            if same > before:
                return same
        raise OverloadedError(
            "the pool's directory: too many others flush at the same time", retry_after_s=1.0
        )

    def _state(self, sealed: bytes, faults: list[str]) -> NodeState | None:
        try:
            return self._statements.open_state(sealed)
        except ValueError as error:
            faults.append(f"a node's state: {error}")
            return None

    def _with_parts(self, state: NodeState, sealed: bytes, faults: list[str]) -> NodeState:
        try:
            return self._statements.open_parts(state, sealed)
        except ValueError as error:
            faults.append(f"what tenants have on a node: {error}")
            return state

    def _told(self, words: Sequence[bytes], faults: list[str]) -> list[Flush]:
        told = []
        for sealed in words:
            try:
                told.append(self._statements.open_flush(sealed))
            except ValueError as error:
                faults.append(f"a flush: {error}")
        return told

    def _note(self, reader: str, reply: Sequence[object], faults: list[str]) -> None:
        """What the script refused, and what was refused here."""
        refused = reply[0]
        assert isinstance(refused, int), "_answer has seen to it"
        self._refused.note(reader, [*faults, *["a key or record of another form"] * refused])


async def _answer(reply: Awaitable[object]) -> list[object]:
    """What a script of ours returns: a list that begins with how much it refused."""
    try:
        answer = await asked(reply)
    except UnavailableError as error:
        raise PoolUnavailableError(f"the pool's directory: {error.message}") from error
    if isinstance(answer, list) and answer and isinstance(answer[0], int):
        return answer
    raise _no_reply()


def _texts(reply: Sequence[object], numbers: int, least: int = 0) -> list[bytes]:
    """What comes after so many numbers."""
    texts = [text for text in reply[numbers:] if isinstance(text, bytes)]
    if len(texts) != len(reply) - numbers or len(texts) < least:
        raise _no_reply()
    return texts


def _no_reply() -> PoolUnavailableError:
    return PoolUnavailableError("the pool's directory: the answer is not that of its scripts")


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


def found_chain(
    packed: bytes,
    several: bytes,
    num_keys: int,
    nodes: Mapping[int, WorkerIdentity],
    faults: list[str],
) -> FoundChain:
    """The chain up to the first block of which no replica is right.

    Args:
        packed: One entry per replica, in the chain's order, as `lookup.lua` packs them.
        several: Pairs of four bytes each: a block, and how many replicas it has. The others have one.
        num_keys: Blocks that were asked for.
        nodes: By their numbers; replicas on others are passed over.
        faults: What was wrong is added.
    """
    entries = np.frombuffer(packed[: len(packed) // _ENTRY.itemsize * _ENTRY.itemsize], _ENTRY)
    pairs = np.frombuffer(several[: len(several) // 8 * 8], dtype="<u4").reshape(-1, 2)
    sizes = _sizes(len(entries), pairs.astype(np.int64))
    if sizes is None or len(sizes) > num_keys:
        faults.append("an answer about blocks of another length")
        return FoundChain(entries[:0], np.zeros(1, dtype=np.int64), nodes)
    begins = np.concatenate(([0], np.cumsum(sizes)))
    right = np.isin(entries["node"], list(nodes)) & (entries["tier"] < len(_TIER_OF_CODE))
    if right.all():
        return FoundChain(entries, begins, nodes)
    faults.append("a replica on no node, or in no tier")
    sizes = np.add.reduceat(right, begins[:-1], dtype=np.int64)
    held = int(np.append(sizes, 0).argmin())
    begins = np.concatenate(([0], np.cumsum(sizes[:held])))
    return FoundChain(entries[right][: begins[-1]], begins, nodes)


def _sizes(num_entries: int, several: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """How many entries each block has; None where that does not come out."""
    blocks, counts = several[:, 0], several[:, 1]
    num_blocks = num_entries - int((counts - 1).sum())
    if (counts < 2).any() or (counts > _MOST_REPLICAS).any() or (blocks >= num_blocks).any():
        return None
    sizes = np.ones(max(num_blocks, 0), dtype=np.int64)
    sizes[blocks] = counts
    return sizes if sizes.sum() == num_entries else None
