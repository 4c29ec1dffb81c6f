"""The prefill worker's side of every hand-off: what is to be pushed, what is being pushed, and when all of it has landed.

Counterpart of `ledger.py`. The engine exports pages layer by layer while it computes; they wait here until the decode
worker has granted its own, are pushed then, and are committed once every layer of every page has landed and the first
tokens are known. A transfer that ends early is confirmed with `Quiesced` only when no push of it is outstanding.

    OPENED ── first chunk ── RESERVING ── granted ── WRITING ── all landed ── COMMITTING ── verified ── over
       └──────────────────────────┴── given up, refused, failed ──┴── ABORTING ── nothing outstanding ── over
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, InvariantError, TransferError
from baton.generation import TokenSample
from baton.ids import WorkerIdentity, XferId
from baton.layout import KvLayout
from kv_transfer.checksum import Hashes, fold
from kv_transfer.heads import LinkPlan, plan_link
from kv_transfer.messages import (
    AbortRequest,
    Commit,
    Committed,
    Granted,
    GrantRefused,
    Quiesced,
    Reserve,
)
from kv_transfer.outbox_messages import (
    Drew,
    Exported,
    FromDecode,
    GivenUp,
    HandOver,
    HandOverFailed,
    Opened,
    OutboxAction,
    OutboxEvent,
    PeerDown,
    PeerUp,
    PushDone,
    Send,
    Started,
    StartPush,
)
from kv_transfer.plan import Export, Grant, check_export, check_grant, plan_pages
from kv_transfer.ports import Push
from kv_transfer.ticket import Permit, refuse_holder

_LANDED = -1


class OutboxState(Enum):
    """Where one transfer stands on the prefill worker."""

    OPENED = "opened"
    RESERVING = "reserving"
    WRITING = "writing"
    COMMITTING = "committing"
    ABORTING = "aborting"


_S = OutboxState
TRANSITIONS: dict[OutboxState, frozenset[OutboxState]] = {
    _S.OPENED: frozenset({_S.RESERVING, _S.ABORTING}),
    _S.RESERVING: frozenset({_S.WRITING, _S.ABORTING}),
    _S.WRITING: frozenset({_S.COMMITTING, _S.ABORTING}),
    _S.COMMITTING: frozenset({_S.ABORTING}),
    _S.ABORTING: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """An export that is not pushed yet; `number` tells it from later exports of the same pages."""

    number: int
    export: Export


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outstanding:
    """A push on its way: blocks [first, end) of one layer."""

    number: int
    layer_index: int
    first: int
    end: int


@dataclass(slots=True, eq=False)
class _Transfer:
    """One hand-off, in one attempt.

    `hashes` has a row `[num_blocks]` for each layer of which something landed, where the session wants checksums. `exported` is `[num_layers, num_blocks]` int32: 0 for a page not exported, `_LANDED`, or the number of its latest
    export. A prompt that the engine preempts is exported again, from other pages.
    """

    permit: Permit
    exported: npt.NDArray[np.int32]
    hashes: dict[int, Hashes] | None = None
    state: OutboxState = _S.OPENED
    started_s: float | None = None
    granted_s: float = 0.0
    drawn_s: float = 0.0
    grant: Grant | None = None
    first_tokens: tuple[TokenSample, ...] | None = None
    waiting: list[_Waiting] = field(default_factory=list)
    outstanding: dict[int, _Outstanding] = field(default_factory=dict)
    landed: int = 0
    cut_off: bool = False

    @property
    def xfer_id(self) -> XferId:
        """Its name."""
        return self.permit.xfer_id

    @property
    def attempt(self) -> int:
        """Which attempt at it this worker makes."""
        return self.permit.attempt

    @property
    def peer(self) -> WorkerIdentity:
        """Who takes the pages."""
        return self.permit.target

    @property
    def num_blocks(self) -> int:
        """Pages of the whole prompt."""
        return self.permit.num_blocks


class Outbox:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds).

    Every method returns the actions the shell must carry out, in order. Not thread-safe: one owner.
    """

    def __init__(self, layout: KvLayout) -> None:
        self._num_layers = len(layout.layers)
        self._whole = plan_link(layout, layout)
        self._transfers: dict[XferId, _Transfer] = {}
        self._peers: dict[WorkerIdentity, PeerUp] = {}
        self._next = 0
        self.stale = 0
        """Messages of peers about attempts that are over here."""

    def handle(self, event: OutboxEvent, now_s: float) -> list[OutboxAction]:
        """Applies one event; what names an unknown transfer has no effect."""
        match event:
            case Opened():
                return self._open(event)
            case PeerUp():
                return self._peer_up(event)
            case PeerDown():
                return self._peer_down(event)
            case FromDecode():
                return self._from_decode(event, now_s)
            case PushDone():
                return self._push_done(event)
        transfer = self._transfers.get(event.xfer_id)
        if transfer is None or transfer.state is _S.ABORTING:
            return []
        match event:
            case Started():
                return self._start(transfer, now_s)
            case Exported():
                return self._export(transfer, event.export, now_s)
            case Drew():
                transfer.first_tokens, transfer.drawn_s = event.first_tokens, now_s
                return self._try_commit(transfer)
            case GivenUp():
                return self._abort(transfer)

    def state(self, xfer_id: XferId) -> OutboxState | None:
        """Where a transfer stands; None once it is over."""
        transfer = self._transfers.get(xfer_id)
        return transfer.state if transfer else None

    def in_flight(self) -> int:
        """Transfers that are not over."""
        return len(self._transfers)

    def peers_in_use(self) -> set[WorkerIdentity]:
        """Decode workers that a transfer here still needs."""
        return {transfer.peer for transfer in self._transfers.values()}

    def check_integrity(self) -> None:
        """Raises InvariantError if the book contradicts itself."""
        for transfer in self._transfers.values():
            held = transfer.grant.held_blocks if transfer.grant else 0
            landed = int(np.count_nonzero(transfer.exported[:, held:] == _LANDED))
            granted = transfer.state in (_S.WRITING, _S.COMMITTING)
            consistent = (
                (transfer.grant is not None or not granted)
                and (transfer.grant is None or landed == transfer.landed)
                and (transfer.grant is not None or not transfer.outstanding)
                and not (transfer.state is _S.COMMITTING and transfer.outstanding)
                and not (transfer.state is _S.ABORTING and not transfer.outstanding)
            )
            if not consistent:
                raise InvariantError(f"hand-off {transfer.xfer_id} is inconsistent: {transfer!r}")

    def _open(self, event: Opened) -> list[OutboxAction]:
        xfer_id, num_blocks = event.permit.xfer_id, event.permit.num_blocks
        if xfer_id in self._transfers:
            raise InvariantError(f"hand-off {xfer_id} was opened twice")
        exported = np.zeros((self._num_layers, num_blocks), dtype=np.int32)
        self._transfers[xfer_id] = _Transfer(permit=event.permit, exported=exported)
        return []

    def _peer_up(self, event: PeerUp) -> list[OutboxAction]:
        self._peers[event.peer] = event
        actions: list[OutboxAction] = []
        for transfer in self._of_peer(event.peer):
            if transfer.started_s is not None and transfer.state is _S.OPENED:
                actions += self._reserve(transfer)
        return actions

    def _peer_down(self, event: PeerDown) -> list[OutboxAction]:
        self._peers.pop(event.peer, None)
        actions: list[OutboxAction] = []
        for transfer in self._of_peer(event.peer):
            already = transfer.state is _S.ABORTING
            transfer.cut_off = True
            if not already:
                actions += self._fail(transfer, event.error)
        return actions

    def _start(self, transfer: _Transfer, now_s: float) -> list[OutboxAction]:
        """The first sign that the prompt is being computed; a later one means it was preempted."""
        if transfer.started_s is not None:
            return []
        transfer.started_s = now_s
        return self._reserve(transfer) if transfer.peer in self._peers else []

    def _reserve(self, transfer: _Transfer) -> list[OutboxAction]:
        self._move(transfer, _S.RESERVING)
        return [Send(peer=transfer.peer, message=Reserve(permit=transfer.permit))]

    def _from_decode(self, event: FromDecode, now_s: float) -> list[OutboxAction]:
        message = event.message
        transfer = self._transfers.get(message.xfer_id)
        meant = transfer is not None and transfer.peer == event.peer
        if transfer is None or not meant or transfer.attempt != message.attempt:
            # Over here already, and nothing outstanding: say so to a peer that still waits for it.
            self.stale += 1
            waits = isinstance(message, AbortRequest)
            return [_quiesced(event.peer, message.xfer_id, message.attempt)] if waits else []
        if transfer.state is _S.ABORTING:
            return []
        match message:
            case Granted():
                return self._granted(transfer, message, now_s)
            case GrantRefused():
                return self._fail(transfer, message.error)
            case Committed():
                return self._committed(transfer, now_s)
            case AbortRequest():
                return self._fail(transfer, message.error)

    def _granted(self, transfer: _Transfer, granted: Granted, now_s: float) -> list[OutboxAction]:
        if transfer.state is not _S.RESERVING:
            self.stale += 1  # a ticket that is shown again is worth nothing
            return []
        peer, grant = self._peers[transfer.peer], granted.grant
        if granted.cache_scope != transfer.permit.cache_scope:
            return self._fail(transfer, refuse_holder("cache_scope"))
        try:
            check_grant(grant, num_blocks=transfer.num_blocks, region_blocks=peer.region_blocks)
        except TransferError as error:
            return self._fail(transfer, error)
        self._move(transfer, _S.WRITING)
        if peer.checksums:
            transfer.hashes = {}
        transfer.grant, transfer.granted_s = grant, now_s
        return [*self._push_waiting(transfer), *self._try_commit(transfer)]

    def _export(self, transfer: _Transfer, export: Export, now_s: float) -> list[OutboxAction]:
        if transfer.state is _S.COMMITTING:
            raise InvariantError(f"pages of {transfer.xfer_id} were exported after its commit")
        try:
            check_export(export, num_blocks=transfer.num_blocks, num_layers=self._num_layers)
        except TransferError as error:
            return self._fail(transfer, error)
        started = self._start(transfer, now_s)
        self._next += 1
        held = transfer.grant.held_blocks if transfer.grant else 0
        end = export.first_block + len(export.source)
        row = transfer.exported[export.layer_index]
        again = row[max(held, export.first_block) : end]
        transfer.landed -= int(np.count_nonzero(again == _LANDED))
        row[export.first_block : end] = self._next
        transfer.waiting.append(_Waiting(number=self._next, export=export))
        return [*started, *self._push_waiting(transfer)]

    def _push_waiting(self, transfer: _Transfer) -> list[OutboxAction]:
        if transfer.grant is None:
            return []
        waiting, transfer.waiting = transfer.waiting, []
        actions: list[OutboxAction] = []
        for item in waiting:
            if self._superseded(transfer, item):
                continue
            if self._in_the_way(transfer, item.export):
                transfer.waiting.append(item)
            else:
                actions += self._push(transfer, transfer.grant, item)
        return actions

    def _superseded(self, transfer: _Transfer, item: _Waiting) -> bool:
        """Whether later exports cover all its pages; if only some, pushing it first does no harm."""
        export = item.export
        end = export.first_block + len(export.source)
        row = transfer.exported[export.layer_index, export.first_block : end]
        return not bool((row == item.number).any())

    def _in_the_way(self, transfer: _Transfer, export: Export) -> bool:
        """Whether a push of the same pages is still on its way: two could land in any order."""
        end = export.first_block + len(export.source)
        return any(
            push.layer_index == export.layer_index
            and push.first < end
            and export.first_block < push.end
            for push in transfer.outstanding.values()
        )

    def _push(self, transfer: _Transfer, grant: Grant, item: _Waiting) -> list[OutboxAction]:
        plan = plan_pages(item.export, grant)
        if plan is None or self._link(transfer).target_layers[item.export.layer_index] is None:
            return []
        self._next += 1
        transfer.outstanding[self._next] = _Outstanding(
            number=item.number,
            layer_index=item.export.layer_index,
            first=plan.first_block,
            end=plan.first_block + len(plan.source),
        )
        push = Push(
            xfer_id=transfer.xfer_id,
            layer_index=item.export.layer_index,
            source=plan.source,
            target=plan.target,
        )
        return [StartPush(peer=transfer.peer, push_id=self._next, push=push)]

    def _push_done(self, event: PushDone) -> list[OutboxAction]:
        transfer = self._transfers.get(event.xfer_id)
        push = transfer.outstanding.pop(event.push_id, None) if transfer else None
        if transfer is None or push is None:
            raise InvariantError(f"push {event.push_id} of {event.xfer_id} was never started")
        if transfer.state is _S.ABORTING:
            return self._try_quiesce(transfer)
        if event.error is not None:
            return self._fail(transfer, event.error)
        row = transfer.exported[push.layer_index, push.first : push.end]
        ours = row == push.number
        row[ours] = _LANDED
        if transfer.hashes is not None:
            if event.hashes is None:
                raise InvariantError(f"push {event.push_id} of {event.xfer_id} was not hashed")
            blank = np.zeros(transfer.num_blocks, dtype=np.uint64)
            hashes = transfer.hashes.setdefault(push.layer_index, blank)[push.first : push.end]
            hashes[ours] = event.hashes[ours]
        transfer.landed += int(np.count_nonzero(ours))
        return [*self._push_waiting(transfer), *self._try_commit(transfer)]

    def _try_commit(self, transfer: _Transfer) -> list[OutboxAction]:
        if transfer.state is not _S.WRITING or transfer.first_tokens is None:
            return []
        assert transfer.grant is not None
        pages, link = len(transfer.grant.blocks), self._link(transfer)
        if transfer.outstanding or transfer.landed < pages * link.shared_layers:
            return []
        self._move(transfer, _S.COMMITTING)
        commit = Commit(
            xfer_id=transfer.xfer_id,
            attempt=transfer.attempt,
            num_blocks=pages,
            num_bytes=pages * link.bytes_per_page,
            first_tokens=transfer.first_tokens,
            checksums=_checksums(transfer, transfer.grant),
        )
        return [Send(peer=transfer.peer, message=commit)]

    def _committed(self, transfer: _Transfer, now_s: float) -> list[OutboxAction]:
        if transfer.state is not _S.COMMITTING:
            return []
        assert transfer.grant is not None
        assert transfer.started_s is not None
        del self._transfers[transfer.xfer_id]
        pages = len(transfer.grant.blocks)
        done = HandOver(
            xfer_id=transfer.xfer_id,
            peer=transfer.peer,
            blocks_sent=pages,
            bytes_sent=pages * self._link(transfer).bytes_per_page,
            reserve_wait_s=transfer.granted_s - transfer.started_s,
            unhidden_s=now_s - transfer.drawn_s,
        )
        return [done]

    def _fail(self, transfer: _Transfer, error: BatonError) -> list[OutboxAction]:
        failed = HandOverFailed(xfer_id=transfer.xfer_id, error=error)
        return [failed, *self._abort(transfer)]

    def _abort(self, transfer: _Transfer) -> list[OutboxAction]:
        transfer.waiting.clear()
        self._move(transfer, _S.ABORTING)
        return self._try_quiesce(transfer)

    def _try_quiesce(self, transfer: _Transfer) -> list[OutboxAction]:
        if transfer.outstanding:
            return []
        del self._transfers[transfer.xfer_id]
        return (
            []
            if transfer.cut_off
            else [_quiesced(transfer.peer, transfer.xfer_id, transfer.attempt)]
        )

    def _link(self, transfer: _Transfer) -> LinkPlan:
        """What is written of each page; its peer is known from the grant on."""
        return self._peers[transfer.peer].link or self._whole

    def _of_peer(self, peer: WorkerIdentity) -> list[_Transfer]:
        return [transfer for transfer in self._transfers.values() if transfer.peer == peer]

    def _move(self, transfer: _Transfer, state: OutboxState) -> None:
        if state not in TRANSITIONS[transfer.state]:
            raise InvariantError(f"hand-off {transfer.xfer_id}: {transfer.state} to {state}")
        transfer.state = state


def _quiesced(peer: WorkerIdentity, xfer_id: XferId, attempt: int) -> Send:
    return Send(peer=peer, message=Quiesced(xfer_id=xfer_id, attempt=attempt))


def _checksums(transfer: _Transfer, grant: Grant) -> bytes:
    """Of the pages that were written, as the commit record carries them."""
    if transfer.hashes is None:
        return b""
    blank = np.zeros(transfer.num_blocks, dtype=np.uint64)
    layers = range(len(transfer.exported))
    rows = [transfer.hashes.get(layer, blank)[grant.held_blocks :] for layer in layers]
    return fold(rows).astype("<u8").tobytes()
