"""A child process of the cluster: `python -m baton_cluster.roles ROLE --name NAME --lifeline FD`,
started by the launcher.

Here roles become processes, and nowhere else: each role's packages are imported inside its own process only, so that
the router never pays for torch. What all children share is in `baton_cluster.launch.child`.
"""

import argparse
import asyncio
import importlib
import socket
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from baton.clock import MonotonicClock
from baton.config.schema import BatonConfig, WorkerConfig
from baton.discovery.registrar import registered
from baton.discovery.registry import Registration
from baton.garbage import freeze_loaded_objects, importing
from baton.ids import BlockId, Role, WorkerId, WorkerIdentity
from baton.layout import SPARE_BLOCKS
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.hello import WorkerHello
from baton.rpc.identity import PeerRole
from baton.telemetry.otel import open_tracer
from baton.telemetry.tracing import Tracer
from baton.version import version
from baton_cluster.call_in_thread import call_in_thread
from baton_cluster.join_pool import WorkerPool, join_pool
from baton_cluster.launch.child import Child, RoleMain, run, run_standby
from baton_cluster.launch.plan import POOL, ROUTER, SIMULATED
from baton_cluster.launch.runtime_dir import kv_socket
from baton_cluster.launch.standby import STANDBY
from baton_cluster.launch.worker_counts import LauncherCounts
from baton_worker.metrics import GrammarMetrics, SpeculationMetrics, WorkerMetrics
from baton_worker.server import WorkerServer
from kv_transfer.backends.ranked import (
    joined_receivers,
    joined_senders,
    rank_layouts,
    ranked_hashing,
)
from kv_transfer.backends.registry import needed, open_receivers, open_senders
from kv_transfer.memory.arena import WorkerMemory
from kv_transfer.memory.listening import Listening
from kv_transfer.memory.page_hash import Hashing, ways_to_hash
from kv_transfer.memory.region_server import RegionAccess
from kv_transfer.session.handshake import SessionEndpoint
from kv_transfer.ticket import TicketOffice

if TYPE_CHECKING:
    from baton_engine.build import BuiltEngine
    from baton_engine.cache.arena import PageKernels
    from baton_engine.ports import EnginePort, GrammarCounts, SpeculationCounts
    from baton_engine.simulated import SimulatedEngine
    from baton_vllm.build import BuiltVllm
    from baton_worker.service import WorkerService
    from prefill_worker.sink import TransferSink


async def run_router(child: Child) -> None:
    """HTTP in front, all workers behind."""
    from router import service

    part = child.assignment.part
    await service.run(
        child.assignment.config,
        counts=None if part.pools is None else LauncherCounts(child, part.pools),
        sockets=[socket.socket(fileno=fd) for fd in part.http_fds],
        worker_addresses=part.worker_addresses,
        pool_addresses=part.pool_addresses,
        notify=child,
        stop=child.stop,
    )


async def run_pool(child: Child) -> None:
    """The pool's node: the blocks that this host's workers share."""
    from prometheus_client import CollectorRegistry

    from baton.redis_link import RefusedValues
    from baton_cluster.pool_allowances import open_allowances
    from kvpool import service

    config, part = child.assignment.config, child.assignment.part
    registry = CollectorRegistry()
    refused = RefusedValues(registry)
    identity = WorkerIdentity(worker_id=WorkerId(part.name), incarnation=part.incarnation)

    def registration() -> Registration:
        return Registration(
            kind="pool",
            identity=identity,
            address=part.pool_address,
            labels=config.cluster.labels,
        )

    async with (
        open_allowances(config, refused) as allowances,
        registered(config, registration),
    ):
        await service.run(
            config,
            identity=identity,
            address=part.pool_address,
            peer_address=part.peer_address,
            region_path=part.region_path,
            peer_region_path=part.peer_region_path,
            allowances=allowances,
            registry=registry,
            refused=refused,
            ready=child.ready,
            stop=child.stop,
        )


async def run_worker(child: Child) -> None:
    """One engine, and over it both halves of a worker: its role says which legs it takes, and may change."""
    config, worker = child.assignment.config, _worker_of(child)
    if config.engine.kind == "vllm":
        await _run_vllm(child)
        return
    import_worker()
    from baton_engine.build import build_engine
    from prefill_worker.sink import TransferSink

    memory, sink = WorkerMemory(), TransferSink()
    built = await call_in_thread(
        build_engine,
        config.model,
        config.engine,
        secret=bytes.fromhex(config.cluster.secret),
        memory=memory,
        sink=sink,
        progress=child.progress,
        grammar=config.grammar,
        gpu=worker.gpu,
        gpu_sharers=worker.gpu_sharers,
    )
    counted = _counted(built.grammar_counts, built.speculation_counts)
    await _serve_engine(child, built, [memory], sink, built.page_kernels, counted)


def _counted(
    grammars: "GrammarCounts | None", drafts: "SpeculationCounts | None" = None
) -> list[Collector]:
    """What an engine counts beside its load."""
    counted: list[Collector] = []
    if grammars is not None:
        counted.append(GrammarMetrics(grammars))
    if drafts is not None:
        counted.append(SpeculationMetrics(drafts))
    return counted


async def _run_vllm(child: Child) -> None:
    """vLLM's core instead of Baton's engine."""
    from baton_vllm.build import build_vllm_engine
    from baton_vllm.settings import num_ranks
    from prefill_worker.sink import TransferSink

    config, worker, sink = child.assignment.config, _worker_of(child), TransferSink()
    memories = [WorkerMemory() for _ in range(num_ranks(config.engine))]
    built = await call_in_thread(
        build_vllm_engine,
        config.model,
        config.engine,
        role=worker.role,
        secret=bytes.fromhex(config.cluster.secret),
        memory=memories[0],
        sink=sink,
        progress=child.progress,
        grammar=config.grammar,
        rank_memories=memories if len(memories) > 1 else (),
        gpu=worker.gpu,
        gpu_sharers=worker.gpu_sharers,
    )
    await _serve_engine(child, built, memories, sink, None, _counted(built.grammar_counts))


async def run_simulated(child: Child) -> None:
    """A worker without a model: its steps take the time that they are told to. Never imports torch."""
    from baton_engine.simulated import build_simulated
    from prefill_worker.sink import TransferSink

    config, memory, sink = child.assignment.config, WorkerMemory(), TransferSink()
    built = build_simulated(
        config.model,
        config.engine,
        config.simulated,
        secret=bytes.fromhex(config.cluster.secret),
        memory=memory,
        sink=sink,
    )
    await _serve_engine(child, built, [memory], sink, None)


async def _serve_engine(
    child: Child,
    built: "BuiltEngine | SimulatedEngine | BuiltVllm",
    memories: Sequence[WorkerMemory],
    sink: "TransferSink",
    kernels: "PageKernels | None",
    counted: Sequence[Collector] = (),
) -> None:
    """Serves an engine until the child is to stop. Its pages lie in `memories`, one for each rank;
    `kernels` move them where they lie on a GPU.
    """
    from baton_vllm.build import BuiltVllm

    config, worker = child.assignment.config, _worker_of(child)
    metrics, hello = _metrics(built), _hello(child, built)
    hands_off = not isinstance(built, BuiltVllm) or built.hands_off
    if not hands_off:
        hello = replace(hello, transfer_address="")  # routers pair it with no other worker
    credentials = ClusterCredentials.from_config(config.cluster, PeerRole.WORKER, worker.worker_id)
    metrics.registry.register(credentials.counts)
    for collector in counted:
        metrics.registry.register(collector)
    if isinstance(built, BuiltVllm):
        from baton_vllm.metrics import OwnMetrics

        metrics.registry.register(OwnMetrics({each.name for each in metrics.registry.collect()}))
    pool: WorkerPool | None = None
    if not isinstance(built, BuiltVllm) or built.pools:
        pool = join_pool(child.assignment, built.host, hello, memories[0], metrics, credentials)
    parts = _Parts(
        config=config,
        worker=worker,
        hello=hello,
        engine=built.host if pool is None else pool.engine,
        memories=memories,
        kernels=kernels,
        office=TicketOffice(bytes.fromhex(config.cluster.secret)),
        credentials=credentials,
        sink=sink,
        metrics=metrics,
        tracer=open_tracer(config.trace, worker.worker_id, MonotonicClock()),
        pool=pool,
    )
    server = WorkerServer(
        config=worker,
        engine=built.host,
        service=_service(parts) if hands_off else _service_alone(parts),
        metrics=parts.metrics,
        credentials=credentials,
        version=version(),
        model=config.model.served_model_name[0],
    )
    if pool is not None:
        await pool.agent.start()
    await server.start()
    built.host.start(worker.cores)  # Only now: an event without a listener would end it.

    def registration() -> Registration:
        return Registration(
            kind="worker",
            identity=hello.identity,
            address=worker.advertise_address or worker.address,
            role=server.state().hello.role.value,
            layout=hello.layout.digest(),
            labels=config.cluster.labels,
        )

    await _serve(server, child, worker, registered(config, registration))
    parts.engine.close()
    if pool is not None:
        await pool.agent.close()
    await asyncio.to_thread(parts.tracer.close)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What the parts of one worker process share."""

    config: BatonConfig
    worker: WorkerConfig
    hello: WorkerHello
    engine: "EnginePort"
    memories: Sequence[WorkerMemory]
    kernels: "PageKernels | None"
    office: TicketOffice
    credentials: ClusterCredentials
    sink: "TransferSink"
    metrics: WorkerMetrics
    tracer: Tracer
    pool: WorkerPool | None

    @property
    def region_blocks(self) -> int:
        """Pages of the region: those that the engine hands out, and the spare ones."""
        return self.hello.num_blocks + SPARE_BLOCKS

    @property
    def secret(self) -> bytes:
        """The cluster's."""
        return bytes.fromhex(self.config.cluster.secret)

    @property
    def listening(self) -> Listening:
        """Where its transports listen."""
        worker = self.worker
        return Listening.at(worker.address, self.config.transfer.ports, worker.advertise_address)

    def hashes(self) -> Hashing:
        """How its pages are hashed."""
        if len(self.memories) > 1:
            return ranked_hashing(
                [memory.span.host_view for memory in self.memories],
                rank_layouts(self.hello.layout, len(self.memories)),
                num_blocks=self.region_blocks,
            )
        return ways_to_hash(
            self.memories[0].span,
            self.hello.layout,
            num_blocks=self.region_blocks,
            kernel=self.kernels.sums if self.kernels is not None else None,
        )


def _hello(child: Child, built: "BuiltEngine | SimulatedEngine | BuiltVllm") -> WorkerHello:
    from baton_vllm.build import BuiltVllm

    worker, limits = _worker_of(child), built.limits
    return WorkerHello(
        identity=WorkerIdentity(
            worker_id=WorkerId(worker.worker_id), incarnation=child.assignment.part.incarnation
        ),
        role=worker.role,
        layout=built.layout,
        max_model_len=limits.longest_text,
        vocab_size=limits.vocab_size,
        num_blocks=built.num_blocks if isinstance(built, BuiltVllm) else limits.num_blocks,
        max_num_seqs=limits.max_running,
        transfer_address=worker.advertise_address or worker.address,
    )


def _metrics(built: "BuiltEngine | SimulatedEngine | BuiltVllm") -> WorkerMetrics:
    limits = built.limits
    return WorkerMetrics(
        CollectorRegistry(), block_tokens=limits.block_tokens, num_blocks=limits.num_blocks
    )


def _service(parts: _Parts) -> "WorkerService":
    from baton_worker.legs import WorkerLegTable
    from baton_worker.service import WorkerService
    from decode_worker.receiver import PageReceiver
    from prefill_worker.sender import PageSender

    hello, legs, hashes = parts.hello, WorkerLegTable(), parts.hashes()
    backends = parts.config.transfer.backends
    here = SessionEndpoint(
        identity=hello.identity,
        layout=hello.layout,
        office=parts.office,
        credentials=parts.credentials,
        ranks=len(parts.memories),
    )
    sender = PageSender(
        here=here,
        legs=legs,
        sink=parts.sink,
        senders=joined_senders(
            [
                open_senders(
                    backends,
                    memory.place,
                    num_blocks=parts.region_blocks,
                    secret=parts.secret,
                    listening=parts.listening,
                    movers=parts.kernels.movers if parts.kernels is not None else None,
                )
                for memory in parts.memories
            ]
        ),
        hashes=hashes,
        spare=BlockId(hello.num_blocks),
        metrics=parts.metrics,
        clock=MonotonicClock(),
        pool=None if parts.pool is None else parts.pool.prompts,
        pool_after_s=parts.config.transfer.pool_after_s,
    )
    receiver = PageReceiver(
        here=here,
        legs=legs,
        num_blocks=hello.num_blocks,
        receivers=joined_receivers(
            [
                open_receivers(
                    needed(backends, parts.worker.address, memory.place),
                    memory.place,
                    server_address=partial(_server_address, parts, layout.tp_rank),
                    layout=layout,
                    num_blocks=parts.region_blocks,
                    admission=RegionAccess(
                        secret=parts.secret,
                        listening=parts.listening,
                        refused=lambda reason: parts.metrics.connection_refused(reason.value),
                    ),
                )
                for memory, layout in zip(
                    parts.memories, rank_layouts(hello.layout, len(parts.memories)), strict=True
                )
            ]
        ),
        hashes=hashes,
        transfer=parts.config.transfer,
        metrics=parts.metrics,
    )
    return WorkerService(
        engine=parts.engine,
        hello=hello,
        legs=legs,
        sending=sender,
        receiving=receiver,
        link_rate=sender.link_rate,
        office=parts.office,
        metrics=parts.metrics,
        clock=MonotonicClock(),
        tracer=parts.tracer,
        complete_load=None if parts.pool is None else parts.pool.agent.report,
    )


def _service_alone(parts: _Parts) -> "WorkerService":
    """Of a worker that neither sends nor receives pages."""
    from baton_worker.legs import WorkerLegTable
    from baton_worker.service import WorkerService

    return WorkerService(
        engine=parts.engine,
        hello=parts.hello,
        legs=WorkerLegTable(),
        sending=None,
        receiving=None,
        office=parts.office,
        metrics=parts.metrics,
        clock=MonotonicClock(),
        tracer=parts.tracer,
    )


def _server_address(parts: _Parts, rank: int, backend: str) -> str:
    """Where peers attach to a rank's arena: by a Unix socket, or beside the worker's own port."""
    if parts.worker.address.startswith("unix:") or backend in ("shm", "cuda_ipc"):
        name = parts.worker.worker_id if rank == 0 else f"{parts.worker.worker_id}-rank-{rank}"
        path = kv_socket(Path(parts.config.cluster.runtime_dir), name)
        return f"unix:{path}"
    host = parts.worker.address.rpartition(":")[0]
    return f"{host}:0"


async def _serve(
    server: WorkerServer,
    child: Child,
    worker: WorkerConfig,
    found: AbstractAsyncContextManager[None],
) -> None:
    """Inside `found` routers that do not know this worker find it. Until asked to stop, or until the engine dies.

    Raises:
        EngineError: The engine died; the process must end, so that another is started.
    """
    async with found:
        freeze_loaded_objects()
        child.ready()
        stopped = asyncio.ensure_future(child.stop.wait())
        either: list[asyncio.Future[Any]] = [stopped, server.failed]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if server.failed.done():
        stopped.cancel()
        server.failed.result()
    await server.drain(worker.drain_timeout_s)
    await server.close()


def _worker_of(child: Child) -> WorkerConfig:
    worker = child.assignment.part.worker
    assert worker is not None, "every worker has one"
    return worker


_IMPORTED_BY_WORKERS = (
    "baton_engine.build",
    "baton_vllm.build",
    "baton_worker.service",
    "decode_worker.receiver",
    "prefill_worker.sender",
)


def import_worker() -> None:
    """Imports what `run_worker` would on its way until it serves."""
    with importing():
        for module in _IMPORTED_BY_WORKERS:
            importlib.import_module(module)


ROLES: dict[str, RoleMain] = {
    ROUTER: run_router,
    POOL: run_pool,
    SIMULATED: run_simulated,
    **{role.value: run_worker for role in Role},
}


def main() -> None:
    """Becomes the child that the arguments name."""
    parser = argparse.ArgumentParser(prog="baton_cluster.roles")
    parser.add_argument("role", choices=(*ROLES, STANDBY))
    parser.add_argument("--name", required=True, help="shown in lists of processes")
    parser.add_argument("--lifeline", type=int, required=True, metavar="FD")
    arguments = parser.parse_args()
    if arguments.role == STANDBY:
        run_standby(ROLES.__getitem__, import_worker, arguments.lifeline)
    run(ROLES[arguments.role], arguments.lifeline)


if __name__ == "__main__":
    main()
