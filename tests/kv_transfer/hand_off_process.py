"""One rank of a sharded worker with the whole protocol: `python -m tests.kv_transfer.hand_off_process`.

Its place, its orders and its news travel as lines of JSON on its standard streams. The engine is missing: a decode rank
grants the pages it is told to, a prefill rank exports pages that hold what it would have computed.
"""

import asyncio
import base64
import json
import sys
from functools import partial
from typing import Any

from baton.clock import MonotonicClock
from baton.errors import BatonError, TicketError, TransferError
from baton.generation import TokenSample
from baton.ids import BlockId, Incarnation, WorkerId, WorkerIdentity, XferId
from baton.pages import PageWrite
from baton.rpc.channel import bind, new_server
from baton.rpc.v1 import transfer_pb2_grpc as pb_grpc
from baton.rpc.v1.common_pb2 import Signed
from kv_transfer.backends.shm import ShmReceiver, ShmSender
from kv_transfer.heads import LinkPlan
from kv_transfer.ledger.ledger import (
    Expected,
    FromPeer,
    LedgerEvent,
    PagesReleased,
    PagesReserved,
    PagesVerified,
    PeerFenced,
    Reassigned,
    SessionLost,
    SessionOpened,
    TransferLedger,
    Withdrawn,
)
from kv_transfer.ledger.outbox import (
    FirstTokensDrawn,
    FromDecode,
    HandOffDone,
    HandOffFailed,
    Opened,
    PeerDown,
    PeerUp,
    PushDone,
    Send,
    Started,
    StartPush,
)
from kv_transfer.ledger.ranks import FanOut, FanOutAction, ForRank
from kv_transfer.ledger.transfer import (
    EndSession,
    FreePages,
    LedgerAction,
    LedgerLimits,
    ReservePages,
    StartDecoding,
    ToPeer,
    TransferFailed,
    VerifyPages,
    WriterLost,
)
from kv_transfer.memory.checksum import find_corruption
from kv_transfer.memory.page_hash import ArenaHashes, Checksum, Hashes
from kv_transfer.memory.pages import layer_pages
from kv_transfer.memory.shared_region import SharedRegion
from kv_transfer.messages import SessionId, ToDecode, ToPrefill
from kv_transfer.plan import Grant
from kv_transfer.session.client import PeerSession
from kv_transfer.session.connection import OpenedSession, PageWriter
from kv_transfer.session.handshake import SessionEndpoint, SessionOffer
from kv_transfer.session.server import TransferService
from kv_transfer.ticket import Permit, TicketOffice
from tests.kv_transfer.rank_process import UNTOUCHED, layout_of
from tests.kv_transfer.sharding import truth

OFFICE = TicketOffice(bytes(32))
FIRST = (TokenSample(sample=0, token=7),)
LIMITS = LedgerLimits(
    expect_timeout_s=60.0,
    reserve_timeout_s=60.0,
    quiesce_timeout_s=60.0,
    lease_s=60.0,
    retry_grace_s=60.0,
    checksums=True,
)


def worker(name: str, incarnation: int) -> WorkerIdentity:
    """Who all ranks of one worker are."""
    return WorkerIdentity(worker_id=WorkerId(name), incarnation=Incarnation(incarnation))


def tell(what: str, **more: object) -> None:
    """News for the parent."""
    sys.stdout.write(json.dumps({"what": what, **more}) + "\n")
    sys.stdout.flush()


class Rank:
    """Memory in which a rank's share of every page lies."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.layout = layout_of(asked["place"])
        self.num_blocks: int = asked["num_blocks"]
        self.region = SharedRegion.create(self.layout.region_bytes(self.num_blocks))
        self.region.memoryview[:] = bytes([UNTOUCHED]) * len(self.region.memoryview)
        self.hashes = ArenaHashes(self.region.memoryview, self.layout, num_blocks=self.num_blocks)
        self.clock = MonotonicClock()
        self.here = SessionEndpoint(
            identity=worker(*asked["identity"]), layout=self.layout, office=OFFICE
        )

    def permit(self, asked: dict[str, Any]) -> Permit:
        return OFFICE.read_permit(Signed.FromString(base64.b64decode(asked["permit"])))

    def do_read(self, asked: dict[str, Any]) -> None:
        tell("memory", bytes=base64.b64encode(self.region.memoryview).decode())


class DecodeRank(Rank):
    """Serves sessions around a ledger."""

    async def start(self, asked: dict[str, Any]) -> None:
        self._pages = tuple(map(BlockId, asked["pages"]))
        self._ledger = TransferLedger(LIMITS)
        receiver = ShmReceiver(self.region, path=asked["path"], num_blocks=self.num_blocks)
        offer = SessionOffer(num_blocks=self.num_blocks, lease_s=60.0, checksum=Checksum.XXH3)
        self._service = TransferService(
            here=self.here, offer=offer, receivers={"shm": receiver}, host=self
        )
        self._server = new_server()
        pb_grpc.add_TransferServicer_to_server(self._service, self._server)
        bind(self._server, asked["address"])
        await self._server.start()
        self._ticking = asyncio.create_task(self._tick())
        tell("ready")

    def do_expect(self, asked: dict[str, Any]) -> None:
        self.apply(Expected(permit=self.permit(asked)))

    def do_reassign(self, asked: dict[str, Any]) -> None:
        self.apply(Reassigned(permit=self.permit(asked)))

    def do_withdraw(self, asked: dict[str, Any]) -> None:
        error = TransferError("another rank failed")
        self.apply(Withdrawn(xfer_id=XferId("x"), error=error))

    def on_session_open(self, session: SessionId, peer: WorkerIdentity, link: LinkPlan) -> None:
        self.apply(SessionOpened(session=session, peer=peer, link=link))

    def on_handshake_refused(self, field: str) -> None:
        tell("refused", field=field)

    def on_ticket_refused(self, error: TicketError) -> None:
        tell("refused", field=error.param)

    def on_peer_message(self, session: SessionId, peer: WorkerIdentity, message: ToDecode) -> None:
        self.apply(FromPeer(session=session, peer=peer, message=message))

    def on_session_lost(self, session: SessionId) -> None:
        self.apply(SessionLost(session=session))

    def on_peer_fenced(self, session: SessionId) -> None:
        self.apply(PeerFenced(session=session))

    def apply(self, event: LedgerEvent) -> None:
        for action in self._ledger.handle(event, self.clock.now_s()):
            self._do(action)
        self._ledger.check_integrity()

    def _do(self, action: LedgerAction) -> None:
        match action:
            case ReservePages():
                grant = Grant(held_blocks=0, blocks=self._pages)
                self.apply(PagesReserved(xfer_id=action.xfer_id, grant=grant))
            case VerifyPages():
                self.apply(self._verified(action))
            case FreePages():
                self.apply(PagesReleased(xfer_id=action.xfer_id))
            case ToPeer():
                self._service.send(action.session, action.message)
            case EndSession():
                self._service.end(action.session, action.error)
            case StartDecoding():
                tell("committed", token=action.first_tokens[0].token)
            case WriterLost():
                tell("writer lost", attempt=action.attempt)
            case TransferFailed():
                tell("failed", code=action.error.code)

    def _verified(self, asked: VerifyPages) -> PagesVerified:
        fault = find_corruption(self.hashes, asked.link, asked.grant, asked.checksums)
        return PagesVerified(
            xfer_id=asked.xfer_id, session=asked.session, attempt=asked.attempt, fault=fault
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            for action in self._ledger.tick(self.clock.now_s()):
                self._do(action)


class Way:
    """A prefill rank's session with one rank of the decode worker."""

    def __init__(self, owner: "PrefillRank", rank: int) -> None:
        self._owner = owner
        self._rank = rank
        self.session: PeerSession | None = None
        self.writer: PageWriter | None = None

    def on_open(self, peer: WorkerIdentity, opened: OpenedSession) -> None:
        self.writer = opened.writer
        up = PeerUp(
            peer=peer,
            region_blocks=opened.region_blocks,
            link=opened.link,
            checksums=opened.checksums,
        )
        self._owner.apply_rank(self._rank, up)

    def on_unreachable(self, peer: WorkerIdentity, backend: str, error: TransferError) -> None:
        tell("unreachable", backend=backend, reason=error.message)

    def on_message(self, peer: WorkerIdentity, message: ToPrefill) -> None:
        self._owner.apply_rank(self._rank, FromDecode(peer=peer, message=message))

    def on_lost(self, peer: WorkerIdentity, error: BatonError) -> None:
        self._owner.apply_rank(self._rank, PeerDown(peer=peer, error=error))


class PrefillRank(Rank):
    """Dials every rank of the decode worker that holds some of its heads."""

    async def start(self, asked: dict[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._pages = tuple(map(BlockId, asked["pages"]))
        layers = layer_pages(self.region.memoryview, self.layout, self.num_blocks)
        for name, rows in zip(self.layout.layers, layers, strict=True):
            rows[list(self._pages)] = truth(name, list(range(len(self._pages))), self.layout)
        sender = ShmSender(self.region.memoryview, num_blocks=self.num_blocks)
        self._fan_out = FanOut(self.layout, len(asked["addresses"]))
        self._ways = []
        for rank, address in enumerate(asked["addresses"]):
            way = Way(self, rank)
            way.session = PeerSession(
                here=self.here,
                peer=worker(*asked["peer"]),
                address=address,
                senders={"shm": sender},
                listener=way,
                hashes={Checksum.XXH3: self.hashes},
                clock=self.clock,
                number=1,
            )
            self._ways.append(way)
        tell("ready")

    def do_prefill(self, asked: dict[str, Any]) -> None:
        """Computes the first `layers` layers; with all of them also the first token.
        Else tells when they are written.
        """
        permit, todo = self.permit(asked), asked["layers"]
        self._stays = todo < len(self.layout.layers)
        self.apply(Opened(permit=permit))
        self.apply(Started(xfer_id=permit.xfer_id))
        for layer in range(min(todo, len(self.layout.layers))):
            self.apply(PageWrite(xfer_id=permit.xfer_id, layer_index=layer, source=self._pages))
        if not self._stays:
            self.apply(FirstTokensDrawn(xfer_id=permit.xfer_id, first_tokens=FIRST))

    def apply(self, event: Any) -> None:
        self._act(self._fan_out.handle(event, self.clock.now_s()))

    def apply_rank(self, rank: int, event: Any) -> None:
        self._act(self._fan_out.handle_rank(rank, event, self.clock.now_s()))
        self._fan_out.check_integrity()

    def _act(self, actions: list[FanOutAction]) -> None:
        for action in actions:
            match action:
                case ForRank():
                    self._do(action.rank, action.action)
                case HandOffDone():
                    tell("handed off", bytes=action.bytes_sent)
                case HandOffFailed():
                    tell("failed", code=action.error.code)

    def _do(self, rank: int, action: Send | StartPush) -> None:
        way = self._ways[rank]
        match action:
            case Send():
                assert way.session is not None
                way.session.send(action.message)
            case StartPush():
                assert way.writer is not None
                way.writer.push(action.write, partial(self._pushed, rank, action))

    def _pushed(
        self, rank: int, action: StartPush, error: TransferError | None, hashes: Hashes | None
    ) -> None:
        xfer_id, push_id = action.write.xfer_id, action.write.push_id
        done = PushDone(xfer_id=xfer_id, push_id=push_id, error=error, hashes=hashes)
        self._loop.call_soon_threadsafe(self.apply_rank, rank, done)
        if self._stays:
            self._loop.call_soon_threadsafe(tell, "wrote")


async def main() -> None:
    lines = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    first = json.loads(await lines.readline())
    rank: DecodeRank | PrefillRank = (DecodeRank if first["decodes"] else PrefillRank)(first)
    await rank.start(first)
    while line := await lines.readline():
        asked = json.loads(line)
        getattr(rank, f"do_{asked['do']}")(asked)


if __name__ == "__main__":
    asyncio.run(main())
