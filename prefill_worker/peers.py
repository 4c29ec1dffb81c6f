"""The decode workers that this prefill worker writes to: one session each, opened with the first leg for it."""

import asyncio
from collections.abc import Callable, Mapping

from baton.clock import Clock
from baton.errors import BatonError, TransferError
from baton.ids import BlockId, WorkerIdentity
from baton.telemetry.logs import get_logger
from kv_transfer.backends.registry import offered
from kv_transfer.ledger.outbox import FromDecode, PeerDown, PeerUp, PushDone, Send, StartPush
from kv_transfer.memory.page_hash import Hashes, Hashing
from kv_transfer.messages import GrantRefused, ToPrefill
from kv_transfer.ports import KvSender
from kv_transfer.session.client import PeerSession
from kv_transfer.session.connection import OpenedSession, PageWriter
from kv_transfer.session.handshake import Endpoint, refused_field
from prefill_worker.accounts import LegAccounts
from prefill_worker.links import LinkMetrics
from prefill_worker.messages import Connect, PrefillEvent

_log = get_logger(__name__)


class DecodePeers:
    """For one event loop (a `kv_transfer.session.client.SessionListener`).

    Args:
        here: This worker.
        senders: Transfer backends by name, preferred first.
        hashes: Of the arena that they send from, by every rule that it can be hashed by.
        spare: A page of that arena to try links with.
        links: Told how fast the ways are.
        accounts: Told of what is refused.
        apply: Takes every event, on the event loop.
        post: Takes the end of every push, from its pusher's thread.
        clock: Monotonic.
    """

    def __init__(
        self,
        *,
        here: Endpoint,
        senders: Mapping[str, KvSender],
        hashes: Hashing,
        spare: BlockId,
        links: LinkMetrics,
        accounts: LegAccounts,
        apply: Callable[[PrefillEvent], None],
        post: Callable[[PushDone], None],
        clock: Clock,
    ) -> None:
        self._here = here
        self._senders = senders
        self._hashes = hashes
        self._spare = spare
        self._links = links
        self._accounts = accounts
        self._apply = apply
        self._post = post
        self._clock = clock
        self._next = 0
        self._sessions: dict[WorkerIdentity, PeerSession] = {}
        self._letting_go: set[PeerSession] = set()
        self._pushers: dict[WorkerIdentity, PageWriter] = {}

    def connect(self, action: Connect) -> None:
        """Opens a session; `PeerUp` or `PeerDown` is applied once it is known how that went."""
        self._next += 1
        self._sessions[action.peer] = PeerSession(
            here=self._here,
            peer=action.peer,
            address=action.address,
            senders=offered(self._senders, action.address),
            listener=self,
            hashes=self._hashes,
            clock=self._clock,
            number=self._next,
            spare=self._spare,
        )

    def send(self, action: Send) -> None:
        """Says something to one of them."""
        session = self._sessions.get(action.peer)
        if session is not None:  # else it is over, and the lifecycle knows or will know soon
            session.send(action.message)

    def push(self, action: StartPush) -> None:
        """Writes pages to one of them, on a thread of its own."""
        post, xfer_id, push_id = self._post, action.write.xfer_id, action.write.push_id

        def done(error: TransferError | None, hashes: Hashes | None) -> None:
            post(PushDone(xfer_id=xfer_id, push_id=push_id, error=error, hashes=hashes))

        self._pushers[action.peer].push(action.write, done)

    async def close(self) -> None:
        """Ends every session; waits until no push is on its way."""
        sessions = [*self._sessions.values(), *self._letting_go]
        await asyncio.gather(*(session.close() for session in sessions))

    def on_open(self, peer: WorkerIdentity, opened: OpenedSession) -> None:
        """The session with `peer` is up."""
        self._pushers[peer] = opened.writer
        self._links.opened(peer, opened.speed)
        up = PeerUp(
            peer=peer,
            region_blocks=opened.region_blocks,
            link=opened.link,
            checksums=opened.checksums,
        )
        self._apply(up)

    def on_unreachable(self, peer: WorkerIdentity, backend: str, error: TransferError) -> None:
        """`peer` cannot be written to by this backend."""
        self._accounts.unreachable(str(peer), backend, error)

    def on_message(self, peer: WorkerIdentity, message: ToPrefill) -> None:
        """`peer` says something."""
        if isinstance(message, GrantRefused):
            self._accounts.ticket_refused(message.error)
        self._apply(FromDecode(peer=peer, message=message))

    def on_lost(self, peer: WorkerIdentity, error: BatonError) -> None:
        """The session with `peer` is over; the next leg for it opens another."""
        _log.info("session with a decode worker ended", peer=str(peer), reason=error.message)
        self._pushers.pop(peer, None)
        self._links.closed(peer)
        field = refused_field(error)
        if field is not None:
            self._accounts.handshake_refused(field)
        self._letting_go = {session for session in self._letting_go if not session.over}
        self._letting_go.add(self._sessions.pop(peer))
        self._apply(PeerDown(peer=peer, error=error))
