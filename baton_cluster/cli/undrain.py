"""`baton undrain NAME`: a drained worker of a running cluster takes new work again."""

import argparse
import asyncio
import sys

from baton.rpc.v1 import control_pb2 as pb
from baton_cluster.cli import router_control
from baton_cluster.cli.router_control import ANSWER_WAIT_S, ask, given_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which worker of which cluster."""
    parser.add_argument(
        "name", type=given_name, metavar="NAME", help="of a worker, as `baton status` shows it"
    )
    router_control.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Tells the worker through the router."""
    request = pb.UndrainRequest(worker=arguments.name)
    router = router_control.router_address(arguments)
    asyncio.run(ask(router, lambda stub: stub.Undrain(request, timeout=2 * ANSWER_WAIT_S)))
    shown = "{}" if arguments.json else f"{arguments.name} takes new work again"
    sys.stdout.write(shown + "\n")
    return 0
