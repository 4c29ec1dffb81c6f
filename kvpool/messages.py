"""The pool's records: blocks, replicas, puts, leases, usage, and what a ledger wants done on the disk. Frozen data."""

from dataclasses import dataclass
from enum import Enum

from baton.ids import BlockKey, WorkerIdentity


class Tier(Enum):
    """Where on a node a block lies; the faster one first."""

    DRAM = "dram"
    SSD = "ssd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose a block is. Quotas go by the tenant, flushes by any of the three.

    Attributes:
        tenant: The tenant that is billed for its bytes.
        scope: The cache scope of its key, salt included.
        model: Fingerprint of the model that computed it.
    """

    tenant: str
    scope: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which blocks a flush means; an empty field means any.

    Attributes:
        tenant: Only this tenant's.
        scope: Only of this cache scope.
        model: Only of the model with this fingerprint.
    """

    tenant: str = ""
    scope: str = ""
    model: str = ""

    def covers(self, owner: Owner) -> bool:
        """Whether blocks of `owner` are meant."""
        return (
            self.tenant in ("", owner.tenant)
            and self.scope in ("", owner.scope)
            and self.model in ("", owner.model)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One copy of a block.

    Attributes:
        node: The node that holds it.
        tier: Where.
        epoch: Of the slot it lies in; another epoch there is another block.
    """

    node: WorkerIdentity
    tier: Tier
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A block that a node holds from now on, or holds in another slot.

    Attributes:
        key: The block.
        owner: Whose it is.
        size_bytes: Its bytes.
        tier: Where it lies.
        epoch: Of that slot.
    """

    key: BlockKey
    owner: Owner
    size_bytes: int
    tier: Tier
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryChanges:
    """What has changed in one node's blocks; a key is in one of the two at most.

    Attributes:
        stored: Held from now on, or in another slot than before.
        removed: Held no longer.
    """

    stored: tuple[Stored, ...] = ()
    removed: tuple[BlockKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What a tenant may take: of the whole pool, as the operator says it, or the part of that which is this node's.

    Attributes:
        max_bytes: Of memory and disk together; None for any number.
        weight: Its share of memory against other tenants'.
    """

    max_bytes: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPart:
    """What a tenant has on one node.

    Attributes:
        tenant: Its name.
        size_bytes: Of memory and disk together.
        active: It has put or read there of late.
    """

    tenant: str
    size_bytes: int
    active: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """What a node says of itself when it renews its lease.

    Attributes:
        node: Its name and start.
        address: Where its `Pool` service answers other nodes.
        failure_domain: What fails together with it: a rack, a zone, a host.
        free_bytes: That a copy of hot blocks may take: free, or of blocks that were not read of late.
        capacity_bytes: Of its memory.
        sick: It takes no new blocks.
        parts: What tenants with a quota have there.
    """

    node: WorkerIdentity
    address: str
    failure_domain: str = ""
    free_bytes: int = 0
    capacity_bytes: int = 0
    sick: bool = False
    parts: tuple[TenantPart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """What a directory answers to a node that renews its lease.

    Attributes:
        anew: The node was not known, be it for the first time, because its lease had ended, or because the directory
            lost its memory: whatever the node holds has to be published again.
        flushes: The number of the latest flush; numbers grow from each flush to the next.
        selections: Those that the node has not carried out.
            A node that missed more than the directory remembers is told to drop all.
    """

    anew: bool
    flushes: int
    selections: tuple[Selection, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PutItem:
    """A slot to write one block to.

    Attributes:
        key: The block.
        slot: Its index in the slab.
        epoch: Of the slot.
    """

    key: BlockKey
    slot: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutGrant:
    """Leave to write, until the put is committed, abandoned or too old.

    Attributes:
        put_id: Names the put.
        items: Of the asked keys those that are neither held nor being written.
    """

    put_id: str
    items: tuple[PutItem, ...]


class PutRefusalReason(Enum):
    """Why a node does not take blocks."""

    FULL = "full"
    SICK = "sick"
    DRAINING = "draining"
    OVER_QUOTA = "over_quota"
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRefused:
    """A put that is not taken: an outcome, not a fault.

    Attributes:
        reason: Why.
        detail: For people.
    """

    reason: PutRefusalReason
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBlock:
    """A block in the slab that may be read while its lease holds.

    Attributes:
        key: The block.
        slot: Where it lies.
        epoch: Of that slot.
        checksums: One 64-bit number per layer, little-endian: the xxh3 of the layer's bytes.
    """

    key: BlockKey
    slot: int
    epoch: int
    checksums: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLease:
    """The leading blocks of a chain, kept where they are for a while.

    Attributes:
        lease_id: Names the lease; empty where nothing is held.
        blocks: In chain order.
        lease_s: For how long, from when it was granted, on the node's clock.
    """

    lease_id: str
    blocks: tuple[HeldBlock, ...] = ()
    lease_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerUsage:
    """What one tenant's blocks take, what they may, and how often it found what it asked for.

    Attributes:
        tenant: Its name.
        dram_bytes: In memory.
        ssd_bytes: On the disk.
        blocks: In whichever tiers.
        quota_bytes: Of memory and disk together, on all nodes; None for any number.
        weight: Its share of memory against other tenants'.
        hit_blocks: That it asked for and got.
        missed_blocks: And did not get.
        active_s: When it last put or read, by the node's clock.
    """

    tenant: str
    dram_bytes: int = 0
    ssd_bytes: int = 0
    blocks: int = 0
    quota_bytes: int | None = None
    weight: float = 1.0
    hit_blocks: int = 0
    missed_blocks: int = 0
    active_s: float = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUsage:
    """Counts of one node, for metrics and `baton pool top`; those of what happened only grow.

    Attributes:
        slots_total: Slots of the slab.
        slots_free: Of them without a block.
        ssd_blocks: Blocks on the disk.
        ssd_works: There is a disk, and writing to it did not keep failing.
        leases: Given and not over.
        puts: Reserved and not over.
        hit_blocks: Blocks that readers asked for and got.
        missed_blocks: And did not get.
        stored_blocks: Committed.
        evicted_blocks: Given up for others, out of the last tier.
        demoted_blocks: Moved from memory to disk.
        promoted_blocks: And back.
        zombie_puts: Puts whose writer never came back.
        corrupt_blocks: Dropped for a wrong checksum.
        fetched_blocks: Stored because another node sent them.
        sent_blocks: Sent to other nodes.
        failed_fetches: Times that blocks were asked of another node and did not come.
        copies: Blocks held now that another node sent.
        tenants: That have blocks here.
    """

    slots_total: int
    slots_free: int
    ssd_blocks: int = 0
    ssd_works: bool = False
    leases: int = 0
    puts: int = 0
    hit_blocks: int = 0
    missed_blocks: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    demoted_blocks: int = 0
    promoted_blocks: int = 0
    zombie_puts: int = 0
    corrupt_blocks: int = 0
    fetched_blocks: int = 0
    sent_blocks: int = 0
    failed_fetches: int = 0
    copies: int = 0
    tenants: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """What operators are told of one node (`baton pool top`).

    Attributes:
        state: As the directory is told.
        usage: Counts.
        slot_bytes: Of a slot; 0 before a worker came.
        directory_reachable: Whether the directory answered when it was last asked.
        owners: What each tenant takes.
        hottest: First blocks of the texts that were asked for most often, with how often.
    """

    state: NodeState
    usage: NodeUsage
    slot_bytes: int
    directory_reachable: bool
    owners: tuple[OwnerUsage, ...]
    hottest: tuple[tuple[BlockKey, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskBlock:
    """What an extent holds: all that is needed to find the block again after a restart.

    Attributes:
        extent: Index of the extent.
        epoch: Of this use of it; higher than that of any earlier use.
        key: The block.
        owner: Whose it is.
        size_bytes: Its bytes.
        position: How many blocks of its text are before it.
        checksums: One 64-bit number per layer, little-endian.
    """

    extent: int
    epoch: int
    key: BlockKey
    owner: Owner
    size_bytes: int
    position: int
    checksums: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Demote:
    """Copy a slot to an extent; the slot's bytes stay as they are until this is answered by `written` or `io_failed`.

    Attributes:
        move: Names the action.
        slot: From where.
        block: To where, and what the extent then holds.
    """

    move: int
    slot: int
    block: DiskBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    """Read an extent into a slot, verified; answered by `loaded` or `io_failed`. The extent stays as it is until then.

    Attributes:
        move: Names the action.
        slot: To where.
        block: From where, and what the extent holds.
    """

    move: int
    slot: int
    block: DiskBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushMark:
    """How far a node has carried out the flushes of a directory.

    Attributes:
        directory: 16 bytes; each directory has its own numbers.
        number: Of the latest flush that was carried out.
    """

    directory: bytes
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Erase:
    """An extent holds nothing any more, also after a restart, unless its next use has begun. Not answered; nothing is
    moved there when the ledger says it, and the next use has another epoch.

    Attributes:
        extent: Index of the extent.
        epoch: Of the use that is over.
        key: The block that it held.
    """

    extent: int
    epoch: int
    key: BlockKey


NodeAction = Demote | Promote | Erase
