"""The eviction policies by the names they have in the configuration (`pool.eviction`, `pool.ssd_eviction`)."""

from collections.abc import Callable

from kvpool.eviction.cost import CostAware
from kvpool.eviction.lru import LeastRecentlyUsed
from kvpool.eviction.policy import EvictionPolicy
from kvpool.eviction.s3fifo import S3Fifo

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "s3fifo": S3Fifo,
    "cost": CostAware,
}
