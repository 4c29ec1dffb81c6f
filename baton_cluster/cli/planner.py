"""`baton planner hold|resume`: has the planner of a running cluster's router change no roles and no numbers of workers,
until it is told to go on.

With several routers the one that plans is to be asked; another one says so.
`baton explain --planner` tells what it found and did.
"""

import argparse
import asyncio
import sys

from baton.rpc.v1 import control_pb2 as pb
from baton_cluster.cli import router_control
from baton_cluster.cli.router_control import ANSWER_WAIT_S, ask, user_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the planner of which cluster is to do."""
    parser.add_argument("what", choices=("hold", "resume"), help="change no roles, or go on")
    parser.add_argument("--reason", default="", metavar="TEXT", help="for the planner's story")
    router_control.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Tells the router."""
    held = arguments.what == "hold"
    request = pb.HoldPlannerRequest(held=held, by=user_words(arguments.reason))
    router = router_control.router_address(arguments)
    asyncio.run(ask(router, lambda stub: stub.HoldPlanner(request, timeout=ANSWER_WAIT_S)))
    shown = "roles stay what they are" if held else "roles follow the load again"
    sys.stdout.write(("{}" if arguments.json else shown) + "\n")
    return 0
