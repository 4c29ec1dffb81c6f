import re
import socket

import pytest

from baton.errors import ConfigError
from baton_cluster.launch.listener import bind, url_of


def test_port_zero_takes_a_free_port_and_the_url_names_it():
    with bind("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_the_url_of_every_interface_is_that_of_loopback():
    with bind("0.0.0.0", 0) as sock:
        assert url_of(sock).startswith("http://127.0.0.1:")


def test_an_address_is_one_also_where_no_interface_has_any_of_its_kind(monkeypatch):
    """Loopback alone is none to the resolver, and a host with nothing but IPv6 has no IPv4 to it."""
    resolve = socket.getaddrinfo

    def without_interfaces(host, port, *, type, flags):
        if flags & socket.AI_ADDRCONFIG:
            raise socket.gaierror(socket.EAI_FAMILY, "Address family for hostname not supported")
        return resolve(host, port, type=type, flags=flags)

    monkeypatch.setattr(socket, "getaddrinfo", without_interfaces)
    for host in ("127.0.0.1", "0.0.0.0"):
        bind(host, 0).close()
    with pytest.raises(ConfigError, match="cannot resolve host 'localhost'"):
        bind("localhost", 0)


def test_a_taken_port_is_told_with_what_to_do():
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken; choose"):
            bind("127.0.0.1", port)


def test_a_host_that_is_not_this_machine_is_told():
    with pytest.raises(ConfigError, match="is no address of this machine"):
        bind("192.0.2.1", 0)


@pytest.mark.parametrize("host", ["no such host", "a..b", "a" * 70, "a\0b"])
def test_a_host_that_is_no_host_is_told(host):
    with pytest.raises(ConfigError, match=re.escape(f"cannot resolve host {host!r}: ")):
        bind(host, 0)
