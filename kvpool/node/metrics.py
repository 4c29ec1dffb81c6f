"""A pool node's metrics for Prometheus: tiers, hits, evictions, leases, health. Not by tenant:
`baton pool top` shows that.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvpool.messages import NodeUsage

_COUNTERS: dict[str, tuple[str, Callable[[NodeUsage], float]]] = {
    "baton_pool_hit_blocks": ("Blocks that were asked for and leased", lambda u: u.hit_blocks),
    "baton_pool_missed_blocks": (
        "Blocks that were asked for and not here",
        lambda u: u.missed_blocks,
    ),
    "baton_pool_stored_blocks": ("Blocks put and committed", lambda u: u.stored_blocks),
    "baton_pool_evicted_blocks": (
        "Blocks given up for others, out of the last tier",
        lambda u: u.evicted_blocks,
    ),
    "baton_pool_demoted_blocks": ("Blocks moved to the disk", lambda u: u.demoted_blocks),
    "baton_pool_promoted_blocks": ("Blocks read back from it", lambda u: u.promoted_blocks),
    "baton_pool_zombie_puts": ("Puts whose writer never came back", lambda u: u.zombie_puts),
    "baton_pool_corrupt_blocks": (
        "Blocks dropped for a wrong checksum",
        lambda u: u.corrupt_blocks,
    ),
    "baton_pool_fetched_blocks": ("Blocks that other nodes sent", lambda u: u.fetched_blocks),
    "baton_pool_sent_blocks": ("Blocks sent to other nodes", lambda u: u.sent_blocks),
    "baton_pool_failed_fetches": (
        "Times that blocks were asked of another node and did not come",
        lambda u: u.failed_fetches,
    ),
}
"""Told as totals since the start."""


class NodeMetrics:
    """One node's figures; names, descriptions and where the numbers stand are in the table above.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._counters = [
            (Counter(name, text, registry=registry), read)
            for name, (text, read) in _COUNTERS.items()
        ]
        self._bytes = Gauge(
            "baton_pool_bytes", "KV bytes held, by tier", ["tier"], registry=registry
        )
        self._capacity = Gauge(
            "baton_pool_capacity_bytes", "Size of the slab in memory", registry=registry
        )
        self._copies = Gauge(
            "baton_pool_copies", "Blocks in memory that another node sent", registry=registry
        )
        self._leases = Gauge("baton_pool_leases", "Leases that are open", registry=registry)
        self._puts = Gauge("baton_pool_puts", "Puts that are not over", registry=registry)
        self._tenants = Gauge("baton_pool_tenants", "Tenants with blocks here", registry=registry)
        self._routers = Gauge("baton_pool_watchers", "Routers that watch", registry=registry)
        self._tier_state = Gauge(
            "baton_pool_tier_state",
            "1 while blocks are taken in a tier, 0 while it is sick or absent",
            ["tier"],
            registry=registry,
        )
        self._degraded = Gauge(
            "baton_directory_degraded", "1 while the directory does not answer", registry=registry
        )
        self._connections_refused = Counter(
            "baton_kv_connections_refused",
            "Connections to the slab closed before the peer had proven the cluster's secret",
            ["reason"],
            registry=registry,
        )
        self._observed = NodeUsage(slots_total=0, slots_free=0)

    def connection_refused(self, reason: str) -> None:
        """A connection to the slab was closed before its peer had proven itself; reasons are a closed set.
        From any thread.
        """
        self._connections_refused.labels(reason).inc()

    def observe(
        self, usage: NodeUsage, *, slot_bytes: int, sick: bool, degraded: bool, routers: int
    ) -> None:
        """Takes over how the node is used now.

        Args:
            usage: Its counts.
            slot_bytes: Of a block; 0 before a worker came.
            sick: It takes nothing new.
            degraded: Its directory does not answer.
            routers: So many watch it.
        """
        before, self._observed = self._observed, usage
        for counter, read in self._counters:
            counter.inc(read(usage) - read(before))
        self._bytes.labels("dram").set((usage.slots_total - usage.slots_free) * slot_bytes)
        self._bytes.labels("ssd").set(usage.ssd_blocks * slot_bytes)
        self._capacity.set(usage.slots_total * slot_bytes)
        self._copies.set(usage.copies)
        self._leases.set(usage.leases)
        self._puts.set(usage.puts)
        self._tenants.set(usage.tenants)
        self._routers.set(routers)
        self._tier_state.labels("dram").set(usage.slots_total > 0 and not sick)
        self._tier_state.labels("ssd").set(usage.ssd_works)
        self._degraded.set(degraded)
