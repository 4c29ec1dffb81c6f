"""What happens to requests, and what the dispatcher has done about it: the language of the pure core.

Events come from clients (through `router.generator`) and from workers (through `router.links`); actions go back the
same ways.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from baton.blocks import BlockReport
from baton.errors import BatonError
from baton.generation import FinishReason, Prompt, TokenLogprobs, TokenSample, WorkerLoad
from baton.ids import LegId, RequestId, WorkerIdentity
from baton.rpc.hello import WorkerHello
from kv_transfer.ticket import Permit
from router.ports import GenerationJob, Timing


class Service(Enum):
    """Which of a worker's streams a leg runs on."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A client's job arrived."""

    job: GenerationJob


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSample:
    """The HTTP face wants no more tokens of this sample (a stop string)."""

    request_id: RequestId
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientGone:
    """Nobody reads this job any more."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Look at deadlines and waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """All streams to a worker are up."""

    hello: WorkerHello
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A stream to this incarnation broke: its legs are gone."""

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
class FirstTokensArrived:
    """P drew the first token of each sample; the times are P's."""

    worker: WorkerIdentity
    leg_id: LegId
    tokens: tuple[TokenSample, ...]
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
class LocallyPrefilled:
    """The worker that decodes prefilled too; the first tokens come right after."""

    worker: WorkerIdentity
    leg_id: LegId
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
class PutInPool:
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
class WriterLost:
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
    """Tokens of one step for many legs, of which there is no more to say: none has log-probabilities or ends its sample.

    Columns of equal length: token i belongs to sample `samples[i]` of leg `leg_ids[i]`. It says what a `DecodeTokens` per leg
    would say, at a fraction of the cost: nearly every token comes this way.
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
    FirstTokensArrived
    | LocallyPrefilled
    | HandedOff
    | PutInPool
    | WriterLost
    | DecodeTokens
    | SampleFinished
    | LegFailed
)
Event = (
    Submitted
    | StopSample
    | ClientGone
    | TimePassed
    | WorkerJoined
    | WorkerLost
    | LoadReported
    | BlocksReported
    | LegEvent
)
Heard = Event | StepTokens
"""What links hear. A step is no event of its own: it is a short way of saying many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPrefill:
    """Have P prefill for D."""

    worker: WorkerIdentity
    leg_id: LegId
    request_id: RequestId
    prompt: Prompt
    permit: Permit
    transfer_address: str
    trace_parent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendExpect:
    """Tell D that P will hand this prompt's KV over."""

    worker: WorkerIdentity
    leg_id: LegId
    request_id: RequestId
    prompt: Prompt
    permit: Permit
    trace_parent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReassign:
    """Tell D that another P takes the hand-off over."""

    worker: WorkerIdentity
    leg_id: LegId
    permit: Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGenerate:
    """Have one worker prefill and decode."""

    worker: WorkerIdentity
    leg_id: LegId
    request_id: RequestId
    prompt: Prompt
    trace_parent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCancel:
    """The router has forgotten this leg; the worker should."""

    worker: WorkerIdentity
    service: Service
    leg_id: LegId


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForSnapshot:
    """Have a worker tell anew which blocks it holds."""

    worker: WorkerIdentity
    service: Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Tokens for the client, in order; the first of them with the prompt's log-probabilities, where it wants those."""

    request_id: RequestId
    tokens: tuple[TokenSample, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The job is complete."""

    request_id: RequestId
    timing: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The job ended with an error."""

    request_id: RequestId
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSuspected:
    """A worker with legs of this router fell silent; they go on elsewhere. Nothing is to be done but to say so."""

    worker: WorkerIdentity
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseWorker:
    """The worker that joined at `address` cannot be used: hang up."""

    address: str
    error: BatonError


SendAction = SendPrefill | SendExpect | SendReassign | SendGenerate | SendCancel | AskForSnapshot
Action = SendAction | Emit | Finish | Fail | RefuseWorker | WorkerSuspected
