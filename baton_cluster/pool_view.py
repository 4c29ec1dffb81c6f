"""A pool's node as a person reads it in a terminal."""

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from baton.config.sizes import format_size
from baton_cluster.pool_usage import HotPrefix, PoolUsage, TenantUsage


def render(usage: PoolUsage) -> Group:
    """Everything that the node tells: tiers, counts, tenants, hottest prefixes."""
    parts: list[RenderableType] = [Text(headline(usage), style="bold"), "", _tiers(usage)]
    parts += ["", _counts(usage)]
    if usage.tenants:
        parts += ["", _tenants(usage.tenants)]
    if usage.hottest:
        parts += ["", _hottest(usage.hottest)]
    return Group(*parts)


def headline(usage: PoolUsage) -> str:
    """`pool-0 · ready · hits 36% · 1.2 GiB of 4.0 GiB · 3 leases`."""
    memory = f"{format_size(usage.dram_bytes)} of {format_size(usage.dram_capacity_bytes)}"
    if not usage.dram_capacity_bytes:
        memory = "no worker has attached yet"
    facts = (usage.node, health(usage), f"hits {_percent(usage.hit_rate)}", memory)
    return " · ".join((*facts, f"{usage.leases} leases"))


def health(usage: PoolUsage) -> str:
    """`ready`, or what is wrong."""
    if usage.sick:
        return "sick: it takes nothing new"
    return "ready" if usage.directory_reachable else "its directory is out of reach"


def _tiers(usage: PoolUsage) -> Table:
    table = _table(("tier",), ("used", "of", "full"))
    used, capacity = usage.dram_bytes, usage.dram_capacity_bytes
    full = f"{used / capacity:.0%}" if capacity else "–"
    table.add_row("memory", format_size(used), format_size(capacity), full)
    table.add_row("disk", format_size(usage.ssd_bytes), "–", "–")
    return table


def _counts(usage: PoolUsage) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(4):
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
    table.add_row(
        *("hits", f"{usage.hit_blocks:,}", "stored", f"{usage.stored_blocks:,}"),
        *("to disk", f"{usage.demoted_blocks:,}", "corrupt", f"{usage.corrupt_blocks:,}"),
    )
    table.add_row(
        *("misses", f"{usage.missed_blocks:,}", "evicted", f"{usage.evicted_blocks:,}"),
        *("from disk", f"{usage.promoted_blocks:,}", "given up", f"{usage.zombie_puts:,}"),
    )
    table.add_row(
        *("fetched", f"{usage.fetched_blocks:,}", "sent", f"{usage.sent_blocks:,}"),
        *("copies", f"{usage.copies:,}", "not come", f"{usage.failed_fetches:,}"),
    )
    return table


def _tenants(tenants: tuple[TenantUsage, ...]) -> Table:
    table = _table(("tenant",), ("blocks", "memory", "disk", "quota", "weight", "hits"))
    for one in tenants:
        quota = "–" if one.quota_bytes is None else format_size(one.quota_bytes)
        sizes = (format_size(one.dram_bytes), format_size(one.ssd_bytes), quota)
        name = escape(one.tenant) or "–"
        table.add_row(name, f"{one.blocks:,}", *sizes, f"{one.weight:g}", _percent(one.hit_rate))
    return table


def _hottest(prefixes: tuple[HotPrefix, ...]) -> Table:
    table = _table(("hottest prefix",), ("hits",))
    for prefix in prefixes:
        table.add_row(prefix.key, f"{prefix.hits:,}")
    return table


def _table(words: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for word in words:
        table.add_column(word, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.0%}"
