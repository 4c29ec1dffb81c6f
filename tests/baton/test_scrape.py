"""Metrics of a worker over HTTP, and who keeps the server waiting."""

import logging
import socket
import struct
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from baton.errors import ConfigError
from baton.telemetry.scrape import ScrapeServer
from tests.waits import eventually

TIMEOUT_S = 10


@pytest.fixture
def server() -> Iterator[ScrapeServer]:
    registry = CollectorRegistry()
    Gauge("seen", "Once", registry=registry).set(1)
    server = ScrapeServer("127.0.0.1:0", registry)
    yield server
    server.close()


@pytest.mark.parametrize("said", [b"", b"GET /met"])
def test_who_does_not_ask_in_time_is_gone_and_others_are_answered(
    server: ScrapeServer, said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as silent:
        silent.sendall(said)
        assert "seen 1.0" in httpx.get(f"http://{server.address}/metrics").text
        assert silent.recv(1) == b""  # blocks until the server hangs up
    assert "Traceback" not in capfd.readouterr().err


def test_who_asks_byte_by_byte_keeps_no_thread(server: ScrapeServer) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=0.2) as dripping:

        def is_refused() -> bool:
            try:
                dripping.sendall(b"G")
                return dripping.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        eventually(is_refused)


def test_who_hangs_up_without_a_word_is_not_worth_a_traceback(
    server: ScrapeServer, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    host, _, port = server.address.rpartition(":")
    with caplog.at_level(logging.DEBUG):
        hasty = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        hasty.close()  # by a reset
        eventually(lambda: "broken off" in caplog.text)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("address", ["[::1]:0", "[::]:0"])
def test_metrics_are_told_over_ipv6(address: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6: {error}")
    server = ScrapeServer(address, CollectorRegistry())
    try:
        assert httpx.get(f"http://{server.address}/metrics", trust_env=False).status_code == 200
    finally:
        server.close()


def test_an_address_that_cannot_be_bound_is_named(server: ScrapeServer) -> None:
    with pytest.raises(ConfigError, match=f"cannot bind {server.address} for metrics"):
        ScrapeServer(server.address, CollectorRegistry())


def test_probes_are_answered_beside_the_metrics() -> None:
    well = {"/live": True, "/ready": False}
    probes = {path: (lambda path=path: well[path]) for path in well}
    server = ScrapeServer("127.0.0.1:0", CollectorRegistry(), probes)
    try:
        assert httpx.get(f"http://{server.address}/live", trust_env=False).status_code == 200
        assert httpx.get(f"http://{server.address}/ready", trust_env=False).status_code == 503
        assert httpx.get(f"http://{server.address}/metrics", trust_env=False).status_code == 200
    finally:
        server.close()
