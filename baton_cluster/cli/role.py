"""`baton role NAME prefill|decode|hybrid`: changes what a worker of a running cluster takes, without a restart.

The worker finishes what its new role does not take; routers send that elsewhere meanwhile. Its pages and its prefix
cache stay. The last worker that decodes, or that prefills for others, gives that up with `--force` only.
"""

import argparse
import asyncio
import sys

from baton.errors import UnavailableError
from baton.ids import Role
from baton.rpc.hello import role_from_proto, role_to_proto
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
    """Which worker of which cluster, and its role."""
    parser.add_argument(
        "name", type=given_name, metavar="NAME", help="of a worker, as `baton status` shows it"
    )
    parser.add_argument("role", choices=[role.value for role in Role], help="what it is to take")
    parser.add_argument("--reason", default="", metavar="TEXT", help="for the worker's story")
    parser.add_argument("--force", action="store_true", help="also the last worker of its kind")
    parser.add_argument(
        "--timeout",
        type=given_timeout_s,
        default=_TIMEOUT_S,
        metavar="SECONDS",
        help="how long what it gives up may take to end (%(default)s); else it stays what it is",
    )
    router_control.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Changes the role of one worker through the router."""
    request = pb.SetRoleRequest(
        worker=arguments.name,
        role=role_to_proto(Role(arguments.role)),
        by=user_words(arguments.reason),
        force=arguments.force,
        timeout_s=arguments.timeout,
    )
    wait_s = arguments.timeout + 2 * ANSWER_WAIT_S
    router = router_control.router_address(arguments)
    reply = asyncio.run(ask(router, lambda stub: stub.SetRole(request, timeout=wait_s)))
    role = role_from_proto(reply.role).value
    if arguments.json:
        sys.stdout.write(f'{{"role": "{role}", "left": {reply.left}}}\n')
    elif reply.changed:
        sys.stdout.write(f"{arguments.name} is a {role} worker now\n")
    if not reply.changed:
        raise UnavailableError(
            f"{arguments.name} is still a {role} worker: {reply.left} legs did not end in time"
        )
    return 0
