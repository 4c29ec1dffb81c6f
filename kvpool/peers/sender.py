"""Sends blocks from this node's slab into those of others: which node asked for them, and how long they have to stay.

The part of a prefill worker in the hand-off (`kv_transfer.ledger.outbox`), played by a node that others fetch from. The
blocks are leased for as long as they are being sent; if the lease should end before they are (this process stood
still), they are not committed.

    peer asks ── send ──▶ Outbox ── session to the peer ──▶ its slab
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.block_ids import BlockIds
from baton.clock import Clock
from baton.errors import BatonError, OverloadedError, TransferError
from baton.ids import BlockId, WorkerIdentity, XferId
from baton.pages import PageWrite
from baton.rpc.mailbox import Mailbox
from baton.telemetry.logs import get_logger
from kv_transfer.ledger.outbox import (
    FirstTokensDrawn,
    FromDecode,
    HandOffDone,
    HandOffFailed,
    Opened,
    Outbox,
    OutboxAction,
    OutboxEvent,
    OutgoingCancelled,
    PeerDown,
    PeerUp,
    PushDone,
    Send,
    Started,
    StartPush,
)
from kv_transfer.memory.page_hash import Hashes
from kv_transfer.messages import ToPrefill
from kv_transfer.ports import KvSender
from kv_transfer.session.client import PeerSession
from kv_transfer.session.connection import OpenedSession, PageWriter
from kv_transfer.session.handshake import SessionEndpoint
from kv_transfer.ticket import Permit

_MAX_IN_FLIGHT = 32

_log = get_logger(__name__)


class Hold(Protocol):
    """The lease under which blocks are sent."""

    def renew(self) -> bool:
        """They stay for a while longer; False where they may be gone already."""

    def release(self) -> None:
        """They may go."""


@dataclass(slots=True, eq=False)
class _Outgoing:
    permit: Permit
    hold: Hold
    until_s: float


class PeerSender:
    """A `kv_transfer.session.client.SessionListener`. For one event loop.

    Args:
        here: This node.
        senders: What writes from the slab, by backend, preferred first.
        sent: Called with how many blocks have arrived at a peer.
        timeout_s: What a transfer may take.
        clock: Monotonic.
    """

    def __init__(
        self,
        here: SessionEndpoint,
        *,
        senders: Mapping[str, KvSender],
        sent: Callable[[int], None],
        timeout_s: float,
        clock: Clock,
    ) -> None:
        self._here = here
        self._senders = senders
        self._sent = sent
        self._timeout_s = timeout_s
        self._clock = clock
        self._outbox = Outbox(here.layout)
        self._numbers = itertools.count(1)
        self._sessions: dict[WorkerIdentity, PeerSession] = {}
        self._closing: set[PeerSession] = set()
        self._pushers: dict[WorkerIdentity, PageWriter] = {}
        self._outgoing: dict[XferId, _Outgoing] = {}
        self._closed = False
        self._mailbox: Mailbox[PushDone] = Mailbox(asyncio.get_running_loop(), self._pushed)

    @property
    def in_flight(self) -> int:
        """Transfers that are not over."""
        return len(self._outgoing)

    def send(self, permit: Permit, slots: Sequence[int], hold: Hold, address: str) -> None:
        """Writes slots into the slab of the permit's target, which serves sessions at `address`.

        Raises:
            OverloadedError: Too many are under way; the hold is the caller's still.
            TransferError: This one is under way already, or the node stops.
        """
        if self._closed:
            raise TransferError("the node stops")
        if permit.xfer_id in self._outgoing:
            raise TransferError(f"{permit.xfer_id} is under way")
        if len(self._outgoing) >= _MAX_IN_FLIGHT:
            raise OverloadedError("the node sends too much to others already", retry_after_s=1.0)
        until_s = self._clock.now_s() + self._timeout_s
        self._outgoing[permit.xfer_id] = _Outgoing(permit, hold, until_s)
        write = PageWrite(
            xfer_id=permit.xfer_id, layer_index=0, source=BlockIds(map(BlockId, slots))
        )
        self._handle(Opened(permit=permit))
        self._handle(Started(xfer_id=permit.xfer_id))
        self._handle(write)
        self._handle(FirstTokensDrawn(xfer_id=permit.xfer_id, first_tokens=()))
        self._connect(permit.target, address)

    def tick(self) -> None:
        """Keeps what is being sent, and gives up what takes too long; several times per second."""
        now_s = self._clock.now_s()
        for xfer_id, outgoing in list(self._outgoing.items()):
            if not outgoing.hold.renew() or outgoing.until_s <= now_s:
                self._handle(OutgoingCancelled(xfer_id=xfer_id))

    async def close(self) -> None:
        """Sends nothing more and ends every session; waits until no push is on its way."""
        self._closed = True
        sessions = [*self._sessions.values(), *self._closing]
        await asyncio.gather(*(session.close() for session in sessions))

    def check_integrity(self) -> None:
        """Raises InvariantError if the outbox contradicts itself."""
        self._outbox.check_integrity()

    def on_open(self, peer: WorkerIdentity, opened: OpenedSession) -> None:
        """The session with `peer` is up."""
        self._pushers[peer] = opened.writer
        up = PeerUp(
            peer=peer,
            region_blocks=opened.region_blocks,
            link=opened.link,
            checksums=opened.checksums,
        )
        self._handle(up)

    def on_unreachable(self, peer: WorkerIdentity, backend: str, error: TransferError) -> None:
        """`peer` cannot be written to by this backend."""
        _log.warning(
            "a pool node cannot be reached by a backend",
            peer=str(peer),
            backend=backend,
            reason=error.message,
        )

    def on_message(self, peer: WorkerIdentity, message: ToPrefill) -> None:
        """`peer` says something."""
        self._handle(FromDecode(peer=peer, message=message))

    def on_lost(self, peer: WorkerIdentity, error: BatonError) -> None:
        """The session with `peer` is over; the next transfer to it opens another."""
        _log.info("session with a pool node ended", peer=str(peer), reason=error.message)
        self._pushers.pop(peer, None)
        self._closing = {session for session in self._closing if not session.over}
        self._closing.add(self._sessions.pop(peer))
        self._handle(PeerDown(peer=peer, error=error))

    def _connect(self, peer: WorkerIdentity, address: str) -> None:
        if peer in self._sessions:
            return
        self._sessions[peer] = PeerSession(
            here=self._here,
            peer=peer,
            address=address,
            senders=self._senders,
            listener=self,
            hashes={},
            clock=self._clock,
            number=next(self._numbers),
        )

    def _handle(self, event: OutboxEvent) -> None:
        for action in self._outbox.handle(event, self._clock.now_s()):
            self._do(action)
        for xfer_id in [x for x in self._outgoing if self._outbox.state(x) is None]:
            self._outgoing.pop(xfer_id).hold.release()

    def _do(self, action: OutboxAction) -> None:
        match action:
            case Send(peer=peer, message=message):
                session = self._sessions.get(peer)
                if session is not None:  # else it is over, which the outbox knows or will know soon
                    session.send(message)
            case StartPush():
                self._push(action)
            case HandOffDone(blocks_sent=blocks):
                self._sent(blocks)
            case HandOffFailed(xfer_id=xfer_id, error=error):
                _log.info("blocks were not taken", xfer_id=xfer_id, reason=error.message)

    def _push(self, action: StartPush) -> None:
        post, xfer_id, push_id = self._mailbox.post, action.write.xfer_id, action.write.push_id

        def done(error: TransferError | None, hashes: Hashes | None) -> None:
            post(PushDone(xfer_id=xfer_id, push_id=push_id, error=error, hashes=hashes))

        self._pushers[action.peer].push(action.write, done)

    def _pushed(self, done: PushDone) -> None:
        """What was pushed counts only if it lay still all the while."""
        going = self._outgoing[done.xfer_id]
        if not going.hold.renew():
            self._handle(OutgoingCancelled(xfer_id=done.xfer_id))
        self._handle(done)
