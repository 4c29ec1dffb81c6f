"""Places an attempt on workers: hashes the prompt, asks the index, lets the policy choose, remembers the choice."""

from collections.abc import Sequence, Set
from functools import lru_cache
from random import Random

from baton.generation import Prompt
from baton.hashing import chain_keys, root_key
from baton.ids import BlockKey, WorkerIdentity, XferId
from baton.layout import KvLayout
from kv_transfer.ticket import Permit, TicketOffice
from router.admission.room import WorkerRoom
from router.job import Job
from router.routing.index import PrefixIndex
from router.routing.policy import Demand, Pair, Policy, Unavailable, choose, choose_prefiller
from router.routing.view import ClusterView, WorkerView


class Placement:
    """The routing side of the dispatcher.

    Args:
        view: The workers.
        index: Who holds which blocks.
        policy: How workers are priced.
        secret: The cluster secret that keys block hashes and signs permits.
        rng: Breaks ties.
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

    def choose(
        self, job: Job, prompt: Prompt, avoid: Set[WorkerIdentity], now_s: float
    ) -> Pair | Unavailable:
        """The pair for `prompt`, one of the job's; the choice is expected to hold its blocks soon."""
        usable = [w for w in self._view.usable(now_s) if w.identity not in avoid]
        if not usable:
            return Unavailable(reason="no worker is available")
        full = self._full(job, prompt, usable)
        chosen = choose(
            self._policy, usable, self._demand(job, prompt, now_s), self._rng, full=full
        )
        if isinstance(chosen, Pair):
            self._remember(job, chosen, now_s)
        return chosen

    def another_prefiller(
        self, job: Job, prompt: Prompt, decode: WorkerView, avoid: Set[WorkerIdentity], now_s: float
    ) -> WorkerView | None:
        """Who else could prefill `prompt` for `decode`, if anybody."""
        usable = [
            worker
            for worker in self._view.usable(now_s)
            if worker.identity not in avoid
            and worker is not decode
            and worker.layout_group == decode.layout_group
            and worker.hello.role.prefills_for_others
        ]
        if not usable:
            return None
        worker = choose_prefiller(self._policy, usable, self._demand(job, prompt, now_s), self._rng)
        self._remember(job, Pair(prefill=worker, decode=decode), now_s)
        return worker

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
        if self._room is None:
            return frozenset()
        decoders = [worker for worker in workers if worker.hello.role.decodes]
        samples = len(prompt.samples)
        context = samples * prompt.num_tokens
        full = frozenset(
            worker.identity
            for worker in decoders
            if not self._room.takes(worker, samples=samples, context_tokens=context, slo=job.slo)
        )
        return full if len(full) < len(decoders) else frozenset()

    def _demand(self, job: Job, prompt: Prompt, now_s: float) -> Demand:
        return Demand(
            tokens=prompt.num_tokens,
            samples=len(prompt.samples),
            held=self._held_tokens(job, now_s) if self._policy.uses_prefix else {},
        )

    def _held_tokens(self, job: Job, now_s: float) -> dict[int, int]:
        held: dict[int, int] = {}
        for group, layout in self._view.layouts().items():
            blocks = self._index.held_blocks(self._keys(job, group, layout), now_s)
            held.update({slot: depth * layout.block_tokens for slot, depth in blocks.items()})
        return held

    def _remember(self, job: Job, pair: Pair, now_s: float) -> None:
        self._decisions += 1
        pair.prefill.last_pick = pair.decode.last_pick = self._decisions
        if self._policy.uses_prefix:
            worker = pair.prefill
            keys = self._keys(job, worker.layout_group, worker.hello.layout)
            self._index.expect(keys, (worker.slot, pair.decode.slot), now_s)

    def _keys(self, job: Job, group: int, layout: KvLayout) -> list[BlockKey]:
        if group not in job.keys:
            root = root_key(self._secret, scope=job.prompt.cache_scope, layout=layout)
            tokens = job.prompt.prompt_tokens
            job.keys[group] = chain_keys(self._secret, root, tokens, layout.block_tokens)
        return job.keys[group]


@lru_cache(maxsize=64)
def _digest(layout: KvLayout) -> str:
    return layout.content_digest()
