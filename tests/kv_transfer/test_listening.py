"""Where transports listen, and who reaches them."""

import bisect
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from unittest.mock import Mock

import pytest

from baton.errors import TransferError
from kv_transfer.memory import listening
from kv_transfer.memory.listening import Listening, PeerFilter

TIMEOUT_S = 10


@pytest.fixture
def taken() -> Iterator[range]:
    """Ports that are all taken."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
        yield range(port, port + 1)


@pytest.fixture(params=["127.0.0.1", "::1"])
def loopback(request: pytest.FixtureRequest) -> str:
    try:
        _server(request.param).close()
    except OSError as error:
        pytest.skip(f"no {request.param}: {error}")
    return str(request.param)


def _server(host: str) -> socket.socket:
    return socket.create_server(
        (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    )


def _connects(server: socket.socket, source: str) -> bool:
    host, port = server.getsockname()[:2]
    with suppress(TimeoutError):
        socket.create_connection((host, port), timeout=0.3, source_address=(source, 0)).close()
        return True
    return False


def test_ucx_is_told_the_device_of_the_address_and_the_ports() -> None:
    told = Listening(host="127.0.0.1", ports=range(7100, 7200)).ucx_settings()
    assert told["NET_DEVICES"].split(",")[0] == "lo"
    assert (told["TCP_PORT_RANGE"], told["TCP_AF_PRIO"]) == ("7100-7199", "inet")


def test_without_an_address_for_other_hosts_ucx_keeps_to_this_one() -> None:
    told = Listening.at("unix:/run/x.sock", "", "").ucx_settings()
    assert told["NET_DEVICES"].split(",")[0] == "lo"


def test_an_operators_own_setting_of_ucx_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert "NET_DEVICES" not in Listening(host="127.0.0.1").ucx_settings()


def test_an_address_that_is_not_of_this_host_is_refused() -> None:
    with pytest.raises(TransferError, match=r"no network device has the address 192\.0\.2\.77"):
        Listening(host="192.0.2.77").ucx_settings()


def test_ucx_is_not_started_where_no_port_is_left(taken: range) -> None:
    with pytest.raises(TransferError, match=r"none of transfer\.ports"):
        Listening(host="127.0.0.1", ports=taken).ucx_settings()


def test_a_region_server_takes_a_port_that_it_may(taken: range) -> None:
    with pytest.raises(OSError, match=r"none of transfer\.ports"):
        Listening(ports=taken).bind("127.0.0.1")
    ports = range(taken[0], min(taken[0] + 50, 65536))
    with Listening(ports=ports).bind("127.0.0.1") as listener:
        assert listener.getsockname()[1] in ports


@pytest.mark.parametrize(
    ("address", "advertised", "host", "told"),
    [
        ("10.0.0.1:7001", "d.example:7001", "10.0.0.1", ""),
        ("0.0.0.0:7001", "d.example:7001", "0.0.0.0", "d.example"),
        ("unix:/run/x", "", "", ""),
    ],
)
def test_peers_are_told_another_host_where_the_own_one_is_none(
    address: str, advertised: str, host: str, told: str
) -> None:
    listening = Listening.at(address, "7100-7199", advertised)
    assert (listening.host, listening.advertised_host) == (host, told)
    assert listening.ports == range(7100, 7200)


def test_a_peer_is_reached_from_the_address_of_the_route_to_it(loopback: str) -> None:
    with (
        _server(loopback) as server,
        socket.create_connection(server.getsockname()[:2]) as connection,
    ):
        everywhere = Listening(host="0.0.0.0")
        assert everywhere.towards(connection).host == loopback
        assert Listening(host="10.0.0.1").towards(connection).host == "10.0.0.1"


def _admit(peers: PeerFilter, host: str) -> None:
    """A peer of that host proves itself."""
    with _server("127.0.0.1") as region, socket.socket() as peer:
        peer.bind((host, 0))
        peer.connect(region.getsockname())
        with region.accept()[0] as proven:
            peers.admit(proven)


def test_a_filter_lets_in_the_hosts_of_proven_peers_and_nobody_else() -> None:
    peers = PeerFilter(Listening(host="127.0.0.1"))
    with peers.opening():
        server = _server("127.0.0.1")
    with server:
        assert not _connects(server, "127.0.0.1")
        _admit(peers, "127.0.0.9")
        assert _connects(server, "127.0.0.9")
        assert not _connects(server, "127.0.0.8")
        assert not _connects(server, "127.0.0.1")
    peers.close()


def test_a_filter_of_more_hosts_than_the_kernel_takes_keeps_those_of_the_latest_proofs() -> None:
    hosts = [f"127.1.{i // 250}.{1 + i % 250}" for i in range(2300)]
    peers = PeerFilter(Listening(host="127.0.0.1"))
    for host in hosts:
        _admit(peers, host)
    with peers.opening():
        server = _server("127.0.0.1")
    with server:
        oldest = bisect.bisect(hosts, False, key=lambda host: _connects(server, host))
        assert 0 < oldest < len(hosts) - 20, "some are dropped, and others are not"
        for host in hosts[-20:]:
            assert _connects(server, host)
        _admit(peers, hosts[0])
        assert _connects(server, hosts[0])
    peers.close()


def test_a_connection_stays_when_its_host_is_dropped_from_a_filter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "_LONGEST_FILTER", 11)  # four hosts
    peers = PeerFilter(Listening(host="127.0.0.1"))
    with peers.opening():
        server = _server("127.0.0.1")
    with server, ExitStack() as stack:
        _admit(peers, "127.0.0.2")
        near = stack.enter_context(
            socket.create_connection(server.getsockname(), source_address=("127.0.0.2", 0))
        )
        far = stack.enter_context(server.accept()[0])
        for last in range(3, 7):
            _admit(peers, f"127.0.0.{last}")
        assert not _connects(server, "127.0.0.2")
        assert _connects(server, "127.0.0.3")
        near.sendall(b"here")
        assert far.recv(4) == b"here"
        _admit(peers, "127.0.0.3")  # is now the one that was proven last
        _admit(peers, "127.0.0.7")
        assert _connects(server, "127.0.0.3")
        assert not _connects(server, "127.0.0.4")
    peers.close()


def test_a_filter_of_several_hosts_knows_whole_addresses(loopback: str) -> None:
    others = ("::2", "0:0:0:1::1") if ":" in loopback else ("127.0.0.2", "128.0.0.1")
    peers = PeerFilter(Listening(host=loopback))
    with peers.opening():
        server = _server(loopback)

    def admit(host: str) -> None:
        peer = Mock(spec=socket.socket, family=server.family)
        peer.getpeername.return_value = (host, 1)
        peers.admit(peer)

    with server:
        for host in others:
            admit(host)
        assert not _connects(server, loopback)
        admit(loopback)
        for host in others:
            admit(host)
        assert _connects(server, loopback)
    peers.close()


def test_a_filter_knows_addresses_of_both_families(loopback: str) -> None:
    peers = PeerFilter(Listening(host=loopback))
    with peers.opening():
        server = _server(loopback)
    with server, _server(loopback) as region:
        assert not _connects(server, loopback)
        with socket.create_connection(region.getsockname()[:2]) as proven:
            peers.admit(proven)
        assert _connects(server, loopback)
    peers.close()


def test_peers_of_this_host_come_from_its_own_address() -> None:
    peers = PeerFilter(Listening())
    near, far = socket.socketpair()
    with near, far:
        peers.admit(near)
    with peers.opening():
        server = _server("127.0.0.1")
    with server:
        assert _connects(server, "127.0.0.1")
    peers.close()


def test_a_library_that_listens_elsewhere_is_refused() -> None:
    peers = PeerFilter(Listening(host="127.0.0.1"))
    refused = pytest.raises(TransferError, match=r"UCX listens at 127\.0\.0\.2 and not at")
    with ExitStack() as stack, refused, peers.opening():
        stack.enter_context(_server("127.0.0.2"))
    peers.close()


def test_a_filter_leaves_no_descriptors_and_no_port_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    peers = PeerFilter(Listening(host="127.0.0.1"))
    with peers.opening():
        server = _server("127.0.0.1")
    address = server.getsockname()
    server.close()
    peers.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=TIMEOUT_S)
