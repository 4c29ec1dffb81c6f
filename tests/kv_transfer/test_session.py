"""The handshake between two workers over real gRPC, with fake memory."""

import asyncio
import errno
import gc
import itertools
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.clock import MonotonicClock
from baton.config.rules import RULES
from baton.errors import (
    BatonError,
    IncompatibleError,
    TicketError,
    TransferError,
    UnreachableError,
)
from baton.ids import BlockId, Incarnation, LayerName, WorkerId, WorkerIdentity, XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from baton.rpc.channel import bind, new_server, open_channel
from baton.rpc.hello import PROTOCOL_VERSION, identity_to_proto, layout_from_proto, layout_to_proto
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import transfer_pb2 as pb
from baton.rpc.v1 import transfer_pb2_grpc as pb_grpc
from baton.rpc.v1.common_pb2 import Failure, Signed
from kv_transfer.fakes.backend import FakeFabric, FakeReceiver, FakeSender, FakeWriter
from kv_transfer.heads import LinkPlan, plan_link
from kv_transfer.memory.page_hash import ArenaHashes, Checksum
from kv_transfer.messages import Heartbeat, PagesGranted, Reserve, SessionId, ToDecode, ToPrefill
from kv_transfer.plan import Grant
from kv_transfer.ports import Done, KvWriter, Lease, RegionHandle
from kv_transfer.session.client import PeerSession
from kv_transfer.session.connection import OpenedSession, PageWriter
from kv_transfer.session.handshake import (
    Accepted,
    SessionEndpoint,
    SessionOffer,
    accept,
    read_accepted,
    refused_field,
)
from kv_transfer.session.link_speed import LinkSpeed
from kv_transfer.session.seal import SessionSeal
from kv_transfer.session.server import TransferService
from kv_transfer.ticket import TicketOffice, shown
from tests.kv_transfer.conformance import LAYOUT, RECEIVER_BLOCKS, SENDER_BLOCKS, push
from tests.kv_transfer.permits import OFFICE, D, P, permit
from tests.waits import soon

TIMEOUT_S = 20
LEASE_S = 20.0
NUMBERS = itertools.count(1)
X = XferId("x")
NO_LAYOUT = layout_from_proto(common_pb2.KvLayout()).digest()
NOBODY = WorkerIdentity(worker_id=WorkerId(""), incarnation=Incarnation(0))


@dataclass
class Heard:
    """Both sides' listener."""

    events: asyncio.Queue[tuple[str, object]] = field(default_factory=asyncio.Queue)
    link: LinkPlan | None = None
    speed: LinkSpeed | None = None
    writer: PageWriter | None = None
    fields: list[str] = field(default_factory=list)
    beats: int = 0

    def on_open(self, peer: WorkerIdentity, opened: OpenedSession) -> None:
        self.link, self.speed, self.writer = opened.link, opened.speed, opened.writer
        self.events.put_nowait(("open", opened.region_blocks))

    def on_unreachable(self, peer: WorkerIdentity, backend: str, error: TransferError) -> None:
        self.events.put_nowait(("unreachable", backend))

    def on_handshake_refused(self, field: str) -> None:
        self.fields.append(field)

    def on_message(self, peer: WorkerIdentity, message: ToPrefill) -> None:
        self.events.put_nowait(("message", message))

    def on_lost(self, peer: WorkerIdentity, error: BatonError) -> None:
        self.events.put_nowait(("lost", error))

    def on_session_open(self, session: SessionId, peer: WorkerIdentity, link: LinkPlan) -> None:
        self.link = link

    def on_ticket_refused(self, error: TicketError) -> None:
        self.events.put_nowait(("ticket refused", error.param))

    def on_peer_message(self, session: SessionId, peer: WorkerIdentity, message: ToDecode) -> None:
        if isinstance(message, Heartbeat):
            self.beats += 1
            return
        self.events.put_nowait(("asked", message))

    def on_session_lost(self, session: SessionId) -> None:
        self.events.put_nowait(("session lost", session))

    def on_peer_fenced(self, session: SessionId) -> None:
        self.events.put_nowait(("fenced", session))

    async def next(self) -> tuple[str, object]:
        return await asyncio.wait_for(self.events.get(), TIMEOUT_S)


@dataclass
class Serving:
    service: TransferService
    at_d: Heard
    at_p: Heard
    address: str
    sender: FakeSender
    receiver: FakeReceiver
    source: memoryview
    target: memoryview
    server: grpc.aio.Server

    def dial(
        self, *, peer=D, layout=LAYOUT, backend="fake", senders=None, spare=None
    ) -> PeerSession:
        return PeerSession(
            here=SessionEndpoint(identity=P, layout=layout, office=OFFICE),
            peer=peer,
            address=self.address,
            senders=senders or {backend: self.sender},
            spare=spare,
            listener=self.at_p,
            hashes={Checksum.XXH3: ArenaHashes(self.source, LAYOUT, num_blocks=SENDER_BLOCKS)},
            clock=MonotonicClock(),
            number=next(NUMBERS),
        )


@asynccontextmanager
async def serving(
    folder: Path,
    layout: KvLayout = LAYOUT,
    backends=("fake",),
    spare: int = 0,
    checksum: Checksum = Checksum.XXH3,
):
    fabric = FakeFabric()
    target = memoryview(bytearray(LAYOUT.region_bytes(RECEIVER_BLOCKS)))
    source = memoryview(bytearray(LAYOUT.region_bytes(SENDER_BLOCKS)))
    at_d = Heard()
    receiver = FakeReceiver(fabric, target, num_blocks=RECEIVER_BLOCKS)
    service = TransferService(
        here=SessionEndpoint(identity=D, layout=layout, office=OFFICE),
        offer=SessionOffer(num_blocks=RECEIVER_BLOCKS - spare, lease_s=LEASE_S, checksum=checksum),
        receivers={
            name: FakeReceiver(fabric, target, num_blocks=RECEIVER_BLOCKS, backend=name)
            for name in backends
        },
        host=at_d,
    )
    server = new_server()
    pb_grpc.add_TransferServicer_to_server(service, server)
    address = bind(server, f"unix:{folder}/d.sock")
    await server.start()
    sender = FakeSender(fabric, source, num_blocks=SENDER_BLOCKS)
    here = Serving(
        service=service,
        at_d=at_d,
        at_p=Heard(),
        address=address,
        sender=sender,
        receiver=receiver,
        source=source,
        target=target,
        server=server,
    )
    try:
        yield here
    finally:
        await here.server.stop(0)


async def test_messages_travel_both_ways_and_the_end_is_told_on_both_sides(tmp_path: Path):
    async with serving(tmp_path) as both:
        session = both.dial()
        assert await both.at_p.next() == ("open", RECEIVER_BLOCKS)
        asked = Reserve(permit=permit(layout_digest=LAYOUT.content_digest()))
        session.send(asked)
        assert await both.at_d.next() == ("asked", asked)
        grant = PagesGranted(
            xfer_id=X,
            attempt=1,
            cache_scope="tenant",
            grant=Grant(held_blocks=1, blocks=(BlockId(4), BlockId(2))),
        )
        both.service.send(SessionId(1), grant)
        assert await both.at_p.next() == ("message", grant)
        await session.close()
        assert (await both.at_p.next())[0] == "lost"
        assert await both.at_d.next() == ("session lost", SessionId(1))
        assert await both.at_d.next() == ("fenced", SessionId(1))
        assert both.sender.writers[0].closed


@pytest.mark.parametrize(
    ("options", "code", "names"),
    [
        ({"layout": replace(LAYOUT, head_dim=16)}, "incompatible", "head_dim: 8 here, 16 there"),
        ({"layout": replace(LAYOUT, model_fingerprint="g")}, "incompatible", "model_fingerprint"),
        ({"layout": replace(LAYOUT, tp_size=2)}, "incompatible", "total_kv_heads: 2 here, 4 there"),
        ({"layout": replace(LAYOUT, tp_rank=3)}, "incompatible", "tp_rank: 3 of 1"),
        ({"layout": replace(LAYOUT, kv_head_replicas=0)}, "incompatible", "kv_head_replicas: 0"),
        (
            {"layout": replace(LAYOUT, layers=(LayerName("z"),))},
            "incompatible",
            "layers: none of 3 here",
        ),
        ({"backend": "other"}, "incompatible", "backends"),
        ({"peer": replace(D, incarnation=Incarnation(3))}, "stale_incarnation", "d@3"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, options, code, names):
    async with serving(tmp_path) as both:
        both.dial(**options)
        what, error = await both.at_p.next()
        assert what == "lost"
        assert isinstance(error, BatonError)
        assert error.code == code
        assert names in error.message
        assert both.service.sessions == 0
        assert both.at_d.fields == [
            names.partition(":")[0] if code == "incompatible" else "incarnation"
        ]


async def test_a_rank_of_another_tensor_parallelism_writes_its_heads(tmp_path: Path):
    async with serving(tmp_path) as both:
        half = replace(LAYOUT, num_kv_heads=1, tp_size=2, tp_rank=1)
        both.source[:] = bytes(range(256)) * (len(both.source) // 256)
        session = both.dial(layout=half)
        assert await both.at_p.next() == ("open", RECEIVER_BLOCKS)
        assert both.at_p.link == plan_link(half, LAYOUT)
        both.sender.writers[0].push(push(0, [3], [4]), _no_error)
        wanted = bytearray(len(both.target))
        here, there = 3 * half.page_layer_bytes, 4 * LAYOUT.page_layer_bytes
        wanted[there + half.head_bytes : there + 2 * half.head_bytes] = both.source[
            here : here + half.head_bytes
        ]
        assert bytes(both.target) == bytes(wanted)
        await session.close()


async def test_a_checksum_that_the_prefill_worker_cannot_compute_is_refused_by_name(
    tmp_path: Path,
):
    async with serving(tmp_path, checksum=Checksum.WORD_SUM) as both:
        both.dial()
        what, error = await both.at_p.next()
        assert what == "lost"
        assert isinstance(error, IncompatibleError)
        assert refused_field(error) == "checksum"
        assert "word_sum there" in error.message


@pytest.mark.parametrize(
    ("wanted", "named", "found"),
    [
        (True, "", Checksum.XXH3),  # said before there were several
        (True, "word_sum", Checksum.WORD_SUM),
        (False, "", None),
    ],
)
def test_the_decode_worker_says_which_checksum_it_wants(
    wanted: bool, named: str, found: Checksum | None
):
    assert _read(checksums=wanted, checksum=named).checksum is found


def test_a_checksum_of_a_later_version_is_refused_by_name():
    with pytest.raises(IncompatibleError, match="checksum: 'crc9' there") as caught:
        _read(checksums=True, checksum="crc9")
    assert refused_field(caught.value) == "checksum"


@pytest.mark.parametrize(
    ("lease_ms", "is_taken"), [(49, False), (50, True), (3_600_000, True), (3_600_001, False)]
)
def test_a_lease_is_taken_where_the_config_allows_it(lease_ms, is_taken):
    (rule,) = (rule for rule in RULES if rule.path == "transfer.lease_s")
    assert rule.holds(lease_ms / 1000) == is_taken
    with nullcontext() if is_taken else pytest.raises(IncompatibleError, match="lease_ms"):
        assert _read(lease_ms=lease_ms).lease_s == lease_ms / 1000


def _read(**said: Any) -> Accepted:
    here = SessionEndpoint(identity=D, layout=LAYOUT, office=OFFICE)
    offer = SessionOffer(num_blocks=RECEIVER_BLOCKS, lease_s=LEASE_S, checksum=None)
    handle = RegionHandle(backend="fake", opaque=b"x", num_blocks=RECEIVER_BLOCKS)
    accepted = accept(here, offer, handle)
    accepted.MergeFrom(pb.SessionAccepted(**said))
    at_p = SessionEndpoint(identity=P, layout=LAYOUT, office=OFFICE)
    return read_accepted(accepted, at_p, D, ["fake"])


@dataclass
class Reluctant:
    """A sender whose writers take their time to close."""

    real: FakeSender
    may_close: threading.Event = field(default_factory=threading.Event)
    writers: list["ReluctantWriter"] = field(default_factory=list)

    def connect(
        self,
        handle: RegionHandle,
        layout: KvLayout,
        peer: KvLayout | None = None,
        lease: Lease | None = None,
    ) -> KvWriter:
        self.writers.append(
            ReluctantWriter(self.real.connect(handle, layout, peer, lease), self.may_close)
        )
        return self.writers[-1]


@dataclass
class ReluctantWriter:
    real: FakeWriter
    may_close: threading.Event

    def push(self, write: PageWrite, done: Done) -> None:
        self.real.push(write, done)

    def close(self) -> None:
        assert self.may_close.wait(TIMEOUT_S)
        self.real.close()


async def test_closing_a_session_that_its_peer_ended_waits_for_what_is_still_written(
    tmp_path: Path,
):
    async with serving(tmp_path) as both:
        slow = Reluctant(both.sender)
        session = both.dial(senders={"fake": slow})
        assert await both.at_p.next() == ("open", RECEIVER_BLOCKS)
        both.service.end(SessionId(1), TransferError("enough"))
        assert (await both.at_p.next())[0] == "lost"
        closing = asyncio.create_task(session.close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        slow.may_close.set()
        await closing
        assert slow.writers[0].real.closed


@dataclass
class Unreachable:
    """A backend that is installed on both sides and does not work between them."""

    error: Exception = field(default_factory=lambda: TransferError("no such device"))

    def connect(
        self,
        handle: RegionHandle,
        layout: KvLayout,
        peer: KvLayout | None = None,
        lease: Lease | None = None,
    ) -> KvWriter:
        raise self.error


@pytest.mark.parametrize(
    "error", [TransferError("no such device"), OSError(errno.EMFILE, "Too many open files")]
)
async def test_a_backend_that_does_not_work_gives_way_to_the_next_that_both_have(
    tmp_path: Path, error: Exception
):
    async with serving(tmp_path, backends=("best", "fake")) as both:
        senders = {"best": Unreachable(error), "only here": both.sender, "fake": both.sender}
        session = both.dial(senders=senders)
        assert await both.at_p.next() == ("unreachable", "best")
        assert await both.at_p.next() == ("open", RECEIVER_BLOCKS)
        session.send(Reserve(permit=permit(layout_digest=LAYOUT.content_digest())))
        assert (await both.at_d.next())[0] == "asked"
        grant = PagesGranted(
            xfer_id=X,
            attempt=1,
            cache_scope="",
            grant=Grant(held_blocks=0, blocks=(BlockId(1),)),
        )
        both.service.send(SessionId(1), grant)
        assert await both.at_p.next() == (
            "message",
            grant,
        )  # its ticket is bound to the second region
        await session.close()
        assert (await both.at_p.next())[0] == "lost"
        assert await both.at_d.next() == ("session lost", SessionId(1))
        assert await both.at_d.next() == ("fenced", SessionId(1))


async def test_a_pair_without_any_way_between_them_now_is_unreachable_and_not_incompatible(
    tmp_path: Path,
):
    async with serving(tmp_path, backends=("best", "fake")) as both:
        both.dial(senders={"best": Unreachable(), "fake": Unreachable()})
        assert await both.at_p.next() == ("unreachable", "best")
        assert await both.at_p.next() == ("unreachable", "fake")
        what, error = await both.at_p.next()
        assert what == "lost"
        assert type(error) is UnreachableError
        assert refused_field(error) is None
        assert both.at_d.fields == []


class Hanging:
    """A backend that finds neither the peer nor an end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def connect(
        self,
        handle: RegionHandle,
        layout: KvLayout,
        peer: KvLayout | None = None,
        lease: Lease | None = None,
    ) -> KvWriter:
        assert self.may_end.wait(TIMEOUT_S)
        raise TransferError("no such device")


async def test_a_backend_that_does_not_end_is_given_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kv_transfer.session.client._MAP_TIMEOUT_S", 0.05)
    async with serving(tmp_path) as both:
        hanging = Hanging()
        session = both.dial(senders={"fake": hanging})
        what, error = await both.at_p.next()
        assert what == "lost"
        assert type(error) is UnreachableError
        hanging.may_end.set()
        await session.close()


async def test_a_session_whose_pages_do_not_pass_any_more_ends_and_the_next_one_works(
    tmp_path: Path,
):
    async with serving(tmp_path) as both:
        both.dial()
        assert await both.at_p.next() == ("open", RECEIVER_BLOCKS)
        assert both.at_p.writer is not None
        both.sender.writers[0].broken = True
        both.at_p.writer.push(push(0, [3], [4]), lambda error, hashes: None)
        what, error = await both.at_p.next()
        assert what == "lost"
        assert type(error) is UnreachableError
        assert await both.at_d.next() == ("session lost", SessionId(1))
        assert await both.at_d.next() == ("fenced", SessionId(1))
        again = both.dial()
        assert await both.at_p.next() == ("open", RECEIVER_BLOCKS)
        await again.close()


async def test_a_link_is_tried_on_the_spare_page_before_it_is_used(tmp_path: Path):
    async with serving(tmp_path, spare=1) as both:
        both.source[:] = b"s" * len(both.source)
        session = both.dial(spare=BlockId(SENDER_BLOCKS - 1))
        assert await both.at_p.next() == ("open", RECEIVER_BLOCKS - 1)
        begin = (RECEIVER_BLOCKS - 1) * LAYOUT.page_layer_bytes
        assert bytes(both.target[begin : begin + 4]) == b"ssss"
        assert not any(both.target[:begin])
        assert both.at_p.speed is not None
        assert both.at_p.speed.bytes_per_second > 0
        assert both.at_p.speed.latency_s > 0
        await session.close()


async def test_a_backend_whose_link_carries_nothing_gives_way(tmp_path: Path):
    async with serving(tmp_path, backends=("best", "fake"), spare=1) as both:
        mute = FakeSender(FakeFabric(), both.source, num_blocks=SENDER_BLOCKS)
        mute.fabric = both.sender.fabric
        mute.broken = True
        session = both.dial(
            senders={"best": mute, "fake": both.sender}, spare=BlockId(SENDER_BLOCKS - 1)
        )
        assert await both.at_p.next() == ("unreachable", "best")
        assert await both.at_p.next() == ("open", RECEIVER_BLOCKS - 1)
        assert mute.writers[0].closed
        await session.close()


async def test_ranks_of_one_worker_open_sessions_of_their_own(tmp_path: Path):
    """Each counts its own greetings."""
    ranks = [replace(LAYOUT, num_kv_heads=1, tp_size=2, tp_rank=rank) for rank in (0, 1)]
    async with serving(tmp_path) as both, open_channel(both.address) as channel:
        for rank in ranks:
            raw = RawSession(channel, number=1, layout=rank)
            assert (await raw.begin()).HasField("accepted")


async def test_a_pair_of_ranks_that_share_no_heads_is_refused_by_name(tmp_path: Path):
    first = replace(LAYOUT, num_kv_heads=1, tp_size=2)
    async with serving(tmp_path, layout=first) as both:
        both.dial(layout=replace(first, tp_rank=1))
        what, error = await both.at_p.next()
        assert what == "lost"
        assert isinstance(error, BatonError)
        assert error.code == "incompatible"
        assert "tp_rank: 1 of 2 has no heads to send to 0 of 2" in error.message


async def test_a_peer_that_tells_no_layout_of_its_region_is_refused_by_name(tmp_path: Path):
    class Forgetful(pb_grpc.TransferServicer):
        async def Session(self, request_iterator, context):  # noqa: N802  # the stub's name
            identity = identity_to_proto(D)
            accepted = pb.SessionAccepted(identity=identity, backend="fake", num_blocks=1)
            seal = await opened(request_iterator)
            yield seal.seal(pb.TransferReply(accepted=accepted))
            await asyncio.Event().wait()

    async with serving(tmp_path) as both:
        server = new_server()
        pb_grpc.add_TransferServicer_to_server(Forgetful(), server)
        both.address = bind(server, f"unix:{tmp_path}/forgetful.sock")
        await server.start()
        session = both.dial()
        what, error = await both.at_p.next()
        assert what == "lost"
        assert isinstance(error, BatonError)
        assert (error.code, error.message[:27]) == ("incompatible", "KV layouts differ in dtype:")
        await session.close()
        await server.stop(0)


def _no_error(error: BatonError | None) -> None:
    assert error is None


async def test_nobody_at_the_address_is_told_as_unreachable(tmp_path: Path):
    async with serving(tmp_path) as both:
        both.address = f"unix:{tmp_path}/nobody.sock"
        both.dial()
        what, error = await both.at_p.next()
        assert what == "lost"
        assert isinstance(error, BatonError)
        assert error.code == "unreachable"


class Silent(pb_grpc.TransferServicer):
    """A decode worker that hears the greeting, and breaks off or says nothing."""

    def __init__(self, *, breaks: bool) -> None:
        self._breaks = breaks
        self.greeted = asyncio.Event()

    async def Session(self, request_iterator, context):  # noqa: N802  # the stub's name
        await anext(aiter(request_iterator))
        self.greeted.set()
        if self._breaks:
            await context.abort(grpc.StatusCode.INTERNAL, "broken")
        await asyncio.Event().wait()
        yield Signed()


@pytest.mark.parametrize(
    "end", ["refused", "nobody", "broken", "silent", "cut off", "server gone", "link lost"]
)
async def test_however_a_session_ends_it_leaves_no_task_behind(
    tmp_path: Path, end: str, caplog: pytest.LogCaptureFixture
):
    async with serving(tmp_path) as both:
        before = asyncio.all_tasks()
        silent = Silent(breaks=end == "broken")
        if end == "nobody":
            both.address = f"unix:{tmp_path}/nobody.sock"
        elif end in ("broken", "silent"):
            await both.server.stop(0)
            both.server = new_server()
            pb_grpc.add_TransferServicer_to_server(silent, both.server)
            both.address = bind(both.server, f"unix:{tmp_path}/silent.sock")
            await both.server.start()
        session = both.dial(peer=replace(D, incarnation=Incarnation(3)) if end == "refused" else D)
        if end in ("cut off", "server gone", "link lost"):
            assert await both.at_p.next() == ("open", RECEIVER_BLOCKS)
        match end:
            case "silent":
                await asyncio.wait_for(silent.greeted.wait(), TIMEOUT_S)
                await session.close()
            case "cut off":
                both.service.end(SessionId(1), TransferError("enough"))
            case "server gone":
                await both.server.stop(0)
            case "link lost":
                both.sender.writers[0].broken = True
                assert both.at_p.writer is not None
                both.at_p.writer.push(push(0, [3], [4]), lambda error, hashes: None)
        assert (await both.at_p.next())[0] == "lost"
        await session.close()
        await both.server.stop(0)
        for _ in range(100):
            left = asyncio.all_tasks() - before
            if not left:
                break
            await asyncio.sleep(0.01)
        assert not left
        gc.collect()
        await asyncio.sleep(0)
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


async def test_a_session_that_does_not_begin_with_open_is_refused(tmp_path: Path):
    async with serving(tmp_path) as both, open_channel(both.address) as channel:
        raw = RawSession(channel, number=0)
        raw.seal = SessionSeal(OFFICE.session_key(NOBODY, NOBODY, 0, NO_LAYOUT), prefills=True)
        reply = await raw.begin(pb.TransferRequest(reserve=pb.ReservePages()))
        assert reply.refused.code == "incompatible"


async def opened(requests: AsyncIterator[Signed]) -> SessionSeal:
    """D's seal of the session that a prefill worker opens."""
    hello = OFFICE.open_opening(await anext(aiter(requests))).open
    rank = layout_from_proto(hello.layout).digest()
    return SessionSeal(OFFICE.session_key(P, D, hello.number, rank), prefills=False)


class RawSession:
    """A prefill worker's end of a session, message by message."""

    def __init__(
        self, channel: grpc.aio.Channel, *, number: int, layout: KvLayout = LAYOUT
    ) -> None:
        stub: Any = pb_grpc.TransferStub(channel)
        self.call = stub.Session()
        self.seal = SessionSeal(OFFICE.session_key(P, D, number, layout.digest()), prefills=True)
        self.hello = pb.OpenSession(
            protocol_version=PROTOCOL_VERSION,
            identity=identity_to_proto(P),
            expected_peer=identity_to_proto(D),
            layout=layout_to_proto(layout),
            backends=["fake"],
            number=number,
        )

    async def begin(
        self, opening: pb.TransferRequest | None = None, office: TicketOffice = OFFICE
    ) -> pb.TransferReply:
        """Opens the session."""
        await self.call.write(office.seal_opening(opening or pb.TransferRequest(open=self.hello)))
        return await self.read()

    async def write(self, **request: Any) -> None:
        """Says the next thing."""
        await self.call.write(self.seal.seal(pb.TransferRequest(**request)))

    async def read(self) -> pb.TransferReply:
        """What D says next."""
        return self.seal.open(await soon(self.call.read()), pb.TransferReply())


async def test_nonsense_in_a_session_ends_it(tmp_path: Path):
    async with serving(tmp_path) as both, open_channel(both.address) as channel:
        raw = RawSession(channel, number=7)
        assert (await raw.begin()).HasField("accepted")
        await raw.write()
        assert await both.at_d.next() == ("session lost", SessionId(1))
        assert await both.at_d.next() == ("fenced", SessionId(1))


@pytest.mark.parametrize("harm", ["altered", "left out", "said twice", "of another session"])
async def test_a_message_that_is_not_what_was_said_next_is_counted_and_ends_the_session(
    tmp_path: Path, harm: str
):
    async with serving(tmp_path) as both, open_channel(both.address) as channel:
        raw = RawSession(channel, number=7)
        await raw.begin()
        await raw.write(heartbeat=pb.Heartbeat(number=1))
        assert (await raw.read()).heartbeat.number == 1
        beat = pb.TransferRequest(heartbeat=pb.Heartbeat(number=2))
        signed = raw.seal.seal(beat)
        match harm:
            case "altered":
                signed.content = signed.content[:-1] + bytes([signed.content[-1] ^ 1])
            case "left out":
                signed = raw.seal.seal(beat)
            case "said twice":
                await raw.call.write(signed)
            case "of another session":
                other = SessionSeal(OFFICE.session_key(P, D, 8, LAYOUT.digest()), prefills=True)
                signed = [other.seal(beat), other.seal(beat)][-1]
        await raw.call.write(signed)
        assert await both.at_d.next() == ("ticket refused", "seal")
        assert await both.at_d.next() == ("session lost", SessionId(1))


async def test_a_reply_that_was_altered_ends_the_session(tmp_path: Path):
    class Garbled(pb_grpc.TransferServicer):
        async def Session(self, request_iterator, context):  # noqa: N802  # the stub's name
            seal = await opened(request_iterator)
            signed = seal.seal(pb.TransferReply(refused=Failure(code="overloaded")))
            signed.content += b"?"
            yield signed
            await asyncio.Event().wait()

    async with serving(tmp_path) as both:
        server = new_server()
        pb_grpc.add_TransferServicer_to_server(Garbled(), server)
        both.address = bind(server, f"unix:{tmp_path}/garbled.sock")
        await server.start()
        session = both.dial()
        what, error = await both.at_p.next()
        assert what == "lost"
        assert isinstance(error, BatonError)
        assert error.code == "ticket_refused"
        await session.close()
        await server.stop(0)


async def test_a_greeting_opens_one_session_and_cannot_be_replayed(tmp_path: Path):
    async with serving(tmp_path) as both, open_channel(both.address) as channel:
        assert (await RawSession(channel, number=7).begin()).HasField("accepted")
        again = await RawSession(channel, number=7).begin()
        assert again.refused.code == "stale_incarnation"


async def test_who_is_not_of_this_cluster_gets_no_region(tmp_path: Path):
    async with serving(tmp_path) as both, open_channel(both.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await RawSession(channel, number=7).begin(office=TicketOffice(b"x" * 32))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert both.at_d.events.get_nowait() == ("ticket refused", "forged")
        assert both.service.sessions == 0


async def test_a_permit_that_is_not_good_is_dropped_and_the_session_goes_on(tmp_path: Path):
    async with serving(tmp_path) as both, open_channel(both.address) as channel:
        raw = RawSession(channel, number=7)
        await raw.begin()
        digest = LAYOUT.content_digest()
        elsewhere = permit(target=P, layout_digest=digest)
        for signed in (pb.ReservePages().permit, shown(elsewhere), shown(permit())):
            await raw.write(reserve=pb.ReservePages(permit=signed))
        await raw.write(heartbeat=pb.Heartbeat(number=3))
        assert (await raw.read()).heartbeat.number == 3
        refused = [await both.at_d.next() for _ in range(3)]
        assert refused == [("ticket refused", reason) for reason in ("forged", "holder", "holder")]


async def test_a_peer_that_answers_no_heartbeat_is_lost_after_its_lease(tmp_path: Path):
    class Deaf(pb_grpc.TransferServicer):
        async def Session(self, request_iterator, context):  # noqa: N802  # the stub's name
            accepted = pb.SessionAccepted(
                identity=identity_to_proto(D),
                backend="fake",
                region=handle.opaque,
                num_blocks=handle.num_blocks,
                layout=layout_to_proto(LAYOUT),
                lease_ms=200,
            )
            seal = await opened(request_iterator)
            yield seal.seal(pb.TransferReply(accepted=accepted))
            await asyncio.Event().wait()

    async with serving(tmp_path) as both:
        handle = both.receiver.handle()
        server = new_server()
        pb_grpc.add_TransferServicer_to_server(Deaf(), server)
        both.address = bind(server, f"unix:{tmp_path}/deaf.sock")
        await server.start()
        session = both.dial()
        assert (await both.at_p.next())[0] == "open"
        what, error = await both.at_p.next()
        assert what == "lost"
        assert isinstance(error, BatonError)
        assert "heartbeats" in error.message
        await session.close()
        await server.stop(0)
