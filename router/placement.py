"""Places an attempt on workers: hashes the prompt, asks the index, lets the policy choose, remembers the choice."""

from array import array
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from hashlib import blake2b
from random import Random

from msgspec.structs import replace

from baton.blocks import joined
from baton.generation import Prompt
from baton.hashing import chain_keys, root_key
from baton.ids import WorkerIdentity, XferId
from baton.layout import KvLayout
from kv_transfer.ticket import Permit, TicketOffice
from router.admission.room import WorkerRoom
from router.job import Job
from router.ports import Timing
from router.routing.explanation import DecisionLog, Measured
from router.routing.index import PrefixIndex
from router.routing.policy import Demand, Pair, Policy, Unavailable
from router.routing.table import Fingerprints, HeldBySlot, fingerprints_of
from router.routing.view import ClusterView, WorkerView

_SESSION_TOKENS = 64
"""Prompts whose first tokens are these are taken for one session where the client names none."""

_FIRST_GUESS = 128.0
"""Tokens of an output, until some have been seen."""

_GAIN = 0.02


class Placement:
    """The routing side of the dispatcher.

    Args:
        view: The workers.
        index: Who holds which blocks.
        policy: How workers are priced.
        secret: The cluster secret that keys block hashes and signs permits.
        rng: Breaks ties.
        log: Remembers why; one of its own if None.
        room: Who can take more; everybody unless given.
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
        room: WorkerRoom | None = None,
    ) -> None:
        self._view = view
        self._index = index
        self._policy = policy
        self._secret = secret
        self._office = TicketOffice(secret)
        self._rng = rng
        self._room = room
        self._decisions = 0
        self._typical_output = _FIRST_GUESS
        self.log = log or DecisionLog("")

    def choose(
        self, job: Job, prompt: Prompt, avoid: Set[WorkerIdentity], now_s: float
    ) -> Pair | Unavailable:
        """The pair for `prompt`, one of the job's; the choice is expected to hold its blocks soon."""
        usable = self._view.usable(now_s)
        if avoid:
            usable = tuple(worker for worker in usable if worker.identity not in avoid)
        if not usable:
            self.log.refused()
            return Unavailable(reason="no worker is available")
        demand = self._demand(job, prompt, now_s)
        chosen = self._policy.pair(usable, demand, self._rng)
        if isinstance(chosen, Pair) and not self._has_room(chosen.decode, job, prompt):
            # The best of all, if it has room, is the best of those that have: nearly always nobody else need be asked.
            full = self._full(job, prompt, usable)
            chosen = self._policy.pair(usable, replace(demand, full=full), self._rng)
        if isinstance(chosen, Pair):
            self._remember(job, chosen, demand)
        else:
            self.log.refused()
        return chosen

    def alone(self, identity: WorkerIdentity, now_s: float) -> Pair | None:
        """That worker for both legs, while it can be used."""
        worker = self._view.find(identity.worker_id)
        if worker is None or worker.identity != identity:
            return None
        return Pair(prefill=worker, decode=worker) if worker in self._view.usable(now_s) else None

    def another_pair(
        self, job: Job, prompt: Prompt, decode: WorkerView, avoid: Set[WorkerIdentity], now_s: float
    ) -> Pair | None:
        """`decode` with somebody else who could prefill `prompt` for it, if there is anybody."""
        usable = [
            worker
            for worker in self._view.usable(now_s)
            if worker.identity not in avoid
            and worker is not decode
            and worker.layout_group == decode.layout_group
            and worker.can_prefill
        ]
        if not usable:
            return None
        demand = self._demand(job, prompt, now_s)
        chosen = self._policy.prefiller(usable, decode, demand, self._rng)
        self._remember(job, chosen, demand)
        return chosen

    def pooled_tokens(self, job: Job, prompt: Prompt, worker: WorkerView, now_s: float) -> int:
        """Leading tokens of `prompt`, one of the job's, that `worker` can fetch from the pool as far as is known here."""
        return self._demand(job, prompt, now_s).pooled_for(worker)

    def ended(self, job: Job, timing: Timing) -> None:
        """A job is complete: how long outputs are is learned from it."""
        drawn = timing.output_tokens / len(job.prompt.samples)
        self._typical_output += _GAIN * (drawn - self._typical_output)
        measured = Measured(
            queue_s=timing.queue_s,
            prefill_s=timing.prefill_s,
            unhidden_s=timing.unhidden_s,
            first_token_s=timing.first_token_s,
            cached_tokens=timing.cached_tokens,
            output_tokens=timing.output_tokens,
            pooled_tokens=timing.pooled_tokens,
        )
        self.log.ended(job.request_id, measured)

    def permit(self, prompt: Prompt, pair: Pair, xfer_id: XferId, attempt: int) -> Permit:
        """The word of this router that `pair` may hand the KV of `prompt` over."""
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

    def _full(self, job: Job, prompt: Prompt, workers: Sequence[WorkerView]) -> Set[WorkerIdentity]:
        """Who should decode nothing more. If that is everybody it is nobody: a job that was let in, and lost its worker,
        goes on wherever there is one.
        """
        decoders = [worker for worker in workers if worker.can_decode]
        full = frozenset(w.identity for w in decoders if not self._has_room(w, job, prompt))
        return full if len(full) < len(decoders) else frozenset()

    def _has_room(self, worker: WorkerView, job: Job, prompt: Prompt) -> bool:
        if self._room is None:
            return True
        samples = len(prompt.samples)
        context = samples * prompt.num_tokens
        return self._room.takes(worker, samples=samples, context_tokens=context, slo=job.slo)

    def _demand(self, job: Job, prompt: Prompt, now_s: float) -> Demand:
        policy = self._policy
        left = max(1, prompt.sampling.max_tokens - len(prompt.output_tokens))
        return Demand(
            tokens=prompt.num_tokens,
            samples=len(prompt.samples),
            held=self._held_tokens(job, now_s) if policy.uses_prefix else {},
            output_tokens=max(1, min(left, round(self._typical_output))),
            session=self._session(job) if policy.uses_session else 0,
            now_s=now_s,
        )

    def _session(self, job: Job) -> int:
        """A number for the job's session: the one that its client names, or that of its first tokens in its scope."""
        if job.session:
            named = job.session.encode()
        else:
            first = array("I", job.prompt.prompt_tokens[:_SESSION_TOKENS])
            named = job.prompt.cache_scope.encode() + b"/" + first.tobytes()
        return int.from_bytes(blake2b(named, digest_size=7).digest())

    def _held_tokens(self, job: Job, now_s: float) -> Mapping[int, int]:
        held: HeldBySlot | None = None
        for group, layout in self._view.layouts().items():
            chain = self._chain(job, group, layout)
            held = self._index.held_blocks(chain, now_s, unit=layout.block_tokens, among=held)
        return {} if held is None else held

    def _remember(self, job: Job, pair: Pair, demand: Demand) -> None:
        self.log.decided(job.request_id, pair, demand)
        self._decisions += 1
        pair.prefill.last_pick = pair.decode.last_pick = self._decisions
        if self._policy.uses_prefix:
            worker = pair.prefill
            chain = self._chain(job, worker.layout_group, worker.hello.layout)
            slots = (worker.slot,) if pair.local else (worker.slot, pair.decode.slot)
            self._index.expect(chain, slots, demand.now_s)

    def _chain(self, job: Job, group: int, layout: KvLayout) -> Fingerprints:
        if group not in job.chains:
            root = root_key(self._secret, scope=job.prompt.cache_scope, layout=layout)
            tokens = job.prompt.prompt_tokens
            keys = chain_keys(self._secret, root, tokens, layout.block_tokens)
            job.chains[group] = fingerprints_of(joined(keys))
        return job.chains[group]


@lru_cache(maxsize=64)
def _digest(layout: KvLayout) -> str:
    return layout.content_digest()
