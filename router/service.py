"""The router process: HTTP in front, workers behind, an operators' socket beside.

Never imports torch, so that a router starts fast and stays small.
"""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from baton.clock import MonotonicClock
from baton.config.schema import BatonConfig
from baton.errors import ConfigError
from baton.rpc.channel import bind, new_server
from baton.rpc.v1 import control_pb2_grpc
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import new_registry
from baton.telemetry.otel import open_tracer
from baton.telemetry.tracing import Tracer
from baton.version import version
from router.admin.app import create_admin_app
from router.admin.pool_client import PoolAdminClient
from router.admission.share_exchange import sharing
from router.app import AppSettings, create_app
from router.control import RouterControl
from router.generator import ClusterGenerator
from router.http.head_limit import BoundedHeadProtocol
from router.links import LinkState
from router.openai.sampling import SamplingDefaults, read_defaults
from router.pool_watch import watching
from router.telemetry.collectors import IndexMetrics, RetryMetrics, WorkerLoads
from router.tenancy import Tenancy, open_tenancy
from router.text.model_files import model_files, revision_of
from router.text.tokenizer import Tokenizer

CONTROL_SOCKET = "router.sock"
"""Name of the Control socket in the cluster's runtime directory."""

_WAIT_S = 5.0
_GARBAGE_THRESHOLD = 50_000
_FULL_HOUSE_WAITS = 6

_log = get_logger(__name__)


class Notify(Protocol):
    """Whoever started this process and waits for it."""

    def progress(self, what: str, done: float | None = None) -> None:
        """How far the start is; `done` is a share from 0 to 1."""

    def ready(self) -> None:
        """This process serves."""


async def run(
    config: BatonConfig,
    *,
    sockets: list[socket.socket],
    worker_addresses: Sequence[str],
    notify: Notify,
    stop: asyncio.Event,
    pool_addresses: Sequence[str] = (),
    secret: bytes | None = None,
    control_address: str | None = None,
) -> None:
    """Serves until `stop` is set and what is in flight has ended, or the drain timeout has.

    Args:
        config: The whole configuration, resolved: model, names and secret are set.
        sockets: Listening sockets for HTTP; closed at the end.
        worker_addresses: gRPC addresses of all workers.
        notify: Told of progress, and when requests are served.
        stop: Set from outside.
        pool_addresses: gRPC addresses of the pool's nodes.
        secret: The cluster secret; that of the configuration if None.
        control_address: Where Control is served; the cluster's runtime directory's socket if None.

    Raises:
        ModelLoadError: The tokenizer cannot be loaded.
        ConfigError: The policy is unknown, or the tenants document, a guardrail or Redis' URL is wrong.
    """
    if secret is None:
        secret = bytes.fromhex(config.cluster.secret)
    if control_address is None:
        control_address = f"unix:{Path(config.cluster.runtime_dir) / CONTROL_SOCKET}"
    notify.progress("loading the tokenizer")
    loaded = await asyncio.to_thread(_load, config)
    # All that has been loaded stays: going over it again and again for garbage would cost a few percent of every core.
    gc.freeze()
    gc.set_threshold(_GARBAGE_THRESHOLD)
    generator = ClusterGenerator(config.router, worker_addresses, secret)
    generator.start()
    registry = new_registry()
    tracer = open_tracer(config.trace, "router", MonotonicClock())
    try:
        async with (
            open_tenancy(config, registry) as tenancy,
            sharing(config.tenants, generator.admission),
            watching(pool_addresses, generator.view.pools),
            _control(config, generator, control_address),
            _admin(config, tenancy, PoolAdminClient(pool_addresses)),
            _http(
                _app(config, generator, loaded, registry, tenancy, tracer),
                config,
                sockets,
            ) as server,
            _announcing(generator, notify),
        ):
            await server.stopped_by(stop)
            if not await generator.drain(config.cluster.drain_timeout_s):
                _log.warning("requests cut off by the stop", in_flight=generator.in_flight())
                generator.end_requests()
    finally:
        await generator.close()
        loaded.tokenizer.close()
        await asyncio.to_thread(tracer.close)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """What a router needs of its model's files."""

    tokenizer: Tokenizer
    defaults: SamplingDefaults
    revision: str | None


def _load(config: BatonConfig) -> _Loaded:
    directory = model_files(config.model.model, config.model.revision)
    return _Loaded(
        tokenizer=Tokenizer.load(directory),
        defaults=read_defaults(directory),
        revision=revision_of(directory),
    )


def _app(
    config: BatonConfig,
    generator: ClusterGenerator,
    loaded: _Loaded,
    registry: CollectorRegistry,
    tenancy: Tenancy,
    tracer: Tracer,
) -> FastAPI:
    settings = AppSettings(
        model_names=_names(config),
        version=version(),
        router=config.router,
        defaults=loaded.defaults,
        revision=loaded.revision,
    )
    registry.register(IndexMetrics(generator.index))
    registry.register(RetryMetrics(generator.retry_counters, settings.model_names[0]))
    registry.register(WorkerLoads(generator.view, settings.model_names[0]))
    return create_app(
        settings,
        generator,
        loaded.tokenizer,
        registry,
        tenancy=tenancy,
        tracer=tracer,
        decisions=generator.decisions,
    )


def _names(config: BatonConfig) -> tuple[str, ...]:
    return config.model.served_model_name or (config.model.model,)


class _Server(uvicorn.Server):
    """uvicorn inside a process that handles its own signals."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket]) -> None:
        super().__init__(config)
        self.serving = asyncio.create_task(self.serve(sockets))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves them alone."""
        yield

    async def stopped_by(self, stop: asyncio.Event) -> None:
        """Waits for `stop`, then lets nobody in any more; raises what ended the server before that."""
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({stopping, self.serving}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        self.should_exit = True
        if self.serving.done():
            await self.serving


@asynccontextmanager
async def _http(
    app: FastAPI, config: BatonConfig, sockets: list[socket.socket]
) -> AsyncIterator[_Server]:
    """Serves HTTP inside; at the end lets begun replies finish."""
    settings = uvicorn.Config(
        app,
        http=BoundedHeadProtocol,
        lifespan="off",
        access_log=False,
        log_config=None,
        # By then every job has ended; what is left are clients that do not read.
        timeout_graceful_shutdown=max(1, round(config.cluster.drain_timeout_s)),
    )
    server = _Server(settings, sockets)
    try:
        yield server
    finally:
        server.should_exit = True
        await server.serving


@asynccontextmanager
async def _admin(
    config: BatonConfig, tenancy: Tenancy, pool: PoolAdminClient
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
    async with _http(create_admin_app(tenancy, admin.api_keys, pool), config, [listener]):
        yield


@asynccontextmanager
async def _control(
    config: BatonConfig, generator: ClusterGenerator, address: str
) -> AsyncIterator[None]:
    server = new_server()
    control = RouterControl(
        generator, clock=MonotonicClock(), version=version(), model=_names(config)[0]
    )
    control_pb2_grpc.add_ControlServicer_to_server(control, server)
    bind(server, address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace=0.5)


@asynccontextmanager
async def _announcing(generator: ClusterGenerator, notify: Notify) -> AsyncIterator[None]:
    announcing = asyncio.create_task(_announce(generator, notify))
    try:
        yield
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)


async def _announce(generator: ClusterGenerator, notify: Notify) -> None:
    """Tells `notify` once every worker is here, or after a while those that can serve."""
    links = generator.membership.links
    patience = _FULL_HOUSE_WAITS
    while (here := sum(link.state is LinkState.READY for link in links)) < len(links):
        notify.progress("waiting for workers", here / len(links))
        try:
            async with asyncio.timeout(_WAIT_S):
                await generator.worker_joined()
        except TimeoutError:
            # A lone decode worker can serve, but who waits for `ready` expects the cluster that was asked for.
            patience -= generator.ready()
        if patience == 0:
            _log.warning("serving without all workers", here=here, expected=len(links))
            break
    notify.ready()
