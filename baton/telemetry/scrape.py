"""Serves one registry over HTTP, for Prometheus to scrape a worker that has no HTTP surface of its own."""

import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from baton.errors import ConfigError

_TIMEOUT_S = 2.0
"""For a request to come; each connection has a thread."""


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # the library's name
        """Scrapes are not worth a line."""


class ScrapeServer:
    """A small HTTP server in a thread of its own.

    Args:
        address: `host:port` to bind.
        registry: What is served.

    Raises:
        ConfigError: The address is malformed.
        OSError: It is taken.
    """

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"not host:port: {address!r}", param="metrics_address")
        app = make_wsgi_app(registry)
        self._server = make_server(host, int(port), app, ThreadingWSGIServer, _Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stops serving; blocks until it has."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
