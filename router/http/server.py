"""The HTTP server: uvicorn, in a process that handles its own signals."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from math import ceil

import uvicorn
from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import UnavailableError
from baton.telemetry.logs import get_logger
from router.http.auth import OPEN_PATHS
from router.http.connections import ConnectionLimit
from router.http.errors import error_response
from router.http.protocol import BoundedProtocol

_log = get_logger(__name__)


class ConnectionRefusals:
    """Counts connections that were closed for what came on them, or for want of room;
    the first of each reason is logged.

    Args:
        registry: Where the count is shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counter = Counter(
            "baton_http_connections_refused",
            "HTTP connections closed for what came on them, or for want of room.",
            ["reason"],
            registry=registry,
        )
        self._logged: set[str] = set()

    def __call__(self, reason: str) -> None:
        """One was closed; `reason` is from a bounded set."""
        self._counter.labels(reason).inc()
        if reason not in self._logged:
            self._logged.add(reason)
            _log.warning("closed an HTTP connection; more are only counted", reason=reason)


class HttpServer(uvicorn.Server):
    """Serves from its creation on; its owner waits for `serving` at the end."""

    def __init__(self, settings: uvicorn.Config, sockets: list[socket.socket]) -> None:
        super().__init__(settings)
        self.serving = asyncio.create_task(self.serve(sockets))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves them alone."""
        yield

    async def stopped_by(self, stop: asyncio.Event) -> None:
        """Waits for `stop`, then takes no new connections and closes the idle ones;
        raises what ended the server before that.
        """
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({stopping, self.serving}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        self.should_exit = True
        if self.serving.done():
            await self.serving


@asynccontextmanager
async def serving(
    app: ASGIApp,
    sockets: list[socket.socket],
    *,
    max_connections: int,
    on_refused: ConnectionRefusals,
    keep_alive_s: float,
    drain_timeout_s: float,
) -> AsyncIterator[HttpServer]:
    """Serves `app` inside; at the end lets begun replies finish.

    Args:
        app: What answers.
        sockets: Listening sockets; closed at the end.
        max_connections: Connections on which everything is answered; a few more are taken for probes.
        on_refused: Counts those that are closed.
        keep_alive_s: How long a connection may be open without a request.
        drain_timeout_s: How long begun replies may take to finish.
    """
    protocol = partial(
        BoundedProtocol,
        connections=ConnectionLimit(max_connections),
        probes_only=_probes_only(app),
        on_refused=on_refused,
    )
    settings = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]  # called, as the class would be
        ws="none",
        timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # said to be whole; it goes to `call_later`
        lifespan="off",
        access_log=False,
        log_config=None,
        # uvicorn waits from the beginning of the drain, for whole seconds. A second after its end every request has
        # been told so; what is left are clients that do not read.
        timeout_graceful_shutdown=ceil(drain_timeout_s) + 1,
    )
    server = HttpServer(settings, sockets)
    try:
        yield server
    finally:
        server.should_exit = True
        await server.serving


def _probes_only(app: ASGIApp) -> ASGIApp:
    """`app` for the connections beyond the limit."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await app(scope, receive, send)
            return
        error = UnavailableError("This router has as many connections as it can take.")
        await error_response(error, scope["path"])(scope, receive, send)

    return answer
