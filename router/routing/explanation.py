"""Why a request was sent where it was: what routing remembers of its last decisions, and how it is put into words.

A decision leaves a few numbers behind; they are formatted only when they are asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from baton.ids import RequestId
from router.routing.policy import Considered, Demand, Pair, Predicted, RouteKind

_KEPT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How it went, once the request has ended; the parts are those of `router.ports.Timing`."""

    queue_s: float
    prefill_s: float
    unhidden_s: float
    first_token_s: float
    cached_tokens: int
    output_tokens: int
    pooled_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The last decision about one request.

    Attributes:
        request_id: The reply's `id`.
        policy: Its name.
        kind: How the legs lie, a value of `RouteKind`.
        prefill_worker: The worker that computes the prompt.
        decode_worker: The worker that draws the tokens.
        tokens: Tokens whose KV had to exist.
        held_by_prefill: Those that the prefill worker was believed to hold.
        held_by_decode: Those that the decode worker was believed to hold.
        pool_node: From where the prefill worker can fetch; empty where it cannot.
        held_by_pool: Those that this node was believed to hold.
        output_tokens: Tokens that each sample was expected to draw.
        decisions: How often workers were chosen for it: more than 1 after a fault, or with several samples resumed.
        why: The policy's rule, in a sentence.
        considered: The best options by the policy's own cost, best first.
        predicted: What the policy expected; None if it predicts nothing.
        measured: How it went; None while it runs.
    """

    request_id: str
    policy: str
    kind: str
    prefill_worker: str
    decode_worker: str
    tokens: int
    held_by_prefill: int
    held_by_decode: int
    output_tokens: int
    decisions: int
    why: str
    considered: tuple[Considered, ...]
    predicted: Predicted | None
    measured: Measured | None
    pool_node: str = ""
    held_by_pool: int = 0


class _Decision(msgspec.Struct, eq=False):
    """What is kept of one: the numbers it was made from, and of those that change by themselves what they were then."""

    pair: Pair
    demand: Demand
    pool_node: str
    held_by_pool: int
    count: int
    measured: Measured | None = None


class DecisionLog:
    """The decisions about the last requests, and how many there were of each kind.

    Args:
        policy: The name of the policy that decides.
        kept: Requests remembered.
    """

    def __init__(self, policy: str, *, kept: int = _KEPT) -> None:
        self._policy = policy
        self._kept = kept
        self._decisions: dict[RequestId, _Decision] = {}
        self._counts = dict.fromkeys(RouteKind, 0)

    @property
    def counts(self) -> Mapping[RouteKind, int]:
        """Decisions since the start, by kind."""
        return self._counts

    def decided(self, request_id: RequestId, pair: Pair, demand: Demand) -> None:
        """`pair` was chosen."""
        self._counts[pair.kind] += 1
        earlier = self._decisions.pop(request_id, None)
        pool_node = pair.prefill.load.pool_node
        self._decisions[request_id] = _Decision(
            pair,
            demand,
            pool_node,
            demand.pooled_for(pair.prefill) if pool_node else 0,
            1 if earlier is None else earlier.count + 1,
        )
        while len(self._decisions) > self._kept:
            del self._decisions[next(iter(self._decisions))]

    def refused(self) -> None:
        """There was no worker to choose."""
        self._counts[RouteKind.UNAVAILABLE] += 1

    def ended(self, request_id: RequestId, measured: Measured) -> None:
        """The request has ended."""
        decision = self._decisions.get(request_id)
        if decision is not None:
            decision.measured = measured

    def explain(self, request_id: RequestId) -> Explanation | None:
        """The last decision about a request; None if it is unknown, or too long ago."""
        decision = self._decisions.get(request_id)
        if decision is None:
            return None
        pair, rationale, demand = decision.pair, decision.pair.rationale, decision.demand
        return Explanation(
            request_id=request_id,
            policy=self._policy,
            kind=pair.kind.value,
            prefill_worker=pair.prefill.identity.worker_id,
            decode_worker=pair.decode.identity.worker_id,
            tokens=demand.tokens,
            held_by_prefill=demand.held_by(pair.prefill),
            held_by_decode=demand.held_by(pair.decode),
            pool_node=decision.pool_node,
            held_by_pool=decision.held_by_pool,
            output_tokens=demand.output_tokens,
            decisions=decision.count,
            why="the policy gave no rationale" if rationale is None else rationale.why(),
            considered=() if rationale is None else tuple(rationale.considered()),
            predicted=pair.predicted,
            measured=decision.measured,
        )
