"""Where a worker on a Ray node listens; the actor itself is in tests/e2e/test_ray.py."""

import socket

import pytest

from baton.errors import UnavailableError
from baton_cluster.launch.ray_worker import free_port

HOST = "127.0.0.1"


def test_without_a_range_any_port_will_do():
    assert free_port(HOST, "decode-0", None) > 0


def test_a_worker_takes_another_port_of_the_range_where_one_is_taken():
    with socket.create_server((HOST, 0)) as taken, socket.create_server((HOST, 0)) as left:
        port, free = taken.getsockname()[1], left.getsockname()[1]
        left.close()
        ports = range(port, free + (1 if free > port else -1), free - port)
        for name in ("decode-0", "decode-1", "prefill-0", "prefill-7"):
            assert free_port(HOST, name, ports) == free


def test_workers_begin_to_look_in_different_places():
    ports = range(20_000, 30_000)
    found = {free_port(HOST, f"decode-{number}", ports) for number in range(8)}
    assert len(found) == 8
    assert all(port in ports for port in found)


def test_where_no_port_is_free_the_setting_is_named():
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UnavailableError, match=r"decode-0: no port of ray.worker_ports is free"
        ):
            free_port(HOST, "decode-0", range(port, port + 1))


def test_a_port_whose_last_connections_have_just_ended_is_free():
    """As of a worker that was killed: its successor is started at once."""
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection((HOST, port))
        accepted, _ = server.accept()
        accepted.close()
        client.close()
    assert free_port(HOST, "decode-0", range(port, port + 1)) == port
