"""Places an attempt on workers: hashes the prompt, asks the prefix index, lets the policy choose, logs the choice."""

from array import array
from collections.abc import Collection, Mapping, Sequence, Set
from functools import lru_cache
from hashlib import blake2b
from random import Random

from msgspec.structs import replace

from baton.generation import Prompt
from baton.ids import WorkerIdentity, XferId
from baton.layout import KvLayout
from kv_transfer.ticket import Permit, TicketOffice
from router.admission.capacity import WorkerCapacity
from router.dispatch.request import RequestState
from router.ports import Timing
from router.routing.chains import chain_of
from router.routing.explanation import DecisionLog, Measured
from router.routing.index import PrefixIndex
from router.routing.policy import Demand, Pair, Policy, RouteKind, Unavailable, decoders_of
from router.routing.predictive import prefill_work
from router.routing.table import Fingerprints, HeldBySlot
from router.routing.view import ClusterView, WorkerView, may_hand_off

_SESSION_TOKENS = 64
"""Prompts whose first tokens are these are taken for one session where the client names none."""

_INITIAL_OUTPUT_TOKENS = 128.0
"""Tokens of an output, until some have been seen."""

_OUTPUT_GAIN = 0.02


class Placement:
    """The routing side of the dispatcher.

    Args:
        view: The workers.
        index: Which worker holds which blocks.
        policy: How workers are priced.
        secret: The cluster secret that keys block hashes and signs permits.
        rng: Breaks ties.
        log: Remembers why; one of its own if None.
        capacity: Which decode workers can take more; all of them unless given.
    """

    def __init__(
        self,
        *,
        view: ClusterView,
        index: PrefixIndex,
        policy: Policy,
        secret: bytes,
        rng: Random,
        log: DecisionLog | None = None,
        capacity: WorkerCapacity | None = None,
    ) -> None:
        self._view = view
        self._index = index
        self._policy = policy
        self._secret = secret
        self._office = TicketOffice(secret)
        self._rng = rng
        self._capacity = capacity
        self._decisions = 0
        self._typical_output = _INITIAL_OUTPUT_TOKENS
        self.log = log or DecisionLog("")

    def choose(
        self, request: RequestState, prompt: Prompt, avoid: Set[WorkerIdentity], now_s: float
    ) -> Pair | Unavailable:
        """The pair for `prompt`, one of the request's; the choice is expected to hold its blocks soon."""
        usable: Sequence[WorkerView] = self._view.usable(now_s)
        if avoid:
            usable = tuple(worker for worker in usable if worker.identity not in avoid)
        if not usable:
            self.log.refused()
            return Unavailable(reason="no worker is available")
        usable, small = self._by_size(usable, prompt)
        if not usable:
            self.log.refused()
            return Unavailable(reason="no worker that is available has room for so long a text")
        demand = self._demand(request, prompt, now_s)
        if small:
            demand = replace(demand, full=small)
        chosen = self._connected_pair(usable, demand)
        if isinstance(chosen, Pair) and not self._has_capacity(chosen.decode, request, prompt):
            # The best of all workers, if it has capacity, is the best of those that have it:
            # nearly always no other need be asked.
            whole = [worker for worker in usable if worker.identity not in small]
            full = self._full(request, prompt, whole)
            kept = None if full else self._kept_on_prefill(request, prompt, whole)
            chosen = kept or self._connected_pair(usable, replace(demand, full=full | small))
        if isinstance(chosen, Unavailable):
            self.log.refused()
            return chosen
        self._remember(request, chosen, demand)
        return _with_work(chosen, demand)

    def single_worker(
        self, request: RequestState, prompt: Prompt, identity: WorkerIdentity, now_s: float
    ) -> Pair | None:
        """That worker for both prefill and decode, while it can be used."""
        worker = self._view.find(identity.worker_id)
        if worker is None or worker.identity != identity:
            return None
        if worker not in self._view.usable(now_s) or not worker.holds(*_whole_text(prompt)):
            return None
        pair = Pair(prefill=worker, decode=worker)
        return _with_work(pair, self._demand(request, prompt, now_s))

    def another_pair(
        self,
        request: RequestState,
        prompt: Prompt,
        decode: WorkerView,
        avoid: Set[WorkerIdentity],
        now_s: float,
    ) -> Pair | None:
        """`decode` with another worker that can prefill `prompt` for it, if there is one: it is to do so, and is
        expected to hold the prompt's blocks soon.
        """
        tokens, samples = prompt.num_tokens + 1, len(prompt.samples)
        connected = self._prefillers_for(decode, avoid, now_s)
        usable = [worker for worker in connected if worker.holds(tokens, samples)]
        if not usable:
            return None
        demand = self._demand(request, prompt, now_s)
        chosen = self._policy.prefiller(usable, decode, demand, self._rng)
        self._remember(request, chosen, demand)
        return _with_work(chosen, demand)

    def has_another_pair(self, avoid: Set[WorkerIdentity], now_s: float) -> bool:
        """Whether any two workers can hand KV over; none are chosen."""
        usable = [w for w in self._view.usable(now_s) if w.identity not in avoid]
        prefillers = [worker for worker in usable if worker.can_prefill]
        receivers = [worker for worker in usable if worker.takes_kv]
        return any(
            may_hand_off(prefill, decode) and self._are_connected(prefill, decode)
            for decode in receivers
            for prefill in prefillers
        )

    def handed_nothing(self, request: RequestState, decode: WorkerView) -> None:
        """A hand-off to `decode` failed: the request's blocks are not on their way there any more."""
        if self._policy.uses_prefix:
            chain = self._chain(request, decode.layout_group, decode.hello.layout)
            self._index.expect_no_more(chain, decode.slot)

    def has_workers(self, now_s: float) -> bool:
        """Whether any worker may be given new work."""
        return bool(self._view.usable(now_s))

    def has_room(self, request: RequestState, prompt: Prompt, now_s: float) -> bool:
        """Whether workers can take `prompt`, one of the request's, without being overfilled."""
        if self._capacity is None:
            return True
        samples = len(prompt.samples)
        return self._capacity.can_take(
            samples=samples,
            context_tokens=samples * prompt.num_tokens,
            slo=request.slo,
            now_s=now_s,
        )

    def pooled_tokens(
        self, request: RequestState, prompt: Prompt, worker: WorkerView, now_s: float
    ) -> int:
        """Leading tokens of `prompt`, one of the request's,
        that `worker` can fetch from the pool as far as is known here.
        """
        return self._demand(request, prompt, now_s).pooled_for(worker)

    def ended(self, request: RequestState, timing: Timing) -> None:
        """A request is complete: how long outputs are is learned from it."""
        drawn = timing.output_tokens / len(request.prompt.samples)
        self._typical_output += _OUTPUT_GAIN * (drawn - self._typical_output)
        measured = Measured(
            queue_s=timing.queue_s,
            prefill_s=timing.prefill_s,
            unhidden_s=timing.unhidden_s,
            first_token_s=timing.first_token_s,
            cached_tokens=timing.cached_tokens,
            output_tokens=timing.output_tokens,
            pooled_tokens=timing.pooled_tokens,
        )
        self.log.ended(request.request_id, measured)

    def permit(self, prompt: Prompt, pair: Pair, xfer_id: XferId, attempt: int) -> Permit:
        """This router's permit for `pair` to hand the KV of `prompt` over."""
        layout = pair.decode.hello.layout
        permit = Permit(
            xfer_id=xfer_id,
            attempt=attempt,
            cache_scope=prompt.cache_scope,
            layout_digest=_digest(layout),
            source=pair.prefill.identity,
            target=pair.decode.identity,
            num_blocks=layout.num_blocks_for(prompt.num_tokens),
        )
        return self._office.issue(permit)

    def _connected_pair(
        self, workers: Collection[WorkerView], demand: Demand
    ) -> Pair | Unavailable:
        """The policy's choice of the pairs that can hand KV over. Where the chosen two cannot, another prefill worker
        hands over to the same decode worker; where none can, that one is left out; and where it is the last that takes
        KV and has room, it computes the prompt. Each costs another choice.
        """
        chosen = self._policy.pair(workers, demand, self._rng)
        while isinstance(chosen, Pair) and not chosen.local:
            decode = chosen.decode
            if self._are_connected(chosen.prefill, decode):
                break
            able = [
                worker
                for worker in workers
                if worker.can_prefill
                and may_hand_off(worker, decode)
                and self._are_connected(worker, decode)
            ]
            if able:
                workers = [*able, decode]
            elif any(
                worker.takes_kv and worker is not decode and worker.identity not in demand.full
                for worker in workers
            ):
                workers = [worker for worker in workers if worker is not decode]
            else:
                workers = [w for w in workers if w is decode or not w.can_prefill]
            chosen = self._policy.pair(workers, demand, self._rng)
        return chosen

    def _by_size(
        self, workers: Sequence[WorkerView], prompt: Prompt
    ) -> tuple[Sequence[WorkerView], Set[WorkerIdentity]]:
        """Those of `workers` that can hold `prompt`, and which of these cannot hold its output beside it: some may have
        less memory than those whose length is served. Where all that decode by their role are among the latter, those
        that can hold both run it as a whole, and no others are left.
        """
        tokens, samples = _whole_text(prompt)
        if self._view.all_hold(tokens, samples):
            return workers, frozenset()
        able = tuple(w for w in workers if w.holds(prompt.num_tokens + 1, samples))
        small = frozenset(w.identity for w in able if not w.holds(tokens, samples))
        if all(worker.identity in small for worker in decoders_of(able)):
            return tuple(worker for worker in able if worker.identity not in small), frozenset()
        return able, small

    def _prefillers_for(
        self, decode: WorkerView, avoid: Set[WorkerIdentity], now_s: float
    ) -> list[WorkerView]:
        return [
            worker
            for worker in self._view.usable(now_s)
            if worker.identity not in avoid
            and worker.can_prefill
            and self._are_connected(worker, decode)
        ]

    def _are_connected(self, prefill: WorkerView, decode: WorkerView) -> bool:
        """Whether the two are a pair whose layouts are the same, and whose link carries pages as far as is known."""
        return (
            prefill is not decode
            and prefill.layout_group == decode.layout_group
            and self._view.broken_pairs.allows(prefill.identity, decode.identity)
        )

    def _full(
        self, request: RequestState, prompt: Prompt, workers: Sequence[WorkerView]
    ) -> Set[WorkerIdentity]:
        """Workers that should decode nothing more. If that is all of them it is none: a request that was admitted, and
        lost its worker, continues on any.
        """
        decoders = decoders_of(workers)
        full = frozenset(w.identity for w in decoders if not self._has_capacity(w, request, prompt))
        return full if len(full) < len(decoders) else frozenset()

    def _kept_on_prefill(
        self, request: RequestState, prompt: Prompt, workers: Sequence[WorkerView]
    ) -> Pair | None:
        """Both legs on a prefill worker without a prompt, as far as that is allowed: every decode worker is full."""
        if self._capacity is None:
            return None
        samples = len(prompt.samples)
        worker = self._capacity.idle_prefill_worker(
            workers,
            samples=samples,
            context_tokens=samples * prompt.num_tokens,
            slo=request.slo,
        )
        if worker is None:
            return None
        return Pair(prefill=worker, decode=worker, kind=RouteKind.ON_PREFILL)

    def _has_capacity(self, worker: WorkerView, request: RequestState, prompt: Prompt) -> bool:
        if self._capacity is None:
            return True
        samples = len(prompt.samples)
        context = samples * prompt.num_tokens
        return self._capacity.can_decode(
            worker, samples=samples, context_tokens=context, slo=request.slo
        )

    def _demand(self, request: RequestState, prompt: Prompt, now_s: float) -> Demand:
        policy = self._policy
        left = max(1, prompt.sampling.max_tokens - len(prompt.output_tokens))
        return Demand(
            tokens=prompt.num_tokens,
            samples=len(prompt.samples),
            held=self._held_tokens(request, now_s) if policy.uses_prefix else {},
            output_tokens=max(1, min(left, round(self._typical_output))),
            session=self._session(request) if policy.uses_session else 0,
            now_s=now_s,
        )

    def _session(self, request: RequestState) -> int:
        """A number for the request's session: the one that its client names,
        or that of its first tokens in its scope.
        """
        if request.session:
            named = request.session.encode()
        else:
            first = array("I", request.prompt.prompt_tokens[:_SESSION_TOKENS])
            prompt = request.prompt
            named = f"{prompt.cache_scope}/{prompt.adapter}/".encode() + first.tobytes()
        return int.from_bytes(blake2b(named, digest_size=7).digest())

    def _held_tokens(self, request: RequestState, now_s: float) -> Mapping[int, int]:
        held: HeldBySlot | None = None
        for group, layout in self._view.layouts().items():
            chain = self._chain(request, group, layout)
            held = self._index.held_blocks(chain, now_s, unit=layout.block_tokens, among=held)
        return {} if held is None else held

    def _remember(self, request: RequestState, pair: Pair, demand: Demand) -> None:
        self.log.decided(request.request_id, pair, demand)
        self._decisions += 1
        pair.prefill.last_pick = pair.decode.last_pick = self._decisions
        if self._policy.uses_prefix:
            worker = pair.prefill
            chain = self._chain(request, worker.layout_group, worker.hello.layout)
            slots = (worker.slot,) if pair.local else (worker.slot, pair.decode.slot)
            self._index.expect(chain, slots, demand.now_s)

    def _chain(self, request: RequestState, group: int, layout: KvLayout) -> Fingerprints:
        if group not in request.chains:
            request.chains[group] = chain_of(self._secret, request.prompt, layout)
        return request.chains[group]


@lru_cache(maxsize=64)
def _digest(layout: KvLayout) -> str:
    return layout.content_digest()


def _with_work(pair: Pair, demand: Demand) -> Pair:
    """A pair whose policy predicts nothing, with what its prompt should take: how much more its worker is sent, and what
    the planner of roles takes its backlog for, goes by that.
    """
    if pair.predicted is not None or not pair.prefill.forecast.knows_prefill:
        return pair
    return replace(pair, measured_s=prefill_work(pair.prefill, demand).busy_s)


def _whole_text(prompt: Prompt) -> tuple[int, int]:
    """Tokens that each sample may come to, prompt and all, and how many samples there are."""
    return len(prompt.prompt_tokens) + prompt.sampling.max_tokens, len(prompt.samples)
