"""What a policy is: given the workers that may be used and what a request asks, it says which worker runs which leg.

Policies are small pure classes, chosen by name or loaded from outside (`router.routing.policies`). They see workers
through `WorkerView`s and prompts through a `Demand`, and answer with a `Pair`.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Protocol

import msgspec

from baton.ids import WorkerIdentity
from router.routing.view import WorkerView


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks of its workers. Every decision makes one: no dataclass, which takes several times as long to
    make. So with `Pair`.

    Attributes:
        tokens: Tokens whose KV must exist before the next one is drawn.
        samples: Sequences to decode.
        held: Leading tokens whose KV a worker holds already, or a node of the pool, by its slot.
        output_tokens: Tokens that each sample will draw, as far as that can be guessed.
        full: Workers that should decode nothing more.
        session: Equal for requests of one session; 0 unless the policy asks for it.
        now_s: When it is asked.
    """

    tokens: int
    samples: int
    held: Mapping[int, int]
    output_tokens: int = 128
    full: Set[WorkerIdentity] = frozenset()
    session: int = 0
    now_s: float = 0.0

    def decoders(self, workers: Collection[WorkerView]) -> Sequence[WorkerView]:
        """Those of `workers` that may decode it."""
        found = decoders_of(workers)
        return [w for w in found if w.identity not in self.full] if self.full else found

    def held_by(self, worker: WorkerView) -> int:
        """Tokens that `worker` need not compute nor be sent; the last one is always computed."""
        return min(self.held.get(worker.slot, 0), self.tokens - 1)

    def pooled_for(self, worker: WorkerView) -> int:
        """Tokens that `worker` has itself or could fetch from the node of its host; the last one is always computed."""
        return min(self.held.get(worker.pool_slot, 0), self.tokens - 1)

    def uncached(self, worker: WorkerView) -> int:
        """Tokens that `worker` would have to compute, or be sent."""
        return self.tokens - self.held_by(worker)


def decoders_of(workers: Collection[WorkerView]) -> Sequence[WorkerView]:
    """Those of `workers` that decode by their role. Where none is left all of them:
    a prefill worker can run a whole request, too.
    """
    return [worker for worker in workers if worker.can_decode] or tuple(workers)


class RouteKind(Enum):
    """How a request's legs lie; the values are those of `baton_route_decisions_total`."""

    PAIR = "pair"
    HYBRID = "hybrid"
    ON_DECODE = "on_decode"
    NO_PREFILLER = "no_prefiller"
    NO_DECODER = "no_decoder"
    ON_PREFILL = "on_prefill"
    TAKE_OVER = "take_over"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What a policy expected of its choice, in seconds.

    Attributes:
        queue_s: Waiting on P before the first chunk.
        fetch_s: Fetching from the pool, where that and computing the rest is quicker than computing all.
        prefill_s: Computing the rest of the prompt.
        unhidden_s: The part of the hand-off that computing does not hide.
        room_s: Waiting on D for pages or for a place in its batch.
        tbt_s: D's step once the request has joined.
        harm_s: How long others on the computing worker are held up, added up over them: fetching stops its steps too.
    """

    queue_s: float
    fetch_s: float
    prefill_s: float
    unhidden_s: float
    room_s: float
    tbt_s: float
    harm_s: float

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.queue_s + self.fetch_s + self.prefill_s + self.unhidden_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """One option that a policy weighed; workers by name, the cost in the policy's own unit."""

    prefill: str
    decode: str
    cost: float


class Rationale(Protocol):
    """Why a policy chose as it did: kept as it fell out of the choice, and put into words only when it is asked for."""

    def predicted(self, *, alone: bool) -> Predicted | None:
        """What it expected of the best pair, or of the best worker that would do both; None if it predicts nothing."""

    def considered(self) -> list[Considered]:
        """The best options, best first."""

    def why(self) -> str:
        """One sentence."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that prefill and decode; one and the same when no KV is handed off.

    Attributes:
        prefill: Computes the prompt.
        decode: Draws the tokens.
        kind: How the legs lie.
        rationale: Why these two.
        measured_s: Seconds of work for P by what was measured of it, where the policy predicts nothing.
    """

    prefill: WorkerView
    decode: WorkerView
    kind: RouteKind = RouteKind.PAIR
    rationale: Rationale | None = None
    measured_s: float = 0.0

    @property
    def local(self) -> bool:
        """Whether one worker does both."""
        return self.prefill is self.decode

    @property
    def predicted(self) -> Predicted | None:
        """What the policy expects, if it predicts anything."""
        return None if self.rationale is None else self.rationale.predicted(alone=self.local)

    @property
    def compute_s(self) -> float:
        """Expected seconds of work for P, fetching included; 0 before any have been measured."""
        predicted = self.predicted
        return self.measured_s if predicted is None else predicted.fetch_s + predicted.prefill_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """No worker can take the request now, and why."""

    reason: str


NO_DECODER = Unavailable(reason="no decode worker is available")

Rank = tuple[float, int, float]
"""Cost, then fewer legs, then at random."""


class Policy(Protocol):
    """Chooses workers. May keep what it needs for spreading load, nothing about single requests."""

    uses_prefix: bool
    """Whether `Demand.held` matters; without it the prompt need not be hashed."""

    uses_session: bool
    """Whether `Demand.session` matters."""

    def pair(
        self, workers: Collection[WorkerView], demand: Demand, rng: Random
    ) -> Pair | Unavailable:
        """The workers that run `demand`, among `workers`, which may all be used."""

    def prefiller(
        self, workers: Collection[WorkerView], decode: WorkerView, demand: Demand, rng: Random
    ) -> Pair:
        """Which of `workers`, at least one, prefills for `decode`, which is settled already."""
