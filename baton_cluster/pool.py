"""`baton pool top` and `baton pool flush`: what the pool's node of this host holds, and how to make it forget."""

import argparse
import asyncio
import sys
from collections.abc import Callable
from dataclasses import asdict

import msgspec
from rich.console import Console
from rich.live import Live

from baton.errors import ConfigError
from baton.rpc.v1.pool_pb2 import FlushPoolRequest
from baton_cluster import control_line
from baton_cluster.pool_usage import PoolUsage, address_in, ask, fetch
from baton_cluster.pool_view import render

_WATCH_INTERVAL_S = 1.0
_FLUSH_WAIT_S = 30.0
_HOTTEST = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One action each."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    top = _action(actions, "top", _top, "show hit rate, tiers, tenants and the hottest prefixes")
    top.add_argument("--watch", action="store_true", help="every second, until Ctrl-C")
    top.add_argument(
        "--hottest", type=int, default=_HOTTEST, metavar="N", help="prefixes; default: %(default)s"
    )
    flush = _action(actions, "flush", _flush, "forget blocks, in all tiers, while serving goes on")
    flush.add_argument("--tenant", default="", metavar="NAME", help="only this tenant's")
    flush.add_argument("--scope", default="", metavar="SCOPE", help="only of this cache scope")
    flush.add_argument("--model", default="", metavar="FINGERPRINT", help="only of this model")
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
    control_line.add_arguments(parser)
    return parser


def _top(arguments: argparse.Namespace) -> None:
    hottest: int = arguments.hottest
    if hottest < 0:
        raise ConfigError(f"--hottest: must be at least 0, not {hottest}")
    address = address_in(control_line.cluster_dir(arguments))
    if arguments.json:
        asyncio.run(_write(address, hottest, again=arguments.watch))
    elif arguments.watch:
        asyncio.run(_watch(address, hottest))
    else:
        Console().print(render(asyncio.run(fetch(address, hottest=hottest))))


async def _watch(address: str, hottest: int) -> None:
    usage = await fetch(address, hottest=hottest)
    with Live(render(usage), console=Console(), auto_refresh=False, screen=False) as live:
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


def _flush(arguments: argparse.Namespace) -> None:
    selection = {
        "tenant": arguments.tenant,
        "cache_scope": arguments.scope,
        "model_fingerprint": arguments.model,
    }
    if arguments.all == any(selection.values()):
        raise ConfigError("say what to flush: --tenant, --scope or --model, or else --all")
    address = address_in(control_line.cluster_dir(arguments))
    asked = FlushPoolRequest(**selection)
    reply = asyncio.run(ask(address, lambda pool: pool.Flush(asked, timeout=_FLUSH_WAIT_S)))
    if arguments.json:
        sys.stdout.write(msgspec.json.encode({"blocks": reply.blocks}).decode() + "\n")
    else:
        blocks = "1 block" if reply.blocks == 1 else f"{reply.blocks:,} blocks"
        print(f"flushed {blocks} here; other nodes follow within seconds")  # noqa: T201  # the command line speaks
