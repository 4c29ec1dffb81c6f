"""What the pool needs from outside: for a node, the directory of the whole pool and a disk below its memory; for a
worker, the pages of its arena, and callbacks and calls to the node.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from baton.block_ids import Numbers
from baton.ids import BlockKey, SeqId, WorkerIdentity
from kv_transfer.memory.pages import Pages
from kvpool.hashed_copy import Hashes
from kvpool.messages import (
    Allowance,
    BlockLease,
    DirectoryChanges,
    DiskBlock,
    Erase,
    FlushMark,
    NodeState,
    Owner,
    PutGrant,
    PutRefused,
    Renewal,
    Replica,
    Selection,
)


class Directory(Protocol):
    """Which node holds which block. A hint: the nodes themselves are the truth, and a reader verifies what it gets.

    Every method may raise `PoolUnavailableError` when the directory cannot be reached; callers then do without.
    """

    async def publish(self, node: WorkerIdentity, changes: DirectoryChanges) -> None:
        """Takes one node's changes, in the order in which the node says them. Those of a node without a lease are passed
        over, and so are blocks that a flush covers of which the node has not been told yet.
        """

    async def lookup(self, keys: Sequence[BlockKey]) -> Sequence[tuple[Replica, ...]]:
        """Replicas of the leading blocks of a chain that some living node holds: one entry per block,
        none of them empty.

        One round trip, whatever the chain's length. Grants nothing and leaves no trace. The answer may make its objects
        where it is looked at, so look once, and only at the blocks that matter.
        """

    async def renew(self, state: NodeState, lease_s: float, flushes: int) -> Renewal:
        """Says that a node lives, for `lease_s` from now; what its lease covers is void once it has ended.

        Args:
            state: Of the node.
            lease_s: For how long.
            flushes: The number of the latest flush that the node has carried out; 0 for none.

        Returns:
            The later ones, for the node to carry out in its own memory,
            and whether the node has to publish all it holds.
        """

    async def nodes(self) -> tuple[NodeState, ...]:
        """The nodes that live."""

    async def retire(self, node: WorkerIdentity) -> None:
        """All replicas of this start of a node are void, at once."""

    async def flush(self, selection: Selection) -> int:
        """Voids every replica that `selection` covers, on all nodes. Returns the flush's number,
        above all before it.

        Raises:
            OverloadedError: The directory is there, and too many others flush at the same time.
        """


class Peers(Protocol):
    """The other nodes of the pool, as this node's own part uses them. On the node's event loop."""

    async def bring(self, keys: Sequence[BlockKey], held: int, wait_s: float) -> None:
        """Fetches the blocks of a text after its first `held` ones from nodes that have them;
        returns after `wait_s` at most.
        """

    def read(self, keys: Sequence[BlockKey]) -> None:
        """The beginning of a text, which is held here, was read; hot blocks get copies on other nodes."""

    def tick(self) -> None:
        """Ends what takes too long; several times per second."""

    async def close(self) -> None:
        """Fetches and sends nothing more, and ends other nodes' access to the slab."""

    def check_integrity(self) -> None:
        """Raises InvariantError if the state of what is under way contradicts itself."""


class AllowanceSource(Protocol):
    """Where a node learns what the operator allows its tenants."""

    async def next(self) -> Mapping[str, Allowance] | None:
        """What holds now, by tenant, if it is other than the last time; None if it is the same.

        Raises:
            ConfigError: It cannot be read, or is wrong. Said once; until it changes again the answer is None.
            UnavailableError: There is no answer.
        """


class ArenaPages(Protocol):
    """The pages of one engine's KV arena, as the threads see them that copy between it and a slab.

    `HostPages` is for memory that the processor reads, `GpuPages` for a GPU's.
    """

    @property
    def num_layers(self) -> int:
        """Layers of a block."""

    def copy_in(self, layer_index: int, source: Pages, slots: Numbers, pages: Numbers) -> Hashes:
        """Copies rows `slots` of one layer of a slab, `[num_slots, page_layer_bytes]`, to the arena's `pages`; blocks.

        Returns:
            The xxh3 of what has arrived, per page.
        """

    def copy_out(self, layer_index: int, pages: Numbers, target: Pages, slots: Numbers) -> Hashes:
        """The same the other way."""


class LeaseCallbacks(Protocol):
    """What the copying threads tell the worker's client of the node. Called from any thread;
    must neither block nor raise.
    """

    def wanted(self, seq_id: SeqId, keys: Sequence[BlockKey]) -> None:
        """A sequence will need these blocks again: lease them and give the lease to `ReadLeases.add`."""

    def released(self, lease_ids: Sequence[str]) -> None:
        """Nothing here reads under these leases any more."""

    def corrupt(self, keys: Sequence[BlockKey]) -> None:
        """These blocks do not have the checksums they were leased with."""


class PoolClient(Protocol):
    """A worker's calls to the node of its host. asyncio;
    a node that is away raises `PoolUnavailableError` and nothing else.
    """

    def slab(self) -> list[Pages] | None:
        """The slab, one array `[num_slots, page_layer_bytes]` per layer; None while no node is there."""

    async def lease(
        self, keys: Sequence[BlockKey], lease_s: float, wait_s: float, tenant: str = ""
    ) -> BlockLease:
        """Keeps the leading blocks of a text where they are; what is on the disk is waited for, for `wait_s`. Counted
        for `tenant`.
        """

    async def renew(self, lease_ids: Sequence[str], lease_s: float) -> tuple[str, ...]:
        """Prolongs leases; returns those that are over."""

    async def release(self, lease_ids: Sequence[str]) -> None:
        """Nothing reads under these any more."""

    async def reserve(
        self, keys: Sequence[BlockKey], owner: Owner, first: int
    ) -> PutGrant | PutRefused:
        """Slots for blocks that are not held; `first` blocks of their text come before them."""

    async def commit(self, put_id: str, checksums: Sequence[bytes]) -> int:
        """The slots of a grant are written: one entry per slot, an empty one where nothing was.
        How many are held now.
        """

    async def corrupt(self, keys: Sequence[BlockKey]) -> None:
        """These blocks do not have the checksums they were leased with."""


class AttachedClient(PoolClient, Protocol):
    """A client that finds the node by itself, again and again, and says on the event loop which slab there is,
    if any.
    """

    def node(self) -> WorkerIdentity | None:
        """The start of the node whose slab is mapped, if one is."""

    async def start(self) -> None:
        """Looks for the node from now on; does not wait for it."""

    async def close(self) -> None:
        """Lets go of the node."""


class ExtentStore(Protocol):
    """A disk below a node's memory. Blocks: called on threads of its own. A fault is an `OSError`,
    a wrong block a `CorruptKvError`.
    """

    @property
    def num_extents(self) -> int:
        """How many blocks it can hold."""

    def write(self, block: DiskBlock, data: memoryview) -> None:
        """Writes a block to its extent, so that a restart finds all of it or nothing."""

    def read(self, block: DiskBlock, into: memoryview) -> None:
        """Reads a block, verified against its checksums.

        Raises:
            CorruptKvError: The extent holds something else.
            OSError: It cannot be read.
        """

    def erase(self, extent: int, epoch: int) -> None:
        """The extent holds nothing any more, also after a restart, if it held a block of that epoch. From any thread."""

    @property
    def flush_mark(self) -> FlushMark | None:
        """What was last noted with `forget`; None for nothing, and where the disk held nothing of use."""

    def forget(self, erased: Sequence[Erase], mark: FlushMark | None = None) -> None:
        """The same for many extents, also for those that are being written to with that epoch. Returns once that is so
        whatever happens to process and power. Then, not before, `mark` is noted, and found after a restart.

        Raises:
            OSError: That is not certain.
        """

    def recover(self) -> list[DiskBlock]:
        """What the disk held when it was opened."""

    def close(self) -> None:
        """Lets go of the files."""
