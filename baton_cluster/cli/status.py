"""`baton status`: the workers of a running cluster, as its router sees them, over the router's own Unix socket; and the
pool of this host, as its node sees itself.
"""

import argparse
import asyncio
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.errors import UnavailableError
from baton.generation import WorkerLoad
from baton.rpc.hello import role_from_proto
from baton.rpc.reports import load_from_proto
from baton.rpc.v1.control_pb2 import StatusReply, StatusRequest
from baton.rpc.v1.control_pb2 import WorkerStatus as WorkerStatusMessage
from baton_cluster.cli import pool_usage, router_control
from baton_cluster.cli.pool import headline
from baton_cluster.cli.pool_usage import PoolUsage
from baton_cluster.cli.router_control import ANSWER_WAIT_S, ask
from baton_cluster.launch.runtime_dir import ROUTER_SOCKET, pool_address


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
    drained_by: str = ""
    reason: str = ""
    sighted_by: str = ""
    registered_as: str = ""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """This host's pool: what its node answered, or why it did not. Requests are then served without."""

    address: str
    usage: PoolUsage | None
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """What a router answered, and the pool's node if the cluster has one."""

    model: str
    version: str
    requests_in_flight: int
    workers: tuple[WorkerStatus, ...]
    discovery_faults: tuple[str, ...] = ()
    pool: PoolStatus | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which cluster, and in what form."""
    router_control.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Shows one cluster."""
    status = asyncio.run(_fetch_all(router_control.cluster_dir(arguments)))
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(asdict(status)).decode() + "\n")
        return 0
    console = Console()
    console.print(render(status))
    for worker in status.workers:
        if worker.drained_by:
            console.print(
                Text(f"{worker.worker_id} is drained by {worker.drained_by}", style="yellow")
            )
    for line in strangers(status):
        console.print(Text(line, style="yellow"))
    if status.pool is not None:
        console.print(render_pool(status.pool))
    return 0


async def fetch(address: str) -> StatusReport:
    """Asks the router at `address`.

    Raises:
        UnavailableError: It does not answer.
    """
    asked = StatusRequest()
    reply = await ask(address, lambda router: router.Status(asked, timeout=ANSWER_WAIT_S))
    return _from_proto(reply)


async def fetch_pool(address: str) -> PoolStatus:
    """Asks the pool's node at `address`; that it does not answer is an answer too."""
    try:
        usage = await pool_usage.fetch(address)
    except UnavailableError as error:
        return PoolStatus(address=address, usage=None, problem=error.message)
    return PoolStatus(address=address, usage=usage, problem="")


async def _fetch_all(cluster: Path) -> StatusReport:
    status = await fetch(f"unix:{cluster / ROUTER_SOCKET}")
    address = pool_address(cluster)
    return replace(status, pool=await fetch_pool(address)) if address else status


def render_pool(pool: PoolStatus) -> Text:
    """A line for people."""
    if pool.usage is not None:
        return Text(f"pool: {headline(pool.usage)}")
    return Text(f"pool: away, requests are served without it ({pool.problem})", style="yellow")


def render(status: StatusReport) -> Table:
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


def strangers(status: StatusReport) -> list[str]:
    """A line per address at which no worker is used, with why,
    and one for each question that discovery got no answer to.
    """
    lines = []
    for worker in status.workers:
        if worker.worker_id:
            continue
        sighted = f", sighted by {worker.sighted_by}" if worker.sighted_by else ""
        said = f" as {worker.registered_as}" if worker.registered_as else ""
        why = f": {worker.reason}" if worker.reason else ""
        lines.append(f"{worker.address}{sighted}{said} is {worker.state}{why}")
    return [*lines, *(f"discovery: {fault}" for fault in status.discovery_faults)]


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


def _from_proto(reply: StatusReply) -> StatusReport:
    return StatusReport(
        model=reply.model,
        version=reply.version,
        requests_in_flight=reply.requests_in_flight,
        workers=tuple(_worker(message) for message in reply.workers),
        discovery_faults=tuple(reply.discovery_faults),
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
        drained_by=message.drained_by,
        reason=message.reason,
        sighted_by=message.sighted_by,
        registered_as=message.registered_as,
        labels=dict(message.labels),
    )
