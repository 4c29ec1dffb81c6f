"""`baton status`: the workers of a running cluster, as its router sees them, over the router's own Unix socket."""

import argparse
import asyncio
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import msgspec
from rich.console import Console
from rich.table import Table

from baton.errors import ConfigError, UnavailableError
from baton.generation import WorkerLoad
from baton.rpc.channel import open_channel
from baton.rpc.convert import load_from_proto, role_from_proto
from baton.rpc.v1.control_pb2 import StatusReply, StatusRequest
from baton.rpc.v1.control_pb2 import WorkerStatus as WorkerStatusMessage
from baton.rpc.v1.control_pb2_grpc import ControlStub
from cluster.runtime_dir import ROUTER_SOCKET, default_dir, is_alive, running_clusters

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker; the fields are those of the protobuf message, with names where it has numbers."""

    worker_id: str
    incarnation: str
    role: str
    state: str
    ready: bool
    address: str
    load: WorkerLoad
    prefix_hit_rate: float | None
    transfers_in_flight: int
    router_in_flight: int
    seconds_since_progress: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """What a router answered."""

    model: str
    version: str
    requests_in_flight: int
    workers: tuple[WorkerStatus, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which cluster, and in what form."""
    parser.add_argument("--json", action="store_true", help="for machines")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--port", type=int, help="HTTP port of a cluster on this machine")
    which.add_argument(
        "--runtime-dir", type=Path, metavar="DIRECTORY", help="where its sockets are"
    )


def run(arguments: argparse.Namespace) -> int:
    """Shows one cluster."""
    runtime_dir = find_cluster(arguments.port, arguments.runtime_dir)
    status = asyncio.run(fetch(f"unix:{runtime_dir / ROUTER_SOCKET}"))
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(asdict(status)).decode() + "\n")
    else:
        Console().print(render(status))
    return 0


async def fetch(address: str) -> ClusterStatus:
    """Asks the router at `address`.

    Raises:
        UnavailableError: It does not answer.
    """
    async with open_channel(address) as channel:
        try:
            reply = await ControlStub(channel).Status(StatusRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"the router does not answer: {error.details()}") from error
    return _from_proto(reply)


def render(status: ClusterStatus) -> Table:
    """A table for people."""
    title = f"{status.model} · {status.requests_in_flight} requests in flight · {status.version}"
    table = Table(box=None, padding=(0, 1, 0, 0), title=title)
    table.title_justify, table.title_style = "left", "bold"
    for name in ("worker", "role", "incarnation", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("run", "wait", "free", "used", "cached", "hits", "legs"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in status.workers:
        table.add_row(*_cells(worker))
    table.caption = (
        "run, wait: sequences · free, used, cached: KV pages\n"
        "hits: prompt tokens found in the prefix cache · legs: this router's, in flight"
    )
    table.caption_justify = "left"
    return table


def _cells(worker: WorkerStatus) -> list[str]:
    load, rate = worker.load, worker.prefix_hit_rate
    counts = (
        load.running,
        load.waiting,
        load.blocks_free,
        load.blocks_used,
        load.blocks_cached,
        "–" if rate is None else f"{rate:.0%}",
        worker.router_in_flight,
    )
    color = "green" if worker.state == "ready" else "yellow"
    state = f"[{color}]{worker.state}[/]"
    return [worker.worker_id, worker.role, worker.incarnation, state, *map(str, counts)]


def find_cluster(port: int | None, runtime_dir: Path | None) -> Path:
    """The runtime directory of the cluster that is meant: the named one, or the only one that runs here.

    Raises:
        UnavailableError: It does not run, or none does.
        ConfigError: Several do, and none is named.
    """
    if runtime_dir is not None or port is not None:
        path = runtime_dir if runtime_dir is not None else default_dir(port or 0)
        if not is_alive(path):
            raise UnavailableError(f"no cluster is running at {path}")
        return path
    running = running_clusters()
    if not running:
        raise UnavailableError("no cluster of this user is running here (baton serve starts one)")
    if len(running) > 1:
        ports = ", ".join(path.name for path in running)
        raise ConfigError(f"several clusters are running, on ports {ports}: name one with --port")
    return running[0]


def _from_proto(reply: StatusReply) -> ClusterStatus:
    return ClusterStatus(
        model=reply.model,
        version=reply.version,
        requests_in_flight=reply.requests_in_flight,
        workers=tuple(_worker(message) for message in reply.workers),
    )


def _worker(message: WorkerStatusMessage) -> WorkerStatus:
    load = load_from_proto(message.load)
    asked = load.prefix_query_tokens
    return WorkerStatus(
        worker_id=message.identity.worker_id,
        # As in the logs; and a JSON number of 48 bits is safe, one of 64 would not be.
        incarnation=f"{message.identity.incarnation:x}",
        role=role_from_proto(message.role).value if message.role else "",
        state=message.state,
        ready=message.ready,
        address=message.address,
        load=load,
        prefix_hit_rate=load.prefix_hit_tokens / asked if asked else None,
        transfers_in_flight=message.transfers_in_flight,
        router_in_flight=message.router_in_flight,
        seconds_since_progress=message.seconds_since_progress,
    )
