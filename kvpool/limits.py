"""What bounds a pool node's ledger."""

from dataclasses import dataclass, field

from kvpool.accounts import Allowance


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """Sizes and durations; see `PoolConfig`.

    Attributes:
        num_slots: Places in memory.
        slot_bytes: Of each; larger blocks are not taken.
        num_extents: Places on the disk, each as large as a slot; 0 without a disk.
        eviction: Name of the policy of the memory (`kvpool.eviction.select`).
        ssd_eviction: And of the disk.
        high_watermark: Share of the slots above which blocks are moved to the disk before anybody asks for room.
        low_watermark: Share at which that stops.
        put_timeout_s: What a writer may take.
        idle_s: A tenant that has neither put nor read for this long has no share that others must leave it.
        usual: What a tenant may take of whom nothing else is said.
    """

    num_slots: int
    slot_bytes: int
    num_extents: int = 0
    eviction: str = "cost"
    ssd_eviction: str = "cost"
    high_watermark: float = 0.95
    low_watermark: float = 0.9
    put_timeout_s: float = 10.0
    idle_s: float = 600.0
    usual: Allowance = field(default_factory=Allowance)
