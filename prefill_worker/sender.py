"""The half of a worker that sends pages: its sessions with receiving workers, its pushes,
and the pool as the way round.

There is one session for each receiving worker, opened with the first leg for it.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import grpc

from baton.clock import Clock
from baton.errors import BatonError, TransferError, UnreachableError
from baton.ids import BlockId, SeqId, WorkerIdentity
from baton.telemetry.logs import get_logger
from baton_worker.legs import WorkerLegTable
from baton_worker.messages import (
    Connect,
    PromptPut,
    PutPrompt,
    SendingAction,
    SendingEvent,
    WorkerEvent,
)
from baton_worker.metrics import WorkerMetrics
from baton_worker.ports import PromptStore
from kv_transfer.ledger.outbox import FromDecode, PeerDown, PeerUp, PushDone, Send, StartPush
from kv_transfer.memory.page_hash import Hashes, Hashing
from kv_transfer.messages import GrantRefused, ToPrefill
from kv_transfer.ports import KvSender
from kv_transfer.session.client import PeerSession
from kv_transfer.session.connection import OpenedSession, PageWriter
from kv_transfer.session.handshake import SessionEndpoint, refused_field
from prefill_worker.hand_offs import SendingHandOffs
from prefill_worker.metrics import LinkMetrics, SendingMetrics
from prefill_worker.sink import TransferSink

_log = get_logger(__name__)


class PageSender:
    """For one event loop (a `baton_worker.ports.SendingHalf` and a `kv_transfer.session.client.SessionListener`).

    Args:
        here: This worker.
        legs: Its legs.
        sink: The one that the engine was built with.
        senders: Transfer backends by name, preferred first.
        hashes: Of the arena that they send from, by every rule that it can be hashed by.
        spare: A page of that arena to try links with.
        metrics: Of the worker.
        clock: Monotonic.
        pool: Takes prompts that no receiving worker has room for; None without a pool.
        pool_after_s: How long a computed prompt waits for that room.
    """

    def __init__(
        self,
        *,
        here: SessionEndpoint,
        legs: WorkerLegTable,
        sink: TransferSink,
        senders: Mapping[str, KvSender],
        hashes: Hashing,
        spare: BlockId,
        metrics: WorkerMetrics,
        clock: Clock,
        pool: PromptStore | None = None,
        pool_after_s: float = 0.0,
    ) -> None:
        self.hand_offs = SendingHandOffs(
            here.layout, legs, pool_after_s=None if pool is None else pool_after_s
        )
        self._here = here
        self._sink = sink
        self._senders = senders
        self._hashes = hashes
        self._spare = spare
        self._shared = metrics
        self._metrics = SendingMetrics(metrics.registry)
        self._links = LinkMetrics(metrics.registry, here.identity)
        self._clock = clock
        self._pool = pool
        self._puts: set[asyncio.Task[bool]] = set()
        self._next = 0
        self._sessions: dict[WorkerIdentity, PeerSession] = {}
        self._letting_go: set[PeerSession] = set()
        self._pushers: dict[WorkerIdentity, PageWriter] = {}
        self._apply: Callable[[WorkerEvent], None]
        self._post: Callable[[SendingEvent], None]

    def start(
        self, apply: Callable[[WorkerEvent], None], post: Callable[[SendingEvent], None]
    ) -> None:
        """See `WorkerHalf`."""
        self._apply, self._post = apply, post
        self._sink.bind(post)

    def add_to(self, server: grpc.aio.Server) -> None:
        """It serves nothing: it opens sessions itself."""

    def link_rate(self, peer: WorkerIdentity) -> float:
        """Bytes per second to a receiving worker, by the latest pushes; 0 while nothing has been pushed."""
        return self._links.bytes_per_second(peer)

    def carry_out(self, action: SendingAction) -> None:
        """See `WorkerHalf`."""
        match action:
            case Connect():
                self._connect(action)
            case Send():
                session = self._sessions.get(action.peer)
                if session is not None:  # else it is over, and the core knows or will know soon
                    session.send(action.message)
            case StartPush():
                self._push(action)
            case PutPrompt():
                self._put(action)

    def observe(self) -> None:
        """See `WorkerHalf`."""
        self._metrics.observe(
            refused=self.hand_offs.refused_messages, fenced=self.hand_offs.fenced_writes
        )

    async def close(self) -> None:
        """Ends every session; waits until no push is on its way."""
        for put in self._puts:
            put.cancel()
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
        _log.warning(
            "a receiving worker cannot be reached by a backend",
            peer=str(peer),
            backend=backend,
            reason=error.message,
        )
        self._metrics.unreachable(backend)

    def on_message(self, peer: WorkerIdentity, message: ToPrefill) -> None:
        """`peer` says something."""
        if isinstance(message, GrantRefused):
            _log.warning("a ticket was refused", reason=message.error.message)
            self._shared.ticket_refused(message.error.param or "other")
        self._apply(FromDecode(peer=peer, message=message))

    def on_lost(self, peer: WorkerIdentity, error: BatonError) -> None:
        """The session with `peer` is over; the next leg for it opens another."""
        _log.info("session with a receiving worker ended", peer=str(peer), reason=error.message)
        self._pushers.pop(peer, None)
        self._links.closed(peer)
        field = refused_field(error)
        if field is not None:
            self._shared.handshake_refused(field)
        if isinstance(error, UnreachableError):
            self._metrics.peer_unreachable()
        self._letting_go = {session for session in self._letting_go if not session.over}
        self._letting_go.add(self._sessions.pop(peer))
        self._apply(PeerDown(peer=peer, error=error))

    def _connect(self, action: Connect) -> None:
        """Opens a session; `PeerUp` or `PeerDown` is applied once it is known how that went."""
        self._next += 1
        self._sessions[action.peer] = PeerSession(
            here=self._here,
            peer=action.peer,
            address=action.address,
            senders=self._senders,
            listener=self,
            hashes=self._hashes,
            clock=self._clock,
            number=self._next,
            spare=self._spare,
        )

    def _push(self, action: StartPush) -> None:
        """Writes pages to a receiving worker, on a thread of its own."""
        post, xfer_id, push_id = self._post, action.write.xfer_id, action.write.push_id

        def done(error: TransferError | None, hashes: Hashes | None) -> None:
            post(PushDone(xfer_id=xfer_id, push_id=push_id, error=error, hashes=hashes))

        self._pushers[action.peer].push(action.write, done)

    def _put(self, action: PutPrompt) -> None:
        assert self._pool is not None
        putting = self._pool.put(action.prompt, action.blocks)
        put = asyncio.create_task(putting, name="prompt-put")
        self._puts.add(put)
        put.add_done_callback(partial(self._was_put, action.seq_id))

    def _was_put(self, seq_id: SeqId, put: "asyncio.Task[bool]") -> None:
        self._puts.discard(put)
        if put.cancelled():
            return
        error = put.exception()
        if error is not None:
            _log.error("a prompt could not be left in the pool", cause=error)
        self._apply(PromptPut(seq_id=seq_id, complete=error is None and put.result()))
