"""The spans of a worker's legs: what a leg that is traced went through here, recorded when each part of it is over."""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.clock import Clock
from baton.telemetry.span_names import (
    CACHED_TOKENS,
    DECODE,
    DECODE_QUEUE,
    PREFILL,
    PREFILL_QUEUE,
    TRANSFER,
    TRANSFER_BYTES,
    TRANSFER_UNHIDDEN_S,
    WORKER,
)
from baton.telemetry.tracing import Attribute, Tracer
from baton_worker.legs import LegKey, StreamId


@dataclass(slots=True, eq=False)
class _Traced:
    """A leg whose request is traced; times are set once they are known."""

    parent: str
    prefilling_s: float = 0.0
    ready_s: float | None = None
    decoding_s: float | None = None


class LegSpans:
    """For one event loop. Legs that are not traced are not known here, and cost a look into an empty table.

    Args:
        tracer: Takes the spans.
        worker: This worker's name.
        clock: Of the worker's other times.
    """

    def __init__(self, tracer: Tracer, worker: str, clock: Clock) -> None:
        self._tracer = tracer
        self._worker = worker
        self._clock = clock
        self._legs: dict[LegKey, _Traced] = {}

    def __len__(self) -> int:
        return len(self._legs)

    def begin(self, leg: LegKey, trace_parent: str) -> None:
        """A leg came; an empty `trace_parent` says that its request is not traced."""
        if trace_parent:
            self._legs[leg] = _Traced(parent=trace_parent)

    def prefilled(
        self, leg: LegKey, *, queue_s: float, prefill_s: float, cached_tokens: int
    ) -> None:
        """The first token is drawn: waiting and computing are over."""
        traced = self._legs.get(leg)
        if traced is None:
            return
        now_s = self._clock.now_s()
        traced.prefilling_s = now_s - prefill_s
        self._record(PREFILL_QUEUE, traced, traced.prefilling_s - queue_s, traced.prefilling_s, {})
        self._record(PREFILL, traced, traced.prefilling_s, now_s, {CACHED_TOKENS: cached_tokens})

    def handed_off(
        self, leg: LegKey, *, reserve_wait_s: float, unhidden_s: float, bytes_sent: int
    ) -> None:
        """The pages are with the decode worker, and the leg is over here."""
        traced = self._legs.pop(leg, None)
        if traced is not None:
            sent: dict[str, Attribute] = {
                TRANSFER_BYTES: bytes_sent,
                TRANSFER_UNHIDDEN_S: unhidden_s,
            }
            start_s = traced.prefilling_s + reserve_wait_s
            self._record(TRANSFER, traced, start_s, self._clock.now_s(), sent)

    def ready(self, leg: LegKey) -> None:
        """The KV is here; the leg waits for the next step."""
        traced = self._legs.get(leg)
        if traced is not None:
            traced.ready_s = self._clock.now_s()

    def decoded(self, leg: LegKey) -> None:
        """Tokens were drawn; the first ones end the wait for a step."""
        traced = self._legs.get(leg)
        if traced is None or traced.decoding_s is not None:
            return
        traced.decoding_s = self._clock.now_s()
        if traced.ready_s is not None:
            self._record(DECODE_QUEUE, traced, traced.ready_s, traced.decoding_s, {})

    def over(self, leg: LegKey) -> None:
        """The leg is over, however it ended."""
        traced = self._legs.pop(leg, None)
        if traced is not None and traced.decoding_s is not None:
            self._record(DECODE, traced, traced.decoding_s, self._clock.now_s(), {})

    def stream_gone(self, stream: StreamId) -> None:
        """All legs of a router are over."""
        for leg in [leg for leg in self._legs if leg[0] == stream]:
            self.over(leg)

    def _record(
        self,
        name: str,
        traced: _Traced,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Attribute],
    ) -> None:
        said = {WORKER: self._worker, **attributes}
        self._tracer.record(
            name, parent=traced.parent, start_s=start_s, end_s=end_s, attributes=said
        )
