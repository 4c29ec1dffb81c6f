"""The router process: HTTP in front, workers behind, an operators' socket beside. `compose` wires what is behind HTTP.

Never imports torch, so that a router starts fast and stays small.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from baton.clock import Clock, MonotonicClock
from baton.config.lora import read_lora_modules
from baton.config.schema import BatonConfig, RouterConfig
from baton.errors import ConfigError
from baton.garbage import freeze_loaded_objects
from baton.redis_link import RefusedValues
from baton.rpc.bounds import CONTROL
from baton.rpc.channel import bind, new_server
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.identity import PeerRole
from baton.rpc.v1 import control_pb2_grpc
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import new_registry
from baton.telemetry.otel import open_tracer
from baton.telemetry.tracing import Tracer
from baton.version import version
from router.admin.app import create_admin_app
from router.admin.pool_client import PoolAdminClient
from router.admin.stories import OperatorStories
from router.admission.admission import Admission, queue_limits
from router.admission.capacity import MeasuredSpeed, WorkerCapacity
from router.admission.share_exchange import sharing
from router.app import AppSettings, create_app
from router.attainment import Attainment
from router.control import RouterControl
from router.discovery.watch import DiscoveryWatch, discovering
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.events import Heard
from router.dispatch.placement import Placement
from router.dispatch.retry import RetryPolicy
from router.generation.grammars import GrammarChecker
from router.generation.sampling import SamplingDefaults, read_defaults
from router.generator import ClusterGenerator
from router.http import server
from router.http.connections import ADMIN_CONNECTIONS, connections_that_fit
from router.inboxes import Inboxes
from router.model_discovery import ModelDiscovery
from router.pool_watch import PoolWatches, watching
from router.roles.planning import RolePlanning, planning
from router.roles.ports import WorkerCounts
from router.routing.chains import PromptHasher
from router.routing.explanation import DecisionLog
from router.routing.index import PrefixIndex
from router.routing.policies import policy_named
from router.routing.predictive import LocalPrefill
from router.routing.view import ClusterView
from router.status import ClusterStatus
from router.telemetry.collectors import (
    IndexMetrics,
    PairMetrics,
    RetryMetrics,
    WorkerLoads,
    WorkerRefusals,
)
from router.templates.renderer import read_template
from router.tenancy import Tenancy, open_tenancy
from router.text.model_files import model_files, revision_of
from router.text.tokenizer import Tokenizer
from router.timer import PeriodicTimer
from router.workers.links import LinkState, LinkTiming, WorkerLinks

CONTROL_SOCKET = "router.sock"
"""Name of the Control socket in the cluster's runtime directory."""

_WAIT_S = 5.0
_SWITCH_INTERVAL_S = 0.0005
"""Of Python's threads: so long the event loop waits at most, at each of its turns,
while a thread that computes holds the interpreter.
"""
_ALL_WORKERS_WAITS = 6
_DISCOVERED_WORKERS = 64
"""So many have file descriptors kept for them, of those that nobody has listed. More are connected, too:
then clients have fewer.
"""

_log = get_logger(__name__)


class Notify(Protocol):
    """The process that started this one and waits for it."""

    def progress(self, what: str, done: float | None = None) -> None:
        """How far the start is; `done` is a share from 0 to 1."""

    def serving(self) -> None:
        """Requests are taken, if there are workers; a stop waits for them from now on."""

    def ready(self) -> None:
        """This process serves, with the workers that it waited for."""


async def run(
    config: BatonConfig,
    *,
    sockets: list[socket.socket],
    worker_addresses: Sequence[str],
    notify: Notify,
    stop: asyncio.Event,
    counts: WorkerCounts | None = None,
    pool_addresses: Sequence[str] = (),
    secret: bytes | None = None,
    control_address: str | None = None,
) -> None:
    """Serves until `stop` is set and what is in flight has ended, or the drain timeout has.

    Args:
        config: The whole configuration, resolved: model, names and secret are set.
        sockets: Listening sockets for HTTP; closed at the end.
        worker_addresses: gRPC addresses of workers; discovery may find more.
        notify: Told of progress, and when requests are served.
        stop: Set from outside.
        counts: Of the workers that a launcher runs, which may change; None where none started this process.
        pool_addresses: gRPC addresses of the pool's nodes; discovery may find more.
        secret: The cluster secret; that of the configuration if None.
        control_address: Where Control is served; the cluster's runtime directory's socket if None.

    Raises:
        ModelLoadError: The tokenizer cannot be loaded.
        ConfigError: The policy is unknown, or the tenants document, the chat template,
            a guardrail or Redis' URL is wrong.
    """
    if secret is None:
        secret = bytes.fromhex(config.cluster.secret)
    if control_address is None:
        control_address = f"unix:{Path(config.cluster.runtime_dir) / CONTROL_SOCKET}"
    notify.progress("loading the tokenizer")
    loaded = await asyncio.to_thread(_load, config)
    freeze_loaded_objects()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    credentials = ClusterCredentials.from_config(config.cluster, PeerRole.ROUTER, "router")
    parts = compose(config.router, worker_addresses, secret, credentials=credentials)
    if counts is not None:
        counts.follow(parts.membership.relist)
    registry = new_registry()
    registry.register(credentials.counts)
    refused = RefusedValues(registry)
    refusals = server.ConnectionRefusals(registry)
    tracer = open_tracer(config.trace, "router", MonotonicClock())
    grammars = GrammarChecker(config.grammar, loaded.tokenizer.special_texts, registry)
    try:
        async with (
            running(parts),
            open_tenancy(config, registry, refused) as tenancy,
            sharing(config, parts.admission, refused),
            watching(pool_addresses, parts.view.pools, credentials=credentials) as watches,
            discovering(
                config,
                workers=parts.membership,
                pool_nodes=watches,
                registry=registry,
                refused=refused,
            ) as discovery,
            planning(
                config,
                view=parts.view,
                waiting=lambda: sum(parts.admission.waiting().values()),
                credentials=credentials,
                clock=parts.clock,
                registry=registry,
                attainment=parts.attainment,
                counts=counts,
            ) as roles,
            _operated(
                config,
                parts,
                tenancy,
                roles,
                counts,
                watches,
                discovery,
                control_address,
                credentials,
                refusals,
            ),
            _http(
                _app(config, parts, loaded, registry, tenancy, tracer, grammars),
                config,
                sockets,
                config.router.max_connections
                or connections_that_fit(_most_workers(config, worker_addresses)),
                refusals,
            ) as http,
            _announcing(parts, notify, discovers=discovery is not None),
        ):
            notify.serving()
            await http.stopped_by(stop)
            generator = parts.generator
            if not await generator.drain(config.cluster.drain_timeout_s):
                _log.warning("requests cut off by the stop", in_flight=generator.in_flight())
                generator.end_requests()
    finally:
        grammars.close()
        loaded.tokenizer.close()
        await asyncio.to_thread(tracer.close)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParts:
    """The parts of one router behind its HTTP front end, wired to each other.

    Only what composes them sees all of them; everything else is handed the parts that it needs.
    """

    index: PrefixIndex
    view: ClusterView
    decisions: DecisionLog
    dispatcher: Dispatcher
    admission: Admission
    membership: WorkerLinks
    discovery: ModelDiscovery
    generator: ClusterGenerator
    status: ClusterStatus
    timer: PeriodicTimer
    clock: Clock
    attainment: Attainment


def compose(
    config: RouterConfig,
    worker_addresses: Sequence[str],
    secret: bytes,
    *,
    credentials: ClusterCredentials | None = None,
    clock: Clock | None = None,
    retry_policy: RetryPolicy | None = None,
    link_timing: LinkTiming | None = None,
) -> RouterParts:
    """Makes a router's parts, on an event loop; `running` starts them.

    Args:
        config: The router's section.
        worker_addresses: gRPC addresses of workers.
        secret: The cluster secret, 32 bytes.
        credentials: Of this process; without them workers are reached by Unix sockets only.
        clock: Monotonic.
        retry_policy: Bounds of retrying and waiting; those of `config` hold unless given.
        link_timing: How links wait.

    Raises:
        ConfigError: There is no policy of the configured name.
    """
    clock = clock or MonotonicClock()
    retry_policy = retry_policy or RetryPolicy(
        max_attempts=config.max_attempts, worker_wait_s=config.worker_wait_s
    )
    index = PrefixIndex(max_blocks=config.max_indexed_blocks)
    view = ClusterView(index, silence_timeout_s=config.silence_timeout_s)
    window_tokens = config.prefill_window_tokens
    capacity = WorkerCapacity(
        view,
        MeasuredSpeed(),
        prefill_window_tokens=window_tokens,
        local_decode_sequences=config.local_decode_sequences,
    )
    local_prefill = LocalPrefill(
        max_tokens=config.local_prefill_tokens, max_stall_s=config.local_prefill_stall_s
    )
    policy = policy_named(config.policy, local_prefill)
    decisions = DecisionLog(config.policy)
    placement = Placement(
        view=view,
        index=index,
        policy=policy,
        secret=secret,
        rng=Random(),
        log=decisions,
        capacity=capacity,
    )
    dispatcher = Dispatcher(view=view, placement=placement, policy=retry_policy)
    limits = queue_limits(config, retry_policy.worker_wait_s)
    admission = Admission(capacity, limits, clock)
    discovery = ModelDiscovery(view, retry_policy.worker_wait_s, config.max_waiting_requests)

    def hear(heard: Heard) -> None:  # links and generator call each other
        generator.hear(heard)

    membership = WorkerLinks(
        worker_addresses, hear, timing=link_timing, credentials=credentials, clock=clock
    )
    generator = ClusterGenerator(
        dispatcher=dispatcher,
        admission=admission,
        commands=membership,
        hasher=PromptHasher(secret, view) if policy.uses_prefix else None,
        inboxes=Inboxes(max_bytes=config.max_queued_bytes_per_client, clock=clock),
        discovery=discovery,
        clock=clock,
    )
    timer = PeriodicTimer(generator.tick, clock)
    status = ClusterStatus(
        view=view,
        generator=generator,
        admission=admission,
        membership=membership,
        timer=timer,
        clock=clock,
    )
    return RouterParts(
        index=index,
        view=view,
        decisions=decisions,
        dispatcher=dispatcher,
        admission=admission,
        membership=membership,
        discovery=discovery,
        generator=generator,
        status=status,
        timer=timer,
        clock=clock,
        attainment=Attainment(),
    )


@asynccontextmanager
async def running(parts: RouterParts) -> AsyncIterator[None]:
    """Connects to the workers in the background while inside; at the end ends what is left and disconnects."""
    parts.timer.start()
    parts.membership.start()
    try:
        yield
    finally:
        parts.generator.end_requests()
        await parts.membership.close()
        await parts.timer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """What a router needs of its model's files."""

    tokenizer: Tokenizer
    defaults: SamplingDefaults
    revision: str | None


def _load(config: BatonConfig) -> _Loaded:
    directory = model_files(config.model.model, config.model.revision)
    return _Loaded(
        tokenizer=Tokenizer.load(
            directory,
            chat_template=read_template(config.router.chat_template),
            content_format=config.router.chat_template_content_format,
        ),
        defaults=read_defaults(directory),
        revision=revision_of(directory),
    )


def _app(
    config: BatonConfig,
    parts: RouterParts,
    loaded: _Loaded,
    registry: CollectorRegistry,
    tenancy: Tenancy,
    tracer: Tracer,
    grammars: GrammarChecker,
) -> FastAPI:
    settings = AppSettings(
        model_names=_names(config),
        version=version(),
        router=config.router,
        defaults=loaded.defaults,
        revision=loaded.revision,
        adapter_names=tuple(read_lora_modules(config.model.lora_modules)),
    )
    registry.register(IndexMetrics(parts.index))
    registry.register(RetryMetrics(parts.dispatcher.retry_counters, settings.model_names[0]))
    registry.register(PairMetrics(parts.view.broken_pairs))
    registry.register(WorkerLoads(parts.view, settings.model_names[0]))
    registry.register(WorkerRefusals(parts.membership.refusals))
    return create_app(
        settings,
        parts.generator,
        parts.status,
        loaded.tokenizer,
        registry,
        grammars,
        tenancy=tenancy,
        tracer=tracer,
        decisions=parts.decisions,
        attainment=parts.attainment,
    )


def _names(config: BatonConfig) -> tuple[str, ...]:
    return config.model.served_model_name or (config.model.model,)


def _http(
    app: FastAPI,
    config: BatonConfig,
    sockets: list[socket.socket],
    max_connections: int,
    refusals: server.ConnectionRefusals,
) -> AbstractAsyncContextManager[server.HttpServer]:
    return server.serving(
        app,
        sockets,
        max_connections=max_connections,
        on_refused=refusals,
        keep_alive_s=config.router.http_keep_alive_s,
        drain_timeout_s=config.cluster.drain_timeout_s,
    )


@asynccontextmanager
async def _operated(
    config: BatonConfig,
    parts: RouterParts,
    tenancy: Tenancy,
    roles: RolePlanning | None,
    counts: WorkerCounts | None,
    watches: PoolWatches,
    discovery: DiscoveryWatch | None,
    control_address: str,
    credentials: ClusterCredentials,
    refusals: server.ConnectionRefusals,
) -> AsyncIterator[None]:
    """Serves operators inside: the command line, and the operators' port."""
    stories = OperatorStories(
        parts.generator.story,
        parts.view,
        MonotonicClock(),
        credentials,
        of_tenant=tenancy.story,
        of_planner=None if roles is None else roles.story,
    )
    pool = PoolAdminClient(watches.addresses, credentials)
    async with (
        _control(config, parts, roles, counts, stories, discovery, control_address, credentials),
        _admin(config, tenancy, pool, stories, refusals),
    ):
        yield


@asynccontextmanager
async def _admin(
    config: BatonConfig,
    tenancy: Tenancy,
    pool: PoolAdminClient,
    stories: OperatorStories,
    refusals: server.ConnectionRefusals,
) -> AsyncIterator[None]:
    """Serves operators inside, where there is a port for them."""
    admin = config.admin
    if admin.port is None:
        yield
        return
    family = socket.AF_INET6 if ":" in admin.host else socket.AF_INET
    try:
        listener = socket.create_server((admin.host, admin.port), family=family)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"admin: {admin.host}:{admin.port}: {why}", param="admin.port") from error
    _log.info("operators are served", host=admin.host, port=listener.getsockname()[1])
    app = create_admin_app(tenancy, admin.api_keys, pool, stories)
    async with _http(app, config, [listener], ADMIN_CONNECTIONS, refusals):
        yield


@asynccontextmanager
async def _control(
    config: BatonConfig,
    parts: RouterParts,
    roles: RolePlanning | None,
    counts: WorkerCounts | None,
    stories: OperatorStories,
    discovery: DiscoveryWatch | None,
    address: str,
    credentials: ClusterCredentials,
) -> AsyncIterator[None]:
    rpc = new_server(credentials, CONTROL)
    control = RouterControl(
        view=parts.view,
        links=parts.membership,
        discovery_faults=lambda: () if discovery is None else discovery.faults,
        in_flight=parts.generator.in_flight,
        credentials=credentials,
        stories=stories,
        decisions=parts.decisions,
        clock=parts.clock,
        version=version(),
        model=_names(config)[0],
        planner=roles,
        counts=counts,
    )
    control_pb2_grpc.add_ControlServicer_to_server(control, rpc)
    bind(rpc, address, credentials)
    await rpc.start()
    try:
        yield
    finally:
        await rpc.stop(grace=0.5)


@asynccontextmanager
async def _announcing(
    parts: RouterParts, notify: Notify, *, discovers: bool
) -> AsyncIterator[None]:
    announcing = asyncio.create_task(_announce(parts, notify, discovers=discovers))
    try:
        yield
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)


async def _announce(parts: RouterParts, notify: Notify, *, discovers: bool) -> None:
    """Tells `notify` once every worker is here, or after a while those that can serve. Where workers are discovered
    nobody knows how many there will be: those that can serve are enough.
    """
    waits = _ALL_WORKERS_WAITS
    while True:
        links = parts.membership.links
        joined = sum(link.state is LinkState.READY for link in links)
        if parts.status.ready() if discovers else joined == len(links):
            break
        notify.progress("waiting for workers", joined / max(1, len(links)))
        try:
            async with asyncio.timeout(_WAIT_S):
                await parts.discovery.next_worker()
        except TimeoutError:
            # A lone decode worker can serve, but what waits for `ready` expects the cluster that was asked for.
            waits -= parts.status.ready()
        if waits == 0:
            _log.warning("serving without all workers", joined=joined, expected=len(links))
            break
    notify.ready()


def _most_workers(config: BatonConfig, listed: Sequence[str]) -> int:
    """Workers that file descriptors are kept for."""
    return len(listed) + (0 if config.cluster.discovery == "static" else _DISCOVERED_WORKERS)
