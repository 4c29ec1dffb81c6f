"""`baton drain NAME`: a worker of a running cluster takes nothing new; what it has ends first.
`baton undrain` takes it back.

The last worker that decodes, or that prefills for others, is drained with `--force` only.
"""

import argparse
import asyncio
import sys

from baton.errors import UnavailableError
from baton.rpc.v1 import control_pb2 as pb
from baton_cluster.cli import router_control
from baton_cluster.cli.router_control import (
    ANSWER_WAIT_S,
    ask,
    given_name,
    given_timeout_s,
    user_words,
)

_TIMEOUT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which worker of which cluster, and why."""
    parser.add_argument(
        "name", type=given_name, metavar="NAME", help="of a worker, as `baton status` shows it"
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="shown by `baton status`")
    parser.add_argument("--force", action="store_true", help="also the last worker of its kind")
    parser.add_argument(
        "--timeout",
        type=given_timeout_s,
        default=_TIMEOUT_S,
        metavar="SECONDS",
        help="how long what it has may take to end (%(default)s); it stays drained after that",
    )
    router_control.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Drains one worker through the router."""
    request = pb.DrainRequest(
        worker=arguments.name,
        by=user_words(arguments.reason),
        force=arguments.force,
        timeout_s=arguments.timeout,
    )
    wait_s = arguments.timeout + 2 * ANSWER_WAIT_S
    router = router_control.router_address(arguments)
    reply = asyncio.run(ask(router, lambda stub: stub.Drain(request, timeout=wait_s)))
    if arguments.json:
        drained = "true" if reply.drained else "false"
        sys.stdout.write(f'{{"drained": {drained}, "left": {reply.left}}}\n')
    elif reply.drained:
        sys.stdout.write(f"{arguments.name} is empty and takes nothing new\n")
    if not reply.drained:
        raise UnavailableError(
            f"{arguments.name} takes nothing new, but {reply.left} legs did not end in time"
        )
    return 0
