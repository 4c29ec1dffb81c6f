"""A hostile neighbour on another host: what it reaches of two workers, and what becomes of it.
Hosts are network namespaces.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from kv_transfer.backends.registry import BACKENDS
from kv_transfer.memory.proof import ANSWER_BYTES, CHALLENGE_BYTES
from kv_transfer.memory.region_server import PROOF_TIMEOUT_S
from tests.e2e.served import eventually
from tests.security.hosts import Host, descriptors, listening, two_hosts

pytestmark = [pytest.mark.alone, pytest.mark.slow]

SECRET = "5e" * 32
SERVICE_PORTS = {"prefill": 7001, "decode": 7002}
METRICS_PORTS = {"prefill": 9001, "decode": 9002}
KV_PORTS = range(7100, 7200)
HTTP_PORT = 8000
CONNECTIONS = 500


@dataclass
class Cluster:
    """A router and two workers on one host, which hand KV over by one backend."""

    host: Host
    workers: dict[str, int]

    def hand_off(self, number: int) -> httpx.Response:
        """One request whose prompt is computed by one worker and decoded by the other."""
        body = {"model": "baton-demo", "prompt": f"{number} " * 80, "max_tokens": 4, "seed": 1}
        url = f"http://127.0.0.1:{HTTP_PORT}/v1/completions"
        return self.host.run(lambda: httpx.post(url, json=body, timeout=60))

    def handed_over_bytes(self) -> float:
        """What the prefill worker has sent of pages."""
        url = f"http://127.0.0.1:{METRICS_PORTS['prefill']}/metrics"
        lines = self.host.run(lambda: httpx.get(url)).text.splitlines()
        return float(
            next(line for line in lines if line.startswith("baton_kv_sent_bytes_total")).split()[1]
        )

    def kv_sockets(self) -> set[tuple[str, int]]:
        """Where the workers listen beside gRPC."""
        found = set[tuple[str, int]]().union(*map(listening, self.workers.values()))
        known = {*SERVICE_PORTS.values(), *METRICS_PORTS.values()}
        return {(host, port) for host, port in found if port not in known}


@pytest.fixture(params=["ucx", "nixl"])
def backend(request: pytest.FixtureRequest) -> str:
    found = BACKENDS[request.param]
    if not found.installed:
        pytest.skip(f"not installed: {found.remedy}")
    return found.name


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture
def start(
    hosts: tuple[Host, Host], backend: str, tmp_path: Path
) -> Iterator[Callable[..., Cluster]]:
    with ExitStack() as stack:

        def start(**how: Any) -> Cluster:
            return _start(stack, hosts, backend, tmp_path, **how)

        yield start


def test_workers_listen_where_they_are_told_and_on_ports_that_they_may_take(
    start: Callable[..., Cluster], hosts: tuple[Host, Host]
) -> None:
    address = hosts[0].addresses[1]
    cluster = start(network=1)
    assert cluster.hand_off(0).status_code == 200
    assert cluster.handed_over_bytes() > 0
    found = cluster.kv_sockets()
    assert len(found) >= 3, "a region server and both workers' transports"
    assert {host for host, _ in found} == {address}
    assert {port for _, port in found} <= set(KV_PORTS)


def test_workers_that_listen_everywhere_hand_over_by_the_address_that_they_advertise(
    start: Callable[..., Cluster],
) -> None:
    cluster = start(everywhere=True)
    assert cluster.hand_off(0).status_code == 200
    assert cluster.handed_over_bytes() > 0
    assert {port for _, port in cluster.kv_sockets()} <= set(KV_PORTS)


@pytest.mark.parametrize("everywhere", [False, True])
def test_workers_on_two_hosts_hand_over(start: Callable[..., Cluster], everywhere: bool) -> None:
    cluster = start(apart=True, network=1, everywhere=everywhere)
    assert [cluster.hand_off(number).status_code for number in range(3)] == [200] * 3
    assert cluster.handed_over_bytes() > 0


def test_a_neighbour_gets_nothing_keeps_nothing_and_disturbs_nobody(
    start: Callable[..., Cluster], hosts: tuple[Host, Host]
) -> None:
    cluster = start()
    assert cluster.hand_off(0).status_code == 200
    before = {name: descriptors(pid) for name, pid in cluster.workers.items()}
    services = {(hosts[0].addresses[0], port) for port in SERVICE_PORTS.values()}
    everywhere = sorted(cluster.kv_sockets() | services)
    neighbour = hosts[1].run(lambda: _connect_to_all(everywhere))
    ports = [connection.getpeername()[1] for connection in neighbour]
    assert {port for port in ports if port in KV_PORTS}, "the region servers accept"
    assert set(SERVICE_PORTS.values()) <= set(ports)
    for number, connection in enumerate(neighbour):
        with suppress(OSError):
            connection.send(_SAID[number % len(_SAID)])
    sent = cluster.handed_over_bytes()
    replies = [cluster.hand_off(number).status_code for number in range(1, 6)]
    assert replies == [200] * 5
    assert cluster.handed_over_bytes() >= 2 * sent
    heard = [_hear(connection) for connection in neighbour]
    of_kv = [one for port, one in zip(ports, heard, strict=True) if one and port in KV_PORTS]
    of_grpc = [one for port, one in zip(ports, heard, strict=True) if one and port not in KV_PORTS]
    assert set(map(len, of_kv)) <= {CHALLENGE_BYTES}, "a nonce and no more"
    assert len(set(of_kv)) == len(of_kv), "each nonce is another"
    assert {one[0] for one in of_grpc} <= {_TLS_ALERT}, "why there is no connection, and no more"
    eventually(
        lambda: all(descriptors(pid) <= before[name] for name, pid in cluster.workers.items()),
        "both workers have as many descriptors as before",
        10,
    )
    assert cluster.hand_off(9).status_code == 200


def test_a_handshake_that_was_recorded_on_the_wire_opens_nothing(
    start: Callable[..., Cluster], hosts: tuple[Host, Host]
) -> None:
    cluster = start(apart=True)
    with hosts[0].run(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM)) as wire:
        wire.bind(("net0", _ETH_P_ALL))
        assert cluster.hand_off(0).status_code == 200
        recorded = _answers_on(wire)
    assert recorded, "the prefill worker has attached"
    for address, answer in recorded:
        heard = hosts[0].run(partial(_replay, address, answer))
        assert len(heard) == CHALLENGE_BYTES, "a nonce and no more"
    assert cluster.hand_off(1).status_code == 200


_ETH_P_ALL = 3
_TLS_ALERT = 21


def _answers_on(wire: socket.socket) -> list[tuple[tuple[str, int], bytes]]:
    """Answers to region servers' challenges among the packets that went by, and whom they were for."""
    wire.setblocking(False)
    found = []
    with suppress(BlockingIOError):
        while True:
            packet = wire.recv(65536)
            if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
                continue
            segment = packet[4 * (packet[0] & 15) : int.from_bytes(packet[2:4])]
            said = segment[4 * (segment[12] >> 4) :]
            port = int.from_bytes(segment[2:4])
            if port in KV_PORTS and len(said) == ANSWER_BYTES:
                found.append(((socket.inet_ntoa(packet[16:20]), port), said))
    return found


def _replay(address: tuple[str, int], said: bytes) -> bytes:
    connection = socket.create_connection(address, timeout=PROOF_TIMEOUT_S)
    connection.sendall(said)
    return _hear(connection)


_SAID = (b"", b"x", b"x" * ANSWER_BYTES, b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(ANSWER_BYTES - 1))


def _connect_to_all(sockets: list[tuple[str, int]]) -> list[socket.socket]:
    """Tries many connections to each; gives those that are answered within a second."""
    tried = []
    for address in sockets:
        for _ in range(CONNECTIONS // len(sockets)):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(address)
            tried.append(one)
    time.sleep(1.0)
    made = [one for one in tried if _is_connected(one)]
    for one in tried:
        if one not in made:
            one.close()
    return made


def _is_connected(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True


def _hear(connection: socket.socket) -> bytes:
    """All that the other side says until it hangs up, which it has to."""
    connection.settimeout(PROOF_TIMEOUT_S * 3)
    heard = b""
    with connection, suppress(ConnectionResetError):
        while part := connection.recv(4096):
            heard += part
    return heard


def _start(
    stack: ExitStack,
    hosts: tuple[Host, Host],
    backend: str,
    folder: Path,
    *,
    network: int = 0,
    everywhere: bool = False,
    apart: bool = False,
) -> Cluster:
    """A router and a prefill worker on the first host, a decode worker there or, `apart`, on the other. Workers are
    told their addresses in one network, or to listen `everywhere` and to advertise those.
    """
    placed = {"prefill": hosts[0], "decode": hosts[1 if apart else 0]}
    reached = {
        role: f"{host.addresses[network]}:{SERVICE_PORTS[role]}" for role, host in placed.items()
    }
    common = os.environ | {
        "BATON_CLUSTER_SECRET": SECRET,
        "BATON_CLUSTER_WORKERS": ",".join(reached.values()),
        "BATON_ROUTER_PORT": str(HTTP_PORT),
        "BATON_ROUTER_LOCAL_PREFILL_TOKENS": "0",
        "BATON_TRANSFER_BACKENDS": backend,
        "BATON_TRANSFER_PORTS": f"{KV_PORTS[0]}-{KV_PORTS[-1]}",
    }

    def process(host: Host, role: str, name: str, *flags: str) -> int:
        command = [sys.executable, "-m", "baton_cluster.cli.main", "run", role, "--name", name]
        own = common | {"BATON_CLUSTER_RUNTIME_DIR": str(folder / name)}
        started = host.start(*command, *flags, env=own)
        stack.callback(started.wait)
        stack.callback(started.kill)
        return started.pid

    pace = ("--step-s", "0.002", "--prefill-tokens-per-s", "50000")
    workers = {}
    for role, host in placed.items():
        told = ["--listen", reached[role], "--metrics", f"127.0.0.1:{METRICS_PORTS[role]}"]
        if everywhere:
            told[1] = f"0.0.0.0:{SERVICE_PORTS[role]}"
            told += ["--advertise", reached[role]]
        workers[role] = process(host, "simulated", role, "--role", role, *told, *pace)
    process(hosts[0], "router", "router", "--host", "127.0.0.1")
    url = f"http://127.0.0.1:{HTTP_PORT}/metrics"
    eventually(lambda: hosts[0].run(lambda: _has_both(url)), "the router has both workers", 60)
    return Cluster(hosts[0], workers)


def _has_both(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).text.count("vllm:cache_config_info{") == 2
    except httpx.TransportError:
        return False
