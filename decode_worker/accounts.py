"""What a decode worker counts and traces of its legs, as it is told to their routers."""

from baton.errors import TicketError
from baton.ids import SeqId
from baton.rpc.frames import LegKey, StreamId
from baton.telemetry.leg_spans import LegSpans
from baton.telemetry.logs import get_logger
from baton.telemetry.worker import WorkerMetrics
from decode_worker.legs import OWNER
from decode_worker.lifecycle import DecodeLifecycle
from decode_worker.messages import Tell, TellFailed, TellPrefilled, TellTokens, TellWriterLost
from decode_worker.metrics import DecodeMetrics

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
        lifecycle: DecodeLifecycle,
        *,
        shared: WorkerMetrics,
        metrics: DecodeMetrics,
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

    def ready(self, seq_id: SeqId) -> None:
        """A sequence has its KV; it waits for the engine's next step."""
        leg = self._lifecycle.leg_of(seq_id) if self._spans else None
        if leg is not None:
            self._spans.ready(leg)

    def told(self, tell: Tell) -> None:
        """A router is told this."""
        match tell:
            case TellTokens():
                self._shared.generation_tokens.inc(len(tell.tokens))
                if self._spans:
                    self._drew((tell.stream, tell.leg_id))
            case TellPrefilled():
                self._prefilled(tell)
            case TellWriterLost():
                _log.info("a prefill worker was lost in mid-transfer", reason=tell.error.message)
            case TellFailed():
                self._metrics.failed(tell.error)
                self._spans.over((tell.stream, tell.leg_id))

    def permit_refused(self, error: TicketError) -> None:
        """Somebody showed a permit that is not good."""
        _log.warning("a permit was refused", reason=error.message)
        self._shared.ticket_refused(error.param or "other")

    def handshake_refused(self, field: str) -> None:
        """A prefill worker was not let in."""
        self._shared.handshake_refused(field)

    def cut_off(self) -> None:
        """A prefill worker's session is ended from here."""
        self._metrics.cut_off()

    def observe(self) -> None:
        """Takes over what the lifecycle has counted."""
        self._metrics.refused(self._lifecycle.refused_messages)
        self._metrics.integrity(
            corrupted=self._lifecycle.corrupted_transfers,
            quarantined=self._lifecycle.quarantined_pages(),
        )
        for outcome, total in self._lifecycle.outcomes.items():
            self._shared.legs_ended(OWNER, outcome.value, total)

    def _drew(self, leg: LegKey) -> None:
        self._spans.decoded(leg)
        if not self._lifecycle.has_leg(leg):
            self._spans.over(leg)

    def _prefilled(self, tell: TellPrefilled) -> None:
        self._shared.queue_s.observe(tell.queue_s)
        self._shared.prefill_s.observe(tell.prefill_s)
        self._shared.prompt_tokens.inc(tell.prompt_tokens)
        self._spans.prefilled(
            (tell.stream, tell.leg_id),
            queue_s=tell.queue_s,
            prefill_s=tell.prefill_s,
            cached_tokens=tell.cached_tokens,
        )
