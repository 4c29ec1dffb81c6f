"""What workers' messages do to a flight: tokens reach the client, legs close, and a verdict falls when it matters.

Knows nothing of other flights, of retrying or of who else there is; the dispatcher acts on the verdicts.
"""

from collections.abc import Iterable

from baton.errors import BatonError, DrainingError, EngineError
from baton.generation import FinishReason, TokenSample
from baton.ids import WorkerIdentity
from router.actions import Action, Emit
from router.blame import spares_decode, suspects, tells_of_health
from router.events import (
    DecodeTokens,
    FirstTokensArrived,
    HandedOff,
    LegEvent,
    LegFailed,
    LocallyPrefilled,
    PutInPool,
    SampleFinished,
    Service,
    WriterLost,
)
from router.flight import Flight, FlightState
from router.legs import Leg, LegTable
from router.routing.pools import node_of
from router.verdicts import Broken, Orphaned, Over, Pooled, Settling, Verdict

_UNDECIDED = (FlightState.PREFILLING, FlightState.HANDING_OVER)


Progress = tuple[list[Action], Verdict | None]


class FlightProgress:
    """Applies leg events to flights.

    Args:
        legs: The open ones; closed here as workers end them.
    """

    def __init__(self, legs: LegTable) -> None:
        self._legs = legs

    def handle(self, event: LegEvent, now_s: float) -> Progress:
        """Actions for the client, and a verdict if the flight cannot just go on. Old news is nothing."""
        leg = self._legs.find(event)
        if leg is None:
            return [], None
        leg.worker.progress_s = leg.worker.heard_s = now_s
        if isinstance(event, LegFailed):
            return [], self._drop(leg, event.error, now_s)
        if leg.service is not _SERVICE_OF[type(event)]:
            return self._breach(leg, "spoke of a leg on the wrong stream", now_s)
        match event:
            case DecodeTokens():
                return self._decode_tokens(leg, event, now_s)
            case FirstTokensArrived():
                return self._first_tokens(leg, event, now_s)
            case HandedOff():
                return self._handed_off(leg, event, now_s)
            case PutInPool():
                return self._put_in_pool(leg, now_s)
            case WriterLost():
                return self._writer_lost(leg, event)
            case LocallyPrefilled():
                return self._locally_prefilled(leg, event, now_s)
            case SampleFinished():
                return self._sample_finished(leg, event, now_s)

    def legs_gone(
        self, flight: Flight, error: BatonError, blamed: Iterable[WorkerIdentity], now_s: float
    ) -> Verdict | None:
        """Some legs of `flight` were closed by a failure: is what is left enough?"""
        if flight.state is FlightState.SETTLING:
            return Over(flight=flight)
        if flight.decode is not None and flight.decoded:
            # D decodes, so it has the KV: P was done but for saying so.
            return self._prefill_done(flight, now_s)
        if flight.decode is not None and flight.state in _UNDECIDED and not flight.early:
            return Orphaned(flight=flight, error=error, blamed=frozenset(blamed))
        return Broken(flight=flight, error=error, blamed=frozenset(blamed))

    def settle(self, flight: Flight, now_s: float) -> Verdict | None:
        """After a sample has ended: does the flight still have something to do?"""
        if flight.wanted:
            return None
        if flight.decode is not None and flight.decoded:
            flight.decode.worker.breaker.succeeded(now_s)
        ran_out = flight.decoded and not flight.decoding
        if ran_out and flight.decode is not None:
            self._legs.close(flight.decode)
        if ran_out and flight.state is FlightState.HANDING_OVER:
            flight.move(FlightState.SETTLING, now_s)
            return Settling(flight=flight)
        return Over(flight=flight)

    def _first_tokens(self, leg: Leg, event: FirstTokensArrived, now_s: float) -> Progress:
        flight = leg.flight
        drawn = {token.sample for token in event.tokens}
        if flight.state is not FlightState.PREFILLING or drawn != set(flight.samples):
            return self._breach(leg, "sent first tokens that were not asked for", now_s)
        if _aborted(event.tokens):
            return self._breach(leg, "aborted a sample", now_s)
        leg.computed(event, now_s)
        known = flight.first is not None
        if flight.first is not None and not _same(flight.first, event.tokens):
            # Two logits were all but equal. The client has the other token: go on from what it has.
            error = EngineError("the prompt was computed again and gave another token")
            return [], Broken(flight=flight, error=error)
        flight.first = event.tokens
        flight.job.watch.prefilled(event)
        flight.decoding = {token.sample for token in event.tokens if token.finish is None}
        flight.move(FlightState.HANDING_OVER, now_s)
        if not known:
            flight.job.prompt_logprobs = event.prompt_logprobs
        actions = [] if known else _emit(flight, event.tokens, now_s)
        verdict = self.settle(flight, now_s)
        held_back, flight.early = flight.early, []
        for early in held_back:
            if verdict is None:
                more, verdict = self.handle(early, now_s)
                actions += more
        return actions, verdict

    def _decode_tokens(self, leg: Leg, event: DecodeTokens, now_s: float) -> Progress:
        flight = leg.flight
        if flight.state is FlightState.PREFILLING:
            flight.early.append(event)
            return [], None
        if not flight.decoded:
            flight.begin_decoding(now_s)
        leg.grew(len(event.tokens))
        ended = False
        for token in event.tokens:
            if token.sample not in flight.samples:
                return self._breach(leg, f"sent a token of sample {token.sample}", now_s)
            if token.finish is not None:
                ended = True
                flight.decoding.discard(token.sample)
        if ended and _aborted(event.tokens):
            return self._breach(leg, "aborted a sample", now_s)
        actions = _emit(flight, event.tokens, now_s)
        return actions, self.settle(flight, now_s) if ended else None

    def _sample_finished(self, leg: Leg, event: SampleFinished, now_s: float) -> Progress:
        flight = leg.flight
        if flight.state is FlightState.PREFILLING:
            flight.early.append(event)
            return [], None
        flight.decoding.discard(event.sample)
        if not flight.job.finished(event.sample):
            return self._breach(leg, f"ended sample {event.sample} without a token", now_s)
        return [], self.settle(flight, now_s)

    def _writer_lost(self, leg: Leg, event: WriterLost) -> Progress:
        flight = leg.flight
        current = flight.permit is not None and flight.permit.attempt == event.attempt
        if not current or flight.decoded or flight.early or flight.state not in _UNDECIDED:
            return [], None
        actions: list[Action] = []
        blamed: frozenset[WorkerIdentity] = frozenset()
        if flight.prefill is not None:
            blamed = frozenset({flight.prefill.worker.identity})
            actions.append(flight.prefill.cancel())
            self._legs.close(flight.prefill)
        return actions, Orphaned(flight=flight, error=event.error, blamed=blamed)

    def _locally_prefilled(self, leg: Leg, event: LocallyPrefilled, now_s: float) -> Progress:
        leg.computed(event, now_s)
        leg.flight.job.watch.prefilled(event)
        leg.flight.job.prompt_logprobs = event.prompt_logprobs
        return [], None

    def _handed_off(self, leg: Leg, event: HandedOff, now_s: float) -> Progress:
        flight = leg.flight
        if flight.state is FlightState.PREFILLING:
            return self._breach(leg, "handed over before its first tokens", now_s)
        flight.job.watch.handed_off(event)
        leg.worker.breaker.succeeded(now_s)
        if flight.decode is not None:
            leg.handed_to(flight.decode.worker, event)
        self._legs.close(leg)
        return [], self._prefill_done(flight, now_s)

    def _put_in_pool(self, leg: Leg, now_s: float) -> Progress:
        flight = leg.flight
        if flight.state is FlightState.PREFILLING:
            return self._breach(leg, "put a prompt into the pool before its first tokens", now_s)
        if flight.decoded or flight.decode is None:
            return self._breach(leg, "put a prompt into the pool that was handed over", now_s)
        leg.worker.breaker.succeeded(now_s)
        self._legs.close(leg)
        node = node_of(leg.worker.load)
        in_reach = node is not None and node == node_of(flight.decode.worker.load)
        return [], Pooled(flight=flight, in_reach=in_reach)

    def _prefill_done(self, flight: Flight, now_s: float) -> Verdict | None:
        """P has nothing more to say: D goes on alone, or the flight is over."""
        if flight.state is FlightState.SETTLING:
            return Over(flight=flight)
        flight.move(FlightState.DECODING, now_s)
        return None

    def _breach(self, leg: Leg, what: str, now_s: float) -> Progress:
        """The worker broke the contract for this leg: cancel it and go on elsewhere."""
        error = EngineError(f"worker {leg.worker.identity} {what}")
        return [leg.cancel()], self._drop(leg, error, now_s)

    def _drop(self, leg: Leg, error: BatonError, now_s: float) -> Verdict | None:
        flight = leg.flight
        suspected = suspects(leg, error)
        blamed = {worker.identity for worker in suspected}
        if tells_of_health(error):
            for worker in suspected:
                worker.breaker.failed(now_s)
        if isinstance(error, DrainingError):
            leg.worker.draining = True
        self._legs.close(leg)
        verdict = self.legs_gone(flight, error, blamed, now_s)
        if isinstance(verdict, Orphaned) and not spares_decode(error):
            return Broken(flight=flight, error=error, blamed=verdict.blamed)
        return verdict


_SERVICE_OF: dict[type[LegEvent], Service] = {
    DecodeTokens: Service.DECODE,
    SampleFinished: Service.DECODE,
    LocallyPrefilled: Service.DECODE,
    FirstTokensArrived: Service.PREFILL,
    HandedOff: Service.PREFILL,
    PutInPool: Service.PREFILL,
    WriterLost: Service.DECODE,
}


def _emit(flight: Flight, tokens: tuple[TokenSample, ...], now_s: float) -> list[Action]:
    job = flight.job
    fresh = job.accept(tokens, now_s)
    if not fresh:
        return []
    scores = None if job.prompt_logprobs is None else job.take_prompt_logprobs()
    return [Emit(request_id=job.request_id, tokens=fresh, prompt_logprobs=scores)]


def _same(first: Iterable[TokenSample], again: Iterable[TokenSample]) -> bool:
    return {t.sample: t.token for t in first} == {t.sample: t.token for t in again}


def _aborted(tokens: Iterable[TokenSample]) -> bool:
    return any(token.finish is FinishReason.ABORT for token in tokens)
