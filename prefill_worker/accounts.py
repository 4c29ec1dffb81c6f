"""What a prefill worker counts and traces of its legs, as it is told to their routers."""

from baton.errors import LeaseExpiredError, TicketError, TransferError
from baton.rpc.frames import LegKey, StreamId
from baton.telemetry.leg_spans import LegSpans
from baton.telemetry.logs import get_logger
from baton.telemetry.worker import WorkerMetrics
from kv_transfer.ledger.outbox import PushDone
from prefill_worker.legs import OWNER
from prefill_worker.lifecycle import PrefillLifecycle
from prefill_worker.messages import Tell, TellFailed, TellFirstTokens, TellHandedOff, TellPooled
from prefill_worker.metrics import PrefillMetrics

_log = get_logger(__name__)


class LegAccounts:
    """For one event loop.

    Args:
        lifecycle: Asked, never told.
        shared: Of the whole process.
        metrics: Of this service.
        spans: Of legs whose requests are traced.
    """

    def __init__(
        self,
        lifecycle: PrefillLifecycle,
        *,
        shared: WorkerMetrics,
        metrics: PrefillMetrics,
        spans: LegSpans,
    ) -> None:
        self._lifecycle = lifecycle
        self._shared = shared
        self._metrics = metrics
        self._spans = spans

    def began(self, leg: LegKey, trace_parent: str) -> None:
        """A router sent a leg."""
        self._spans.begin(leg, trace_parent)

    def cancelled(self, leg: LegKey) -> None:
        """Its router wants it no more."""
        self._spans.over(leg)

    def stream_gone(self, stream: StreamId) -> None:
        """A router is gone, and its legs with it."""
        self._spans.stream_gone(stream)

    def told(self, tell: Tell) -> None:
        """A router is told this."""
        match tell:
            case TellFirstTokens():
                self._prefilled(tell)
            case TellHandedOff():
                self._handed_off(tell)
            case TellPooled():
                self._metrics.detoured()
                self._spans.over((tell.stream, tell.leg_id))
            case TellFailed():
                self._metrics.failed(tell.error)
                self._spans.over((tell.stream, tell.leg_id))

    def pushed(self, done: PushDone) -> None:
        """A write is over; one that came after the peer's lease was not made."""
        if isinstance(done.error, LeaseExpiredError):
            self._metrics.fenced_write()

    def ticket_refused(self, error: TicketError) -> None:
        """Somebody showed a permit or ticket that is not good."""
        _log.warning("a permit or ticket was refused", reason=error.message)
        self._shared.ticket_refused(error.param or "other")

    def handshake_refused(self, field: str) -> None:
        """A decode worker did not let this one in."""
        self._shared.handshake_refused(field)

    def unreachable(self, peer: str, backend: str, error: TransferError) -> None:
        """A decode worker cannot be written to by this backend."""
        _log.warning(
            "a decode worker cannot be reached by a backend",
            peer=peer,
            backend=backend,
            reason=error.message,
        )
        self._metrics.unreachable(backend)

    def observe(self) -> None:
        """Takes over what the lifecycle has counted."""
        for outcome, total in self._lifecycle.outcomes.items():
            self._shared.legs_ended(OWNER, outcome.value, total)
        self._metrics.refused(self._lifecycle.refused_messages)

    def _prefilled(self, tell: TellFirstTokens) -> None:
        self._shared.prefilled(
            prompt_tokens=tell.prompt_tokens, queue_s=tell.queue_s, prefill_s=tell.prefill_s
        )
        self._shared.drew(len(tell.tokens))
        self._spans.prefilled(
            (tell.stream, tell.leg_id),
            queue_s=tell.queue_s,
            prefill_s=tell.prefill_s,
            cached_tokens=tell.cached_tokens,
        )

    def _handed_off(self, tell: TellHandedOff) -> None:
        self._metrics.handed_over(tell.done)
        self._spans.handed_off(
            (tell.stream, tell.leg_id),
            reserve_wait_s=tell.done.reserve_wait_s,
            unhidden_s=tell.done.unhidden_s,
            bytes_sent=tell.done.bytes_sent,
        )
