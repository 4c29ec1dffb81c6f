"""`baton scale prefill=3 decode=5`: changes how many workers a cluster has that `baton serve` started.

Further ones are started, and those with the highest names drain and end. It answers once that has begun; `baton status`
shows how far it is. A worker counts in the pool that its name tells, whatever role it has taken since.
"""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence

from baton.errors import ConfigError
from baton.ids import Role
from baton.rpc.v1 import control_pb2 as pb
from baton_cluster.cli import router_control
from baton_cluster.cli.router_control import ANSWER_WAIT_S, ask, user_words

_POOLS = tuple(role.value for role in Role)
_MOST = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many workers, and of which cluster."""
    parser.add_argument(
        "counts",
        nargs="+",
        metavar="POOL=NUMBER",
        help=f"workers that there are to be; pools: {', '.join(_POOLS)}; others stay what they are",
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="for the launcher's log")
    router_control.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Tells the launcher through the router."""
    request = pb.ScaleRequest(pools=read_counts(arguments.counts), by=user_words(arguments.reason))
    router = router_control.router_address(arguments)
    reply = asyncio.run(ask(router, lambda stub: stub.Scale(request, timeout=ANSWER_WAIT_S)))
    before, now = (
        {pool: each.get(pool, 0) for pool in _POOLS} for each in (reply.before, reply.now)
    )
    if arguments.json:
        sys.stdout.write(json.dumps({"before": before, "now": now}) + "\n")
    else:
        sys.stdout.write(describe(before, now) + "\n")
    return 0


def read_counts(words: Sequence[str]) -> dict[str, int]:
    """The numbers that `prefill=3 decode=5` asks for.

    Raises:
        ConfigError: A word is none, names no pool, or names one that another names too.
    """
    counts: dict[str, int] = {}
    for word in words:
        pool, equals, number = word.partition("=")
        if not equals:
            raise ConfigError(f"{word}: say how many workers of which pool, such as decode=5")
        if pool not in _POOLS:
            raise ConfigError(f"{word}: there is no pool {pool}; the pools are {', '.join(_POOLS)}")
        if pool in counts:
            raise ConfigError(f"{word}: {pool} is given twice")
        if not re.fullmatch("[0-9]{1,7}", number) or int(number) > _MOST:
            raise ConfigError(
                f"{word}: the number of {pool} workers must be a whole number from 0 to {_MOST}"
            )
        counts[pool] = int(number)
    return counts


def describe(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """What changes, in one line."""
    told, started, ended = list[str](), 0, 0
    for pool in _POOLS:
        had, has = before.get(pool, 0), now.get(pool, 0)
        if had == has:
            told += [f"{has} {pool}"] * bool(has)
            continue
        told.append(f"{has} {pool} (was {had})")
        started, ended = started + max(0, has - had), ended + max(0, had - has)
    what = [f"{started} to start"] * bool(started) + [f"{ended} to drain and end"] * bool(ended)
    return f"{' + '.join(told)}: {', '.join(what) or 'nothing changes'}"
