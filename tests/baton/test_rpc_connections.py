"""What is counted of connections, and when it is logged."""

import asyncio
import logging

import pytest

from baton.rpc import connections
from baton.rpc.connections import ConnectionCounts


async def test_connections_that_bring_no_call_are_logged_once_for_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "_LOOK_AFTER_S", 0.01)
    counts, loop = ConnectionCounts(), asyncio.get_running_loop()
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            counts.begun(loop)
            if number == 0:
                counts.called("ipv4:127.0.0.1:1")
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
    assert (counts.handshakes, counts.proven) == (100, 1)
    said = [one for one in caplog.records if "did not prove" in one.getMessage()]
    assert len(said) == 1
    told = {family.name: family.samples[0].value for family in counts.collect()}
    assert told["baton_rpc_handshakes"] == 100
    assert told["baton_rpc_proven_connections"] == 1


async def test_a_connection_counts_once_however_often_it_calls() -> None:
    counts = ConnectionCounts()
    for peer in ("a", "b", "a", "a"):
        counts.called(peer)
    assert counts.proven == 2
