"""Events of the router's pure core (`router.dispatch.dispatcher`).
What it does about them stands in `router.dispatch.actions`.

Events come from clients (through `router.generator`: a `GenerationRequest` that was admitted is the first of them) and
from workers (through `router.workers.links`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.blocks import BlockReport
from baton.errors import BatonError
from baton.generation import FinishReason, TokenLogprobs, TokenSample, WorkerLoad
from baton.ids import LegId, RequestId, Role, WorkerIdentity
from baton.rpc.hello import WorkerHello
from router.ports import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSample:
    """The HTTP side needs no more tokens of this sample (a stop string)."""

    request_id: RequestId
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientGone:
    """The client of this request is gone."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Look at deadlines and waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """The stream to a worker is up."""

    hello: WorkerHello
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChanged:
    """A worker takes other kinds of legs from now on. Those that it has go on."""

    worker: WorkerIdentity
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The stream to this incarnation broke: its legs are gone."""

    worker: WorkerIdentity
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReported:
    """A worker's report on itself."""

    worker: WorkerIdentity
    load: WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksReported:
    """A worker's report on the full blocks that it holds."""

    worker: WorkerIdentity
    report: BlockReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbed:
    """A worker has tried its link to `target`, as it was told; `error` says why it carries nothing."""

    worker: WorkerIdentity
    target: WorkerIdentity
    error: BatonError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """The prompt of a prefill or generate leg is computed; the times are its worker's.

    Attributes:
        first_tokens: Of a prefill leg, one per sample, or none where the decode worker draws them; those of a generate
            leg come right after, as tokens of its own.
    """

    worker: WorkerIdentity
    leg_id: LegId
    first_tokens: tuple[TokenSample, ...] = ()
    cached_tokens: int
    queue_s: float
    prefill_s: float
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    pooled_tokens: int = 0

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were not computed: they were cached there, or in the pool."""
        return self.cached_tokens + self.pooled_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """D had no room for the prompt: P left it in the pool, and its leg is over."""

    worker: WorkerIdentity
    leg_id: LegId


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOff:
    """D verified the commit; P's leg is over."""

    worker: WorkerIdentity
    leg_id: LegId
    blocks_sent: int
    bytes_sent: int
    reserve_wait_s: float
    unhidden_s: float
    link_bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LegWriterLost:
    """D lost P in this attempt at the hand-off, and keeps the pages for a moment."""

    worker: WorkerIdentity
    leg_id: LegId
    attempt: int
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTokens:
    """Tokens of one leg from one step, with `finish` where a sample ends."""

    worker: WorkerIdentity
    leg_id: LegId
    tokens: tuple[TokenSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """Tokens of one step for many legs, of which there is no more to say:
    none has log-probabilities or ends its sample.

    Columns of equal length: token i belongs to sample `samples[i]` of leg `leg_ids[i]`. It says what a `DecodeTokens`
    per leg would say, at a fraction of the cost: nearly every token comes this way.
    """

    worker: WorkerIdentity
    leg_ids: Sequence[int]
    samples: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFinished:
    """A sample ended without a token of this step: it was aborted, or had ended with its first token."""

    worker: WorkerIdentity
    leg_id: LegId
    sample: int
    reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class LegFailed:
    """The worker gave up one leg and has forgotten it."""

    worker: WorkerIdentity
    leg_id: LegId
    error: BatonError


LegEvent = (
    Prefilled | HandedOff | Pooled | LegWriterLost | DecodeTokens | SampleFinished | LegFailed
)
Event = (
    GenerationRequest
    | StopSample
    | ClientGone
    | TimePassed
    | WorkerJoined
    | RoleChanged
    | WorkerLost
    | LoadReported
    | BlocksReported
    | LinkProbed
    | LegEvent
)
Heard = Event | StepTokens
"""What links hear. A step is no event of its own: it is a short way of saying many."""
