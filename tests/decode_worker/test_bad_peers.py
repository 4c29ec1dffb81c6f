"""What a decode worker that serves makes of a prefill worker that says what it must not: refused, counted,
and it serves on.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.config.schema import TransferConfig
from baton.ids import Incarnation, XferId
from baton.rpc.v1 import transfer_pb2 as pb
from baton.rpc.v1.common_pb2 import Signed
from kv_transfer.ticket import TicketOffice
from tests.decode_worker.cluster import LAYOUT, SECRET, Pair, oracle, pair, prompt
from tests.decode_worker.raw_peer import PEER, RawPeer

OFFICE = TicketOffice(SECRET)
TIMEOUT_S = 20
ASKED = prompt(8)
PAGES = LAYOUT.num_blocks_for(8)
FORGED = b'baton_kv_tickets_refused_total{reason="forged"} 1.0'
INCARNATION = b'baton_handshake_incompatible_total{field="incarnation"} 1.0'


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[Pair]:
    """A pair that is asked for an answer after whatever a test has done to its decode worker.
    Raw peers send no heartbeats.
    """
    async with serving_on(tmp_path, TransferConfig(lease_s=60.0)) as both:
        yield both


@asynccontextmanager
async def serving_on(folder: Path, transfer: TransferConfig) -> AsyncIterator[Pair]:
    async with pair(folder, transfer=transfer) as both:
        yield both
        await both.ask(99, ASKED)
        assert await both.finished(99, 1) == oracle(both.p.runner, ASKED)


def raw(both: Pair, **options: Any) -> RawPeer:
    given = {"target": both.d.identity, "layout": LAYOUT, "office": OFFICE, **options}
    return RawPeer(both.d.address, **given)


async def counted(both: Pair, metric: bytes) -> None:
    """Looks until the worker has counted."""
    async with asyncio.timeout(TIMEOUT_S):
        while metric not in both.d.server.collect():
            await both.d.server.check()
            await asyncio.sleep(0)


def truncated(peer: RawPeer) -> Signed:
    signed = peer.office.seal_opening(peer.opening)
    return Signed(content=signed.content[:-3], mac=signed.mac)


def oversize(peer: RawPeer) -> Signed:
    peer.opening.open.layout.model_fingerprint = "f" * (5 << 20)
    return peer.office.seal_opening(peer.opening)


@pytest.mark.parametrize(
    ("spoil", "metric"),
    [
        (truncated, FORGED),
        (lambda peer: TicketOffice(b"x" * 32).seal_opening(peer.opening), FORGED),
        (lambda peer: Signed(), FORGED),
    ],
    ids=["truncated", "of another cluster", "empty"],
)
async def test_a_greeting_that_is_not_good_opens_nothing(both: Pair, spoil, metric: bytes):
    peer = raw(both)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await peer.begin(spoil(peer))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await counted(both, metric)
    await peer.close()


async def test_a_greeting_longer_than_any_honest_message_is_not_parsed(both: Pair):
    peer = raw(both)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await peer.begin(oversize(peer))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await peer.close()


async def test_a_greeting_that_is_shown_again_opens_nothing(both: Pair):
    first, again = raw(both), raw(both)
    assert (await first.begin()).HasField("accepted")
    assert (await again.begin()).refused.code == "stale_incarnation"
    await counted(both, INCARNATION)
    for peer in (first, again):
        await peer.close()


async def test_a_greeting_for_another_start_of_the_worker_opens_nothing(both: Pair):
    stale = replace(both.d.identity, incarnation=Incarnation(both.d.identity.incarnation - 1))
    peer = raw(both, target=stale)
    assert (await peer.begin()).refused.code == "stale_incarnation"
    await counted(both, INCARNATION)
    await peer.close()


async def test_another_layout_is_refused_by_its_field(both: Pair):
    peer = raw(both, layout=replace(LAYOUT, head_dim=2))
    refused = (await peer.begin()).refused
    assert (refused.code, refused.param) == ("incompatible", "head_dim")
    await counted(both, b'baton_handshake_incompatible_total{field="head_dim"} 1.0')
    await peer.close()


async def test_a_message_beyond_every_limit_ends_its_session_only(both: Pair):
    peer = raw(both)
    await peer.begin()
    await peer.say(commit=pb.CommitPages(checksums=bytes(65 << 20)))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await peer.hear()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await peer.close()


async def granted(both: Pair, peer: RawPeer, leg_id: int = 1) -> tuple[XferId, Signed]:
    """A hand-off whose pages the raw peer was granted."""
    await peer.begin()
    permit = both.permit(XferId("raw"), ASKED, source=PEER)
    await both.announce(leg_id, ASKED, permit)
    await peer.say(reserve=pb.ReservePages(permit=permit))
    assert (await peer.hear()).HasField("granted")
    return XferId("raw"), permit


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_blocks": PAGES + 1},
        {"num_bytes": 1 << 40},
        {"checksums": b"short"},
        {"checksums": bytes(8 * PAGES)},
    ],
    ids=["more pages", "more bytes", "truncated checksums", "wrong checksums"],
)
async def test_a_commit_of_what_was_not_granted_or_not_written_is_never_decoded(both: Pair, wrong):
    peer = raw(both)
    xfer_id, _ = await granted(both, peer)
    commit = {
        "num_blocks": PAGES,
        "num_bytes": PAGES * LAYOUT.page_bytes,
        "checksums": bytes(8 * PAGES),
        **wrong,
    }
    await peer.say(commit=pb.CommitPages(xfer_id=xfer_id, attempt=1, **commit))
    assert (await peer.hear()).HasField("abort")
    assert await both.failed(both.to_d, 1) in ("transfer_failed", "kv_corrupt")
    assert not both.to_d.leg(1).tokens
    await peer.close()
    await both.to_d.until(lambda: both.d.pages_in_use() == 0)


async def test_a_permit_that_is_shown_again_is_worth_nothing(both: Pair):
    peer = raw(both)
    xfer_id, permit = await granted(both, peer)
    await both.cancel(1, on_p=False)
    assert (await peer.hear()).HasField("abort")
    await peer.say(quiesced=pb.Quiesced(xfer_id=xfer_id, attempt=1))
    await both.to_d.until(lambda: both.d.pages_in_use() == 0)
    await peer.say(reserve=pb.ReservePages(permit=permit))
    assert (await peer.hear()).HasField("abort")
    await counted(both, b"baton_kv_refused_messages 1.0")
    assert both.d.pages_in_use() == 0
    await peer.close()


async def test_what_a_peer_says_after_its_lease_counts_for_nothing(tmp_path: Path):
    async with serving_on(tmp_path, TransferConfig(lease_s=1.0)) as both:
        await speak_too_late(both)


async def speak_too_late(both: Pair) -> None:
    peer = raw(both)
    xfer_id, _ = await granted(both, peer)
    await counted(both, b"baton_kv_fenced_peers_total 1.0")  # it sent no heartbeat
    await peer.say(
        commit=pb.CommitPages(
            xfer_id=xfer_id, attempt=1, num_blocks=PAGES, num_bytes=PAGES * LAYOUT.page_bytes
        )
    )
    with pytest.raises((grpc.aio.AioRpcError, EOFError)):
        await peer.hear()
    assert await both.failed(both.to_d, 1) == "unreachable"
    await both.to_d.until(lambda: both.d.pages_in_use() == 0)
    await peer.close()


async def test_a_complaint_about_a_backend_that_was_not_chosen_ends_the_session(both: Pair):
    peer = raw(both)
    await peer.begin()
    await peer.say(unreachable=pb.RegionUnreachable(backend="nixl", reason="r" * 10_000))
    with pytest.raises((grpc.aio.AioRpcError, EOFError)):
        await peer.hear()
    await peer.close()
