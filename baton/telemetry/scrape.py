"""Serves one registry over HTTP, for Prometheus to scrape a worker that has no HTTP surface of its own, and its probes.

An orchestrator's probes have no certificate of the cluster, so that they cannot ask over gRPC.
"""

import io
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from baton.config.ports import port_of
from baton.errors import ConfigError
from baton.telemetry.logs import get_logger

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

_TIMEOUT_S = 2.0
"""For a request to come; each connection has a thread."""

_log = get_logger(__name__)


class _Request(io.RawIOBase):
    """What a client sends, until its time is over: `socketserver` counts that anew with each byte."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until_s = time.monotonic() + _TIMEOUT_S

    def readable(self) -> bool:
        """See `io`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io`."""
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request has not come in time")
        self._connection.settimeout(left_s)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(_TIMEOUT_S)  # for the answer


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def setup(self) -> None:
        """See `socketserver`."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Request(self.connection))

    def log_message(self, format: str, *args: Any) -> None:  # the library's name
        """Scrapes are not worth a line."""


class _Server(ThreadingWSGIServer):
    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The library prints a traceback, also where a client has left, or has asked for nothing in time."""
        del request
        error = sys.exception()
        if isinstance(error, OSError):
            _log.debug("a scrape was broken off", peer=client_address[0], reason=repr(error))
        else:
            _log.error("a scrape failed", cause=error)


class ScrapeServer:
    """A small HTTP server in a thread of its own: metrics, and for each probe 200 or 503.

    Args:
        address: `host:port` to bind.
        registry: What is served.
        probes: By path, such as `/live`: whether all is well. Asked on the server's threads.

    Raises:
        ConfigError: The address is malformed, taken or none of this machine's.
    """

    def __init__(
        self,
        address: str,
        registry: CollectorRegistry,
        probes: Mapping[str, Callable[[], bool]] | None = None,
    ) -> None:
        host, port = address.rpartition(":")[0], port_of(address)
        if not host or port is None:
            raise ConfigError(f"not host:port: {address!r}", param="metrics_address")
        self._metrics = make_wsgi_app(registry)
        self._probes = dict(probes or {})
        try:
            self._server = make_server(host.strip("[]"), port, self._answer, _Server, _Handler)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"cannot bind {address} for metrics: {reason}", param="metrics_address"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stops serving; blocks until it has."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(
        self, environ: "WSGIEnvironment", start_response: "StartResponse"
    ) -> Iterable[bytes]:
        probe = self._probes.get(str(environ.get("PATH_INFO")))
        if probe is None:
            shown: Iterable[bytes] = self._metrics(environ, start_response)
            return shown
        status = "200 OK" if probe() else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain")])
        return [b""]
