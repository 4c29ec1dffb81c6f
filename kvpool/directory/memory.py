"""The directory of a pool with one node, in that node's own process; and what the one in Redis is held against."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.errors import InvariantError
from baton.ids import BlockKey, WorkerIdentity
from kvpool.messages import (
    DirectoryChanges,
    NodeState,
    Owner,
    Renewal,
    Replica,
    Selection,
    Stored,
)

Replicas = tuple[Replica, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """A node that has a lease, or had one whose end was not noticed yet. `flushes`: so many it has been told of."""

    state: NodeState
    expires_s: float
    flushes: int
    keys: dict[BlockKey, Owner] = field(default_factory=dict)


class MemoryDirectory:
    """A `Directory` over dictionaries. Not thread-safe: one owner.

    Args:
        clock: Leases run on it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._blocks: dict[BlockKey, Replicas] = {}
        self._nodes: dict[WorkerIdentity, _Node] = {}
        self._flushes: list[Selection] = []

    async def publish(self, node: WorkerIdentity, changes: DirectoryChanges) -> None:
        """See `Directory`."""
        self._drop_expired()
        known = self._nodes.get(node)
        if known is None:
            return
        for key in changes.removed:
            if known.keys.pop(key, None) is not None:
                self._drop(key, node)
        for stored in changes.stored:
            self._store(known, stored)

    def _store(self, node: _Node, stored: Stored) -> None:
        if any(selection.covers(stored.owner) for selection in self._flushes[node.flushes :]):
            return
        key, identity = stored.key, node.state.node
        replica = Replica(node=identity, tier=stored.tier, epoch=stored.epoch)
        held = self._blocks.get(key)
        if held is None:
            self._blocks[key] = (replica,)
        else:
            self._blocks[key] = (*(r for r in held if r.node != identity), replica)
        node.keys[key] = stored.owner

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Replicas]:
        """See `Directory`."""
        self._drop_expired()
        found: list[Replicas] = []
        get = self._blocks.get
        for key in keys:
            replicas = get(key)
            if replicas is None:
                break
            found.append(replicas)
        return found

    async def renew(self, state: NodeState, lease_s: float, flushes: int) -> Renewal:
        """See `Directory`."""
        self._drop_expired()
        expires_s = self._clock.now_s() + lease_s
        node, told = self._nodes.get(state.node), len(self._flushes)
        if node is None:
            self._nodes[state.node] = _Node(state=state, expires_s=expires_s, flushes=told)
        else:
            node.state, node.expires_s, node.flushes = state, expires_s, told
        return Renewal(
            anew=node is None,
            flushes=told,
            selections=tuple(self._flushes[flushes:]),
        )

    async def nodes(self) -> tuple[NodeState, ...]:
        """See `Directory`."""
        self._drop_expired()
        return tuple(node.state for node in self._nodes.values())

    async def retire(self, node: WorkerIdentity) -> None:
        """See `Directory`."""
        known = self._nodes.pop(node, None)
        if known is not None:
            for key in known.keys:
                self._drop(key, node)

    async def flush(self, selection: Selection) -> int:
        """See `Directory`."""
        self._flushes.append(selection)
        for node in self._nodes.values():
            flushed = [key for key, owner in node.keys.items() if selection.covers(owner)]
            for key in flushed:
                del node.keys[key]
                self._drop(key, node.state.node)
        return len(self._flushes)

    def _drop_expired(self) -> None:
        now_s = self._clock.now_s()
        dead = [name for name, node in self._nodes.items() if node.expires_s <= now_s]
        for name in dead:
            for key in self._nodes.pop(name).keys:
                self._drop(key, name)

    def _drop(self, key: BlockKey, node: WorkerIdentity) -> None:
        left = tuple(replica for replica in self._blocks[key] if replica.node != node)
        if left:
            self._blocks[key] = left
        else:
            del self._blocks[key]

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless blocks and nodes tell of the same replicas."""
        by_block = {(key, r.node) for key, replicas in self._blocks.items() for r in replicas}
        by_node = {(key, name) for name, node in self._nodes.items() for key in node.keys}
        if by_block != by_node:
            raise InvariantError(f"{len(by_block ^ by_node)} replicas stand on one side only")
        if not all(self._blocks.values()):
            raise InvariantError("a block without replicas is still known")
