"""The hand-offs behind a worker's prefill legs: joins the engine's pages,
the outbox and the pool with the legs they are for.

What is written to a receiving worker, and when, is the outbox's business (kv_transfer/ledger/outbox.py). Where that
worker has no room there is a way round it: once the prompt is computed and has waited for long enough the pool gets all
of it, and the router is told to have it fetched from there. Until the pool has all of it nothing changes: if the pages
are granted meanwhile they are written as ever.
"""

from dataclasses import dataclass

from baton.errors import BatonError, InvariantError, LeaseExpiredError, TransferError
from baton.ids import BlockId, WorkerIdentity, XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from baton.story import StoryEntry
from baton_engine.messages import (
    Abort,
    Failed,
    Prefill,
    PrefillStarted,
    PromptComputed,
    Release,
    Released,
    Reserved,
    SeqEvent,
)
from baton_engine.ports import LayerReady, PageExport
from baton_worker.legs import LegState, StreamId, WorkerLeg, WorkerLegTable
from baton_worker.messages import (
    Connect,
    FailedMessage,
    HandedOffMessage,
    LinkProbe,
    LinkProbedMessage,
    PooledMessage,
    PromptPut,
    PutPrompt,
    SendingEvent,
    WorkerAction,
)
from kv_transfer.ledger.outbox import (
    FirstTokensDrawn,
    FromDecode,
    HandOffDone,
    HandOffFailed,
    Opened,
    Outbox,
    OutboxEvent,
    OutgoingCancelled,
    PeerDown,
    PeerUp,
    PushDone,
    Started,
)
from kv_transfer.ticket import Permit

_NO_BLOCK = BlockId(-1)


@dataclass(slots=True, eq=False)
class _Outgoing:
    """The pages of one leg that is not over.

    Attributes:
        blocks: All of them, in order, as the engine last exported them.
        waits_since_s: When its first tokens were drawn, or the pool last did not take its prompt.
        being_put: Whether its prompt is on its way to the pool.
    """

    leg: WorkerLeg
    blocks: list[BlockId]
    waits_since_s: float = 0.0
    being_put: bool = False

    def exported(self, export: PageExport) -> None:
        """The engine completed pages, perhaps others than it had for the same blocks before it preempted the prompt."""
        end = export.first_block + len(export.blocks)
        self.blocks[export.first_block : end] = export.blocks


class SendingHandOffs:
    """Pure: no sockets, no clock, no engine (a `baton_worker.ports.HandOffCore`). Not thread-safe: one owner.

    Args:
        layout: Of this worker's pages.
        legs: The worker's.
        pool_after_s: How long a computed prompt waits for room before it goes to the pool; None where there is none.

    Attributes:
        fenced_writes: Writes that were not made because the lease on the peer's pages was over.
    """

    def __init__(
        self, layout: KvLayout, legs: WorkerLegTable, *, pool_after_s: float | None = None
    ) -> None:
        self._outbox = Outbox(layout)
        self._legs = legs
        self._pool_after_s = pool_after_s
        self._outgoing: dict[XferId, _Outgoing] = {}
        self._peers: set[WorkerIdentity] = set()
        self._probes: dict[WorkerIdentity, set[StreamId]] = {}
        self.fenced_writes = 0

    def refusal(self, permit: Permit) -> BatonError | None:
        """See `HandOffs`."""
        if self._outbox.state(permit.xfer_id) is None:
            return None
        # Perhaps an earlier attempt of ours that still has to stop: another worker can take this one.
        return TransferError("the transfer id is in use")

    def begin(self, leg: WorkerLeg, now_s: float) -> list[WorkerAction]:
        """See `HandOffs`."""
        permit = leg.permit
        assert permit is not None
        self._legs.seqs[leg.seq_id] = leg
        blocks = [_NO_BLOCK] * permit.num_blocks
        self._outgoing[permit.xfer_id] = _Outgoing(leg=leg, blocks=blocks)
        connect = self._connect(permit.target, leg.address)
        opened = self._carry_out(Opened(permit=permit), now_s)
        return [*connect, *opened, Prefill(seq_id=leg.seq_id, prompt=leg.prompt)]

    def advance(
        self, leg: WorkerLeg, event: SeqEvent | FirstTokensDrawn, now_s: float
    ) -> list[WorkerAction]:
        """See `HandOffs`."""
        assert leg.xfer_id is not None
        match event:
            case PrefillStarted():
                return self._carry_out(Started(xfer_id=leg.xfer_id), now_s)
            case FirstTokensDrawn():
                self._outgoing[leg.xfer_id].waits_since_s = now_s
                return self._carry_out(event, now_s)
            case Released() | Failed():
                return self._cancel(leg.xfer_id, now_s)
            case Reserved() | PromptComputed():
                message = f"{leg.seq_id}: the engine said {type(event).__name__} of what is sent"
                raise InvariantError(message, story=self.story(leg.xfer_id))

    def withdraw(self, xfer_id: XferId, error: BatonError, now_s: float) -> list[WorkerAction]:  # noqa: ARG002
        """See `HandOffs`; the receiving worker is told only that no write is under way any more."""
        return self._cancel(xfer_id, now_s)

    def handle(self, event: SendingEvent, now_s: float) -> list[WorkerAction]:
        """See `HandOffs`."""
        match event:
            case LayerReady():
                return self._layer_ready(event, now_s)
            case PromptPut():
                return self._put(event, now_s)
            case LinkProbe():
                return self._probe(event)
            case PeerDown():
                self._peers.discard(event.peer)
                return [*self._carry_out(event, now_s), *self._probed(event.peer, event.error)]
            case PeerUp():
                return [*self._carry_out(event, now_s), *self._probed(event.peer, None)]
            case PushDone():
                self.fenced_writes += isinstance(event.error, LeaseExpiredError)
            case FromDecode():
                pass
        return self._carry_out(event, now_s)

    def tick(self, now_s: float) -> list[WorkerAction]:
        """Prompts that have waited for room for long enough; those that the pool did not take wait as long again."""
        if self._pool_after_s is None:
            return []
        latest_s = now_s - self._pool_after_s
        actions: list[WorkerAction] = []
        for xfer_id, outgoing in self._outgoing.items():
            leg = outgoing.leg
            waits = leg.state is LegState.HANDING_OFF and outgoing.waits_since_s <= latest_s
            if waits and not outgoing.being_put and not self._outbox.granted(xfer_id):
                outgoing.being_put = True
                blocks = tuple(outgoing.blocks)
                actions.append(PutPrompt(seq_id=leg.seq_id, prompt=leg.prompt, blocks=blocks))
        return actions

    def story(self, xfer_id: XferId) -> tuple[StoryEntry, ...]:
        """See `HandOffTable`."""
        return self._outbox.story(xfer_id)

    def in_flight(self) -> int:
        """See `HandOffTable`: also those that are being stopped."""
        return self._outbox.in_flight()

    def left_over(self) -> int:
        """See `HandOffTable`: those that are being stopped."""
        return self._outbox.in_flight() - len(self._outgoing)

    @property
    def refused_messages(self) -> int:
        """Messages of receiving workers that fitted nothing."""
        return self._outbox.refused

    def check_integrity(self) -> None:
        """Raises InvariantError if outbox and legs contradict each other."""
        self._outbox.check_integrity()
        for xfer_id, outgoing in self._outgoing.items():
            leg = outgoing.leg
            if leg.ended or leg.xfer_id != xfer_id or self._outbox.state(xfer_id) is None:
                raise InvariantError(
                    f"hand-off {xfer_id} and its leg disagree: {leg!r}", story=self.story(xfer_id)
                )

    def _connect(self, peer: WorkerIdentity, address: str) -> list[WorkerAction]:
        """Has a session opened, unless there is one, or soon will be."""
        if peer in self._peers:
            return []
        self._peers.add(peer)
        return [Connect(peer=peer, address=address)]

    def _probe(self, event: LinkProbe) -> list[WorkerAction]:
        """A session proves the link when it opens, by a page that it writes,
        and ends when the link carries nothing any more.
        """
        if self._outbox.is_up(event.peer):
            return [LinkProbedMessage(stream=event.stream, peer=event.peer, error=None)]
        self._probes.setdefault(event.peer, set()).add(event.stream)
        return self._connect(event.peer, event.address)

    def _probed(self, peer: WorkerIdentity, error: BatonError | None) -> list[WorkerAction]:
        return [
            LinkProbedMessage(stream=stream, peer=peer, error=error)
            for stream in self._probes.pop(peer, ())
        ]

    def _layer_ready(self, event: LayerReady, now_s: float) -> list[WorkerAction]:
        actions: list[WorkerAction] = []
        for export in event.exports:
            leg = self._legs.of_seq(export.seq_id)
            if leg is None or leg.xfer_id is None:
                continue
            if event.layer_index == 0:
                self._outgoing[leg.xfer_id].exported(export)
            write = PageWrite(
                xfer_id=leg.xfer_id,
                layer_index=event.layer_index,
                first_block=export.first_block,
                source=export.blocks,
                ready=event.ready,
            )
            actions += self._carry_out(write, now_s)
        return actions

    def _put(self, event: PromptPut, now_s: float) -> list[WorkerAction]:
        """A prompt is in the pool, or was not taken: its leg ends with it, unless its pages were granted meanwhile."""
        leg = self._legs.of_seq(event.seq_id)
        if leg is None or leg.xfer_id is None:
            return []
        outgoing = self._outgoing[leg.xfer_id]
        outgoing.being_put, outgoing.waits_since_s = False, now_s
        if not event.complete or self._outbox.granted(leg.xfer_id):
            return []
        self._legs.end(leg, LegState.DONE)
        pooled = PooledMessage(stream=leg.stream, leg_id=leg.leg_id)
        return [pooled, *self._cancel(leg.xfer_id, now_s), Release(seq_id=leg.seq_id)]

    def _cancel(self, xfer_id: XferId, now_s: float) -> list[WorkerAction]:
        """The leg of a hand-off ended: the outbox sees to it that the peer knows."""
        self._outgoing.pop(xfer_id, None)
        return self._carry_out(OutgoingCancelled(xfer_id=xfer_id), now_s)

    def _carry_out(self, event: OutboxEvent, now_s: float) -> list[WorkerAction]:
        actions: list[WorkerAction] = []
        for action in self._outbox.handle(event, now_s):
            match action:
                case HandOffDone():
                    leg = self._outgoing.pop(action.xfer_id).leg
                    self._legs.end(leg, LegState.DONE)
                    done = HandedOffMessage(stream=leg.stream, leg_id=leg.leg_id, done=action)
                    actions += [done, Release(seq_id=leg.seq_id)]
                case HandOffFailed():
                    leg = self._outgoing.pop(action.xfer_id).leg
                    self._legs.end(leg, LegState.FAILED)
                    actions += [FailedMessage.of(leg, action.error), Abort(seq_id=leg.seq_id)]
                case _:
                    actions.append(action)
        return actions
