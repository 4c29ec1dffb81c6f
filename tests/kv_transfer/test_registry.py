"""Which backends are offered to a peer, by where it is."""

import asyncio
import socket
import threading

import pytest

from kv_transfer.backends.registry import offered
from kv_transfer.fakes.backend import FakeFabric, FakeSender
from tests.waits import WAIT_S

SENDERS = {
    name: FakeSender(FakeFabric(), memoryview(b""), num_blocks=0) for name in ("shm", "nixl")
}


@pytest.mark.parametrize(
    ("address", "names"),
    [
        ("unix:/run/baton/decode.sock", ["shm", "nixl"]),
        ("127.0.0.1:7001", ["shm", "nixl"]),
        ("192.0.2.1:7001", ["nixl"]),
        ("no-such-host.invalid:7001", ["nixl"]),
    ],
)
async def test_memory_of_this_host_is_offered_to_peers_on_it_only(address: str, names: list[str]):
    assert list(await offered(SENDERS, address)) == names


async def test_a_name_server_that_is_away_does_not_hold_up_the_event_loop(monkeypatch):
    asked, answer = threading.Event(), threading.Event()

    def look_up(*_args, **_kwargs):
        asked.set()
        assert answer.wait(WAIT_S)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    looking_up = asyncio.create_task(offered(SENDERS, "decode-0.decode.svc:7001"))
    assert await asyncio.to_thread(asked.wait, WAIT_S)
    assert not looking_up.done()
    answer.set()
    assert list(await looking_up) == ["nixl"]
