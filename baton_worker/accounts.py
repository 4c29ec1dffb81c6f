"""What a worker counts and traces of its legs, as it is told to their routers."""

from baton.errors import TicketError
from baton.ids import SeqId
from baton.telemetry.logs import get_logger
from baton_worker.legs import LegKey, StreamId
from baton_worker.lifecycle import LegLifecycle
from baton_worker.messages import (
    FailedMessage,
    HandedOffMessage,
    LinkProbedMessage,
    PooledMessage,
    PrefilledMessage,
    RouterMessage,
    TokensMessage,
    WriterLostMessage,
)
from baton_worker.metrics import WorkerMetrics
from baton_worker.spans import LegSpans

_log = get_logger(__name__)


class LegAccounts:
    """For one event loop.

    Args:
        lifecycle: Asked, never told.
        metrics: Of the worker.
        spans: Of legs whose requests are traced.
    """

    def __init__(self, lifecycle: LegLifecycle, metrics: WorkerMetrics, spans: LegSpans) -> None:
        self._lifecycle = lifecycle
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

    def told(self, message: RouterMessage) -> None:
        """A router is told this."""
        match message:
            case TokensMessage():
                self._metrics.drew(len(message.tokens))
                if self._spans:
                    for leg_id in dict.fromkeys(message.leg_ids):
                        self._drew((message.stream, leg_id))
            case PrefilledMessage():
                self._prefilled(message)
            case HandedOffMessage():
                self._handed_off(message)
            case PooledMessage():
                self._metrics.pooled()
                self._spans.over((message.stream, message.leg_id))
            case WriterLostMessage():
                _log.info("a sending worker was lost in mid-transfer", reason=message.error.message)
            case FailedMessage():
                self._metrics.failed(message.kind.value, message.error)
                self._spans.over((message.stream, message.leg_id))
            case LinkProbedMessage():
                pass  # the session's own events are logged and counted

    def ticket_refused(self, error: TicketError) -> None:
        """A router showed a permit that is not good."""
        _log.warning("a permit was refused", reason=error.message)
        self._metrics.ticket_refused(error.param or "other")

    def observe(self) -> None:
        """Takes over what the lifecycle has counted."""
        for (kind, outcome), total in self._lifecycle.outcomes.items():
            self._metrics.legs_ended(kind.value, outcome.value, total)

    def _drew(self, leg: LegKey) -> None:
        self._spans.decoded(leg)
        if not self._lifecycle.has_leg(leg):
            self._spans.over(leg)

    def _prefilled(self, message: PrefilledMessage) -> None:
        leg = message.stream, message.leg_id
        self._metrics.prefilled(
            prompt_tokens=message.prompt_tokens,
            queue_s=message.queue_s,
            prefill_s=message.prefill_s,
        )
        self._metrics.drew(len(message.first_tokens))
        self._spans.prefilled(
            leg,
            queue_s=message.queue_s,
            prefill_s=message.prefill_s,
            cached_tokens=message.cached_tokens,
        )
        if message.first_tokens and not self._lifecycle.has_leg(leg):
            self._spans.over(leg)  # nothing is left to decode

    def _handed_off(self, message: HandedOffMessage) -> None:
        done = message.done
        self._metrics.handed_off(done)
        self._spans.handed_off(
            (message.stream, message.leg_id),
            reserve_wait_s=done.reserve_wait_s,
            unhidden_s=done.unhidden_s,
            bytes_sent=done.bytes_sent,
        )
