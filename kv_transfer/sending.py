"""One hand-off as the prefill worker's outbox keeps it, from the router's word until nothing of it is on its way.

    OPENED ── first chunk ── RESERVING ── granted ── WRITING ── all landed ── COMMITTING ── verified ── over
       └──────────────────────────┴── given up, refused, failed ──┴── ABORTING ── nothing outstanding ── over

Its pages are `shipment.py`. However it ends early, the decode worker is told (`Quiesced`) only when no push is outstanding.
"""

from dataclasses import dataclass
from enum import Enum

from baton.errors import BatonError, InvariantError, TransferError
from baton.generation import TokenSample
from baton.ids import WorkerIdentity, XferId
from kv_transfer.heads import LinkPlan
from kv_transfer.messages import Commit, Granted, Quiesced, Reserve, ToDecode
from kv_transfer.outbox_messages import (
    HandOver,
    HandOverFailed,
    OutboxAction,
    PeerUp,
    PushDone,
    Send,
)
from kv_transfer.plan import Export, check_grant
from kv_transfer.shipment import Shipment
from kv_transfer.ticket import Permit, refuse_holder


class SendingState(Enum):
    """Where one hand-off stands on the prefill worker."""

    OPENED = "opened"
    RESERVING = "reserving"
    WRITING = "writing"
    COMMITTING = "committing"
    ABORTING = "aborting"
    OVER = "over"


_S = SendingState
TRANSITIONS: dict[SendingState, frozenset[SendingState]] = {
    _S.OPENED: frozenset({_S.RESERVING, _S.ABORTING}),
    _S.RESERVING: frozenset({_S.WRITING, _S.ABORTING}),
    _S.WRITING: frozenset({_S.COMMITTING, _S.ABORTING}),
    _S.COMMITTING: frozenset({_S.ABORTING, _S.OVER}),
    _S.ABORTING: frozenset({_S.OVER}),
    _S.OVER: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sending:
    """Pure. Every method returns what the shell has to do. Changed by the outbox only.

    Attributes:
        permit: The router's word for this attempt.
        shipment: The pages.
        state: Where it stands.
        started_s: When the first chunk of the prompt was scheduled.
        granted_s: When the peer's pages were there.
        drawn_s: When the first tokens were.
        first_tokens: Those, once they are drawn.
        cut_off: Whether the session is over, so that the peer can be told nothing.
    """

    permit: Permit
    shipment: Shipment
    state: SendingState = _S.OPENED
    started_s: float | None = None
    granted_s: float = 0.0
    drawn_s: float = 0.0
    first_tokens: tuple[TokenSample, ...] | None = None
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
    def ending(self) -> bool:
        """Whether it only waits for pushes to come back, or not even for that."""
        return self.state in (_S.ABORTING, _S.OVER)

    def start(self, now_s: float, *, connected: bool) -> list[OutboxAction]:
        """A sign that the prompt is being computed; a later one means it was preempted.

        Args:
            now_s: When.
            connected: Whether the peer can be asked for pages already (else `peer_up` does).
        """
        if self.started_s is not None:
            return []
        self.started_s = now_s
        return self._reserve() if connected else []

    def peer_up(self) -> list[OutboxAction]:
        """The session is open."""
        waits = self.started_s is not None and self.state is _S.OPENED
        return self._reserve() if waits else []

    def export(self, export: Export, now_s: float, *, connected: bool) -> list[OutboxAction]:
        """The engine completed pages of one layer."""
        if self.state is _S.COMMITTING:
            raise InvariantError(f"pages of {self.xfer_id} were exported after its commit")
        try:
            self.shipment.export(export)
        except TransferError as error:
            return self.fail(error)
        return [*self.start(now_s, connected=connected), *self.shipment.start()]

    def granted(
        self, granted: Granted, peer: PeerUp, link: LinkPlan, now_s: float
    ) -> list[OutboxAction]:
        """The peer answers the reservation; `link` is what is written of each page."""
        grant, num_blocks = granted.grant, self.permit.num_blocks
        if granted.cache_scope != self.permit.cache_scope:
            return self.fail(refuse_holder("cache_scope"))
        try:
            check_grant(grant, num_blocks=num_blocks, region_blocks=peer.region_blocks)
        except TransferError as error:
            return self.fail(error)
        self._move(_S.WRITING)
        self.granted_s = now_s
        self.shipment.grant(grant, link, checksums=peer.checksums)
        return [*self.shipment.start(), *self._try_commit()]

    def drew(self, first_tokens: tuple[TokenSample, ...], now_s: float) -> list[OutboxAction]:
        """The first tokens are known."""
        self.first_tokens, self.drawn_s = first_tokens, now_s
        return self._try_commit()

    def push_done(self, event: PushDone) -> list[OutboxAction]:
        """A push came back, landed or not."""
        if not self.shipment.is_outstanding(event.push_id):
            raise InvariantError(f"push {event.push_id} of {self.xfer_id} was never started")
        if self.state is _S.ABORTING:
            self.shipment.give_up(event.push_id)
            return self._try_quiesce()
        if event.error is not None:
            self.shipment.give_up(event.push_id)
            return self.fail(event.error)
        self.shipment.land(event.push_id, event.hashes)
        return [*self.shipment.start(), *self._try_commit()]

    def committed(self, now_s: float) -> list[OutboxAction]:
        """The peer verified the commit; before there was one it says nothing."""
        if self.state is not _S.COMMITTING:
            return []
        assert self.started_s is not None
        self._move(_S.OVER)
        done = HandOver(
            xfer_id=self.xfer_id,
            peer=self.peer,
            blocks_sent=self.shipment.num_pages,
            bytes_sent=self.shipment.num_bytes,
            reserve_wait_s=self.granted_s - self.started_s,
            unhidden_s=now_s - self.drawn_s,
        )
        return [done]

    def peer_down(self, error: BatonError) -> list[OutboxAction]:
        """The session broke, or never came up."""
        self.cut_off = True
        return [] if self.ending else self.fail(error)

    def fail(self, error: BatonError) -> list[OutboxAction]:
        """The pages will not be taken."""
        return [HandOverFailed(xfer_id=self.xfer_id, error=error), *self.give_up()]

    def give_up(self) -> list[OutboxAction]:
        """The leg is over here: nothing more is pushed, and the peer is told once nothing is outstanding."""
        self.shipment.stop()
        self._move(_S.ABORTING)
        return self._try_quiesce()

    def check_integrity(self) -> None:
        """Raises InvariantError if it contradicts itself."""
        self.shipment.check_integrity()
        granted, outstanding = self.shipment.granted, self.shipment.outstanding
        consistent = (
            self.state is not _S.OVER
            and (granted or self.state not in (_S.WRITING, _S.COMMITTING))
            and not (self.state is _S.COMMITTING and outstanding)
            and not (self.state is _S.ABORTING and not outstanding)
        )
        if not consistent:
            raise InvariantError(f"hand-off {self.xfer_id} is inconsistent: {self!r}")

    def _reserve(self) -> list[OutboxAction]:
        self._move(_S.RESERVING)
        return [self._tell(Reserve(permit=self.permit))]

    def _try_commit(self) -> list[OutboxAction]:
        if self.state is not _S.WRITING or self.first_tokens is None or not self.shipment.complete:
            return []
        self._move(_S.COMMITTING)
        commit = Commit(
            xfer_id=self.xfer_id,
            attempt=self.attempt,
            num_blocks=self.shipment.num_pages,
            num_bytes=self.shipment.num_bytes,
            first_tokens=self.first_tokens,
            checksums=self.shipment.checksums(),
        )
        return [self._tell(commit)]

    def _try_quiesce(self) -> list[OutboxAction]:
        if self.shipment.outstanding:
            return []
        self._move(_S.OVER)
        quiesced = Quiesced(xfer_id=self.xfer_id, attempt=self.attempt)
        return [] if self.cut_off else [self._tell(quiesced)]

    def _tell(self, message: ToDecode) -> Send:
        return Send(peer=self.peer, message=message)

    def _move(self, state: SendingState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"hand-off {self.xfer_id}: {self.state} to {state}")
        self.state = state
