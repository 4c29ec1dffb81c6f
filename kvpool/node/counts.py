"""What has happened on a node since it started. These numbers only grow."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Counts:
    """See `NodeUsage`, which says the same to others."""

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
