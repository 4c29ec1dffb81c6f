"""`baton role NAME prefill|decode|hybrid`: changes what a worker of a running cluster takes, without a restart.

The worker finishes what its new role does not take; routers send that elsewhere meanwhile. Its pages and its prefix cache stay.
"""

import argparse
import asyncio
import sys

import grpc

from baton.errors import InvalidRequestError, UnavailableError
from baton.ids import Role
from baton.rpc.channel import open_channel, stranger
from baton.rpc.hello import role_from_proto, role_to_proto
from baton.rpc.v1 import control_pb2 as pb
from baton.rpc.v1.control_pb2_grpc import ControlStub
from baton_cluster.cli import router_control
from baton_cluster.cli.router_control import ANSWER_WAIT_S, ask, operator_credentials

_TIMEOUT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which worker of which cluster, and its role."""
    parser.add_argument("name", metavar="NAME", help="of a worker, as `baton status` shows it")
    parser.add_argument("role", choices=[role.value for role in Role], help="what it is to take")
    parser.add_argument(
        "--timeout",
        type=float,
        default=_TIMEOUT_S,
        metavar="SECONDS",
        help="how long what it gives up may take to end (%(default)s); else it stays what it is",
    )
    router_control.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Changes the role of one worker."""
    router = router_control.router_address(arguments)
    reply = asyncio.run(
        change(router, arguments.name, Role(arguments.role), timeout_s=arguments.timeout)
    )
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


async def change(router: str, name: str, role: Role, *, timeout_s: float) -> pb.SetRoleReply:
    """Asks the router where the worker is, and the worker to change.

    Raises:
        InvalidRequestError: There is no such worker, or it cannot have the role.
        UnavailableError: Router or worker does not answer, or the worker is leaving.
    """
    status = await ask(router, lambda stub: stub.Status(pb.StatusRequest(), timeout=ANSWER_WAIT_S))
    addresses = {worker.identity.worker_id: worker.address for worker in status.workers}
    address = addresses.get(name)
    if not address:
        known = ", ".join(sorted(filter(None, addresses)))
        raise InvalidRequestError(f"there is no worker {name} here; there are {known}")
    request = pb.SetRoleRequest(role=role_to_proto(role), timeout_s=timeout_s)
    own = operator_credentials()
    async with open_channel(address, own) as channel:
        try:
            return await ControlStub(channel).SetRole(request, timeout=timeout_s + ANSWER_WAIT_S)
        except grpc.aio.AioRpcError as error:
            raise stranger(error, address, own) or UnavailableError(
                f"{name} did not change: {error.details()}"
            ) from error
