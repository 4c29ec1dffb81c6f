"""`baton pool top`, `story` and `flush`: what the pool's node of this host holds, what happened to a block,
how to make it forget.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable
from dataclasses import asdict

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from baton.config.sizes import format_size
from baton.errors import ConfigError, InvalidRequestError
from baton.hashing import parse_block_key
from baton.rpc.v1.pool_pb2 import BlockStoryRequest, FlushPoolRequest
from baton_cluster.cli import router_control
from baton_cluster.cli.pool_usage import (
    HotPrefix,
    PoolUsage,
    TenantPoolUsage,
    address_in,
    ask,
    fetch,
)
from baton_cluster.cli.router_control import ANSWER_WAIT_S, given_name
from baton_cluster.cli.story import story_text
from baton_cluster.launch.runtime_dir import pool_address

_WATCH_INTERVAL_S = 1.0
_FLUSH_WAIT_S = 30.0
_HOTTEST = 10
_MAX_HOTTEST = 1000  # as a node tells at most


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One action each."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    top = _action(actions, "top", _top, "show hit rate, tiers, tenants and the hottest prefixes")
    top.add_argument("--watch", action="store_true", help="every second, until Ctrl-C")
    top.add_argument(
        "--hottest", type=int, default=_HOTTEST, metavar="N", help="prefixes; default: %(default)s"
    )
    story = _action(actions, "story", _story, "show what happened to one block of this node")
    story.add_argument(
        "key", metavar="KEY", help="32 hexadecimal digits, as `baton pool top` shows"
    )
    flush = _action(actions, "flush", _flush, "forget blocks, in all tiers, while serving goes on")
    flush.add_argument("--tenant", type=given_name, metavar="NAME", help="only this tenant's")
    flush.add_argument("--scope", type=given_name, metavar="SCOPE", help="only of this cache scope")
    flush.add_argument("--model", type=given_name, metavar="FINGERPRINT", help="only of this model")
    flush.add_argument("--all", action="store_true", help="everything; must be said")


def run(arguments: argparse.Namespace) -> int:
    """Does what was asked."""
    action: Callable[[argparse.Namespace], None] = arguments.action
    action(arguments)
    return 0


def _action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    work: Callable[[argparse.Namespace], None],
    summary: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=summary, allow_abbrev=False
    )
    parser.set_defaults(action=work)
    router_control.add_arguments(parser)
    return parser


def node_address(arguments: argparse.Namespace) -> str:
    """The node of the cluster that `arguments` mean; raises as `cluster_dir` does."""
    return address_in(router_control.cluster_dir(arguments, lambda path: bool(pool_address(path))))


def _top(arguments: argparse.Namespace) -> None:
    hottest: int = arguments.hottest
    if not 0 <= hottest <= _MAX_HOTTEST:
        raise ConfigError(f"--hottest: must be from 0 to {_MAX_HOTTEST}, not {hottest}")
    address = node_address(arguments)
    if arguments.json:
        asyncio.run(_write(address, hottest, again=arguments.watch))
    elif arguments.watch:
        asyncio.run(_watch(address, hottest))
    else:
        Console().print(render(asyncio.run(fetch(address, hottest=hottest))))


async def _watch(address: str, hottest: int) -> None:
    console, shown = Console(), render(await fetch(address, hottest=hottest))
    if not console.is_terminal:  # there Live shows nothing before its end
        while True:
            console.print(shown)
            await asyncio.sleep(_WATCH_INTERVAL_S)
            shown = render(await fetch(address, hottest=hottest))
    with Live(shown, console=console, auto_refresh=False, screen=False) as live:
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            live.update(render(await fetch(address, hottest=hottest)), refresh=True)


async def _write(address: str, hottest: int, *, again: bool) -> None:
    _write_json(await fetch(address, hottest=hottest))
    while again:
        await asyncio.sleep(_WATCH_INTERVAL_S)
        _write_json(await fetch(address, hottest=hottest))


def _write_json(usage: PoolUsage) -> None:
    sys.stdout.write(msgspec.json.encode(asdict(usage)).decode() + "\n")
    sys.stdout.flush()


def _story(arguments: argparse.Namespace) -> None:
    key: str = arguments.key
    try:
        asked = BlockStoryRequest(key=parse_block_key(key))
    except ValueError as error:
        raise ConfigError(f"KEY: {error}") from error
    address = node_address(arguments)
    told = asyncio.run(ask(address, lambda pool: pool.Story(asked, timeout=ANSWER_WAIT_S)))
    if not told.entries:
        raise InvalidRequestError(
            f"the pool's node here does not know block {key}, or not any more"
        )
    sys.stdout.write(story_text(told, key, as_json=arguments.json))


def _flush(arguments: argparse.Namespace) -> None:
    selection = {
        "tenant": arguments.tenant,
        "cache_scope": arguments.scope,
        "model_fingerprint": arguments.model,
    }
    if arguments.all == any(selection.values()):
        raise ConfigError("say what to flush: --tenant, --scope or --model, or else --all")
    address = node_address(arguments)
    asked = FlushPoolRequest(**selection)
    reply = asyncio.run(ask(address, lambda pool: pool.Flush(asked, timeout=_FLUSH_WAIT_S)))
    if arguments.json:
        sys.stdout.write(msgspec.json.encode({"blocks": reply.blocks}).decode() + "\n")
    else:
        blocks = "1 block" if reply.blocks == 1 else f"{reply.blocks:,} blocks"
        print(f"flushed {blocks} here; other nodes follow within seconds")  # noqa: T201  # the command line speaks


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


def _tenants(tenants: tuple[TenantPoolUsage, ...]) -> Table:
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
