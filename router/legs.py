"""The open legs of all flights, and how they begin: with a count on a worker's view and a command to it.

A leg is open from its command until the worker ends it, the worker is lost, or the router cancels it; whatever a worker
says about a leg that is not open is old news.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from baton.errors import InvariantError
from baton.generation import Prompt
from baton.ids import LegId, WorkerIdentity
from kv_transfer.ticket import Permit
from router.actions import SendCancel, SendExpect, SendGenerate, SendPrefill, SendReassign
from router.events import FirstTokensArrived, HandedOff, LegEvent, LocallyPrefilled, Service
from router.flight import Flight
from router.routing.policy import Pair
from router.routing.worker_view import WorkerView


@dataclass(slots=True, eq=False)
class Leg:
    """One leg on one worker, and what it adds to the worker's counts while it is open.

    Attributes:
        prompt_tokens: Of the prompt that is computed there; 0 where none is.
        compute_s: How long that should take.
        computed_s: How long it took, by the worker's own clock.
    """

    leg_id: LegId
    service: Service
    worker: WorkerView
    flight: Flight
    prefill_tokens: int = 0
    sequences: int = 0
    context_tokens: int = 0
    prompt_tokens: int = 0
    compute_s: float = 0.0
    computed_s: float = 0.0
    tbt_s: float | None = None

    def open(self, now_s: float) -> None:
        """Counts it on its worker."""
        worker = self.worker
        worker.breaker.started(now_s)
        if worker.legs == 0:
            worker.progress_s = now_s
        worker.legs += 1
        worker.prefills += self.prefill_tokens > 0
        worker.prefill_tokens += self.prefill_tokens
        worker.decode_sequences += self.sequences
        worker.decode_tokens += self.context_tokens
        if self.prompt_tokens:
            worker.forecast.queued(self.leg_id, self.compute_s, now_s)

        if self.tbt_s is not None:
            targets = worker.tbt_targets
            targets[self.tbt_s] = targets.get(self.tbt_s, 0) + 1

    def computed(self, event: FirstTokensArrived | LocallyPrefilled, now_s: float) -> None:
        """The prompt's KV is there, by the worker's own account."""
        self._count_prompt_out()
        self.computed_s = event.prefill_s
        forecast = self.worker.forecast
        forecast.left(self.leg_id, now_s)
        if event.pooled_tokens:
            return  # fetching and computing went on at once: what either took alone it does not say
        cached_tokens = min(event.cached_tokens, self.prompt_tokens)
        forecast.prefilled(self.prompt_tokens - cached_tokens, cached_tokens, event.prefill_s)

    def grew(self, num_tokens: int) -> None:
        """The context got longer."""
        self.context_tokens += num_tokens
        self.worker.decode_tokens += num_tokens

    def handed_to(self, decode: WorkerView, event: HandedOff) -> None:
        """The KV is with `decode`: a measurement of the link."""
        # Pages can go once they are granted; what is sent before the first token costs nobody anything.
        window_s = max(0.0, self.computed_s - event.reserve_wait_s)
        self.worker.forecast.handed_off(decode.slot, event.bytes_sent, window_s, event.unhidden_s)

    def close(self) -> None:
        """Takes all it counted off its worker."""
        self._count_prompt_out()
        worker = self.worker
        worker.legs -= 1
        worker.decode_sequences -= self.sequences
        worker.decode_tokens -= self.context_tokens
        worker.forecast.left(self.leg_id)
        if self.tbt_s is not None:
            worker.tbt_targets[self.tbt_s] -= 1
            if not worker.tbt_targets[self.tbt_s]:
                del worker.tbt_targets[self.tbt_s]

    def _count_prompt_out(self) -> None:
        self.worker.prefills -= self.prefill_tokens > 0
        self.worker.prefill_tokens -= self.prefill_tokens
        self.prefill_tokens = 0

    def cancel(self) -> SendCancel:
        """The command that makes its worker forget it."""
        return SendCancel(worker=self.worker.identity, leg_id=self.leg_id)


class LegTable:
    """Every open leg of this router. Ids are never used twice."""

    def __init__(self) -> None:
        self._legs: dict[LegId, Leg] = {}
        self._ids = count(1)

    def find(self, event: LegEvent) -> Leg | None:
        """The open leg that `event` is about; None when it is over, or another worker's."""
        return self.at(event.leg_id, event.worker)

    def at(self, leg_id: LegId, worker: WorkerIdentity) -> Leg | None:
        """The open leg of that id on that worker, if there is one."""
        leg = self._legs.get(leg_id)
        if leg is None:
            return None
        identity = leg.worker.hello.identity
        # Nearly always the same object, and this is asked for every token.
        return leg if identity is worker or identity == worker else None

    def on_worker(self, worker: WorkerView) -> list[Leg]:
        """Those that `worker` runs."""
        return [leg for leg in self._legs.values() if leg.worker is worker]

    def start_local(self, flight: Flight, pair: Pair, now_s: float) -> SendGenerate:
        """One leg that prefills and decodes."""
        prompt, worker = flight.prompt(), pair.decode
        leg = self._open(Service.DECODE, flight, worker)
        leg.prefill_tokens = leg.context_tokens = leg.prompt_tokens = prompt.num_tokens
        leg.compute_s = pair.compute_s
        leg.sequences = len(prompt.samples)
        leg.tbt_s = flight.job.slo.tbt_s
        leg.open(now_s)
        flight.decode = leg
        return SendGenerate(
            worker=worker.identity,
            leg_id=leg.leg_id,
            request_id=flight.job.request_id,
            trace_parent=flight.job.trace_parent,
            prompt=prompt,
        )

    def start_pair(
        self, flight: Flight, pair: Pair, permit: Permit, now_s: float
    ) -> tuple[SendExpect, SendPrefill]:
        """A leg on each of two workers, tied by a transfer."""
        prompt = flight.prompt()
        decode = self._open(Service.DECODE, flight, pair.decode)
        decode.context_tokens, decode.sequences = prompt.num_tokens, len(prompt.samples)
        decode.tbt_s = flight.job.slo.tbt_s
        decode.open(now_s)
        flight.decode, flight.asked = decode, prompt
        expect = SendExpect(
            worker=pair.decode.identity,
            leg_id=decode.leg_id,
            request_id=flight.job.request_id,
            trace_parent=flight.job.trace_parent,
            prompt=prompt,
            permit=permit,
        )
        return expect, self._start_prefill(flight, pair, prompt, permit, now_s)

    def take_over(
        self, flight: Flight, pair: Pair, permit: Permit, now_s: float
    ) -> tuple[SendReassign, SendPrefill]:
        """A new leg on another P for D's leg as it stands: the same prompt, the same pages."""
        assert flight.decode is not None
        assert flight.asked is not None
        reassign = SendReassign(
            worker=pair.decode.identity, leg_id=flight.decode.leg_id, permit=permit
        )
        return reassign, self._start_prefill(flight, pair, flight.asked, permit, now_s)

    def _start_prefill(
        self, flight: Flight, pair: Pair, prompt: Prompt, permit: Permit, now_s: float
    ) -> SendPrefill:
        prefill = self._open(Service.PREFILL, flight, pair.prefill)
        prefill.prefill_tokens = prefill.prompt_tokens = prompt.num_tokens
        prefill.compute_s = pair.compute_s
        prefill.open(now_s)
        flight.prefill, flight.permit = prefill, permit
        return SendPrefill(
            worker=pair.prefill.identity,
            leg_id=prefill.leg_id,
            request_id=flight.job.request_id,
            trace_parent=flight.job.trace_parent,
            prompt=prompt,
            permit=permit,
            transfer_address=pair.decode.hello.transfer_address,
        )

    def close(self, leg: Leg) -> None:
        """The leg is over."""
        leg.close()
        del self._legs[leg.leg_id]
        if leg.service is Service.PREFILL:
            leg.flight.prefill = None
        else:
            leg.flight.decode = None

    def check_integrity(self, flights: Iterable[Flight], workers: Iterable[WorkerView]) -> None:
        """Raises `InvariantError` unless these are the legs of `flights`, and `workers` count them."""
        if {leg.leg_id: leg for flight in flights for leg in flight.legs} != self._legs:
            raise InvariantError("the open legs are not those of the flights")
        for worker in workers:
            mine = self.on_worker(worker)
            counted = (worker.legs, worker.prefill_tokens, worker.decode_sequences)
            prefill_tokens = sum(leg.prefill_tokens for leg in mine)
            expected = (len(mine), prefill_tokens, sum(leg.sequences for leg in mine))
            if counted != expected:
                raise InvariantError(f"{worker.identity} counts {counted}, has {expected}")

    def _open(self, service: Service, flight: Flight, worker: WorkerView) -> Leg:
        leg = Leg(leg_id=LegId(next(self._ids)), service=service, worker=worker, flight=flight)
        self._legs[leg.leg_id] = leg
        return leg
