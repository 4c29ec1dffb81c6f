"""Serves one registry over HTTP, for Prometheus to scrape a worker that has no HTTP surface of its own."""

from prometheus_client import CollectorRegistry, start_http_server

from baton.errors import ConfigError


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
        self._server, self._thread = start_http_server(int(port), host, registry)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stops serving; blocks until it has."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
