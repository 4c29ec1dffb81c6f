"""What a worker's core is told and what it asks its shell to do, besides the engine's and the hand-off's own messages.

Commands of routers come in as leg events: a leg that is to be run as the `WorkerLeg` itself, which is in no table yet.
`RouterMessage` is what goes back to them.
"""

from dataclasses import dataclass, field

from baton.errors import BatonError, InvariantError
from baton.generation import FinishReason, Prompt, TokenLogprobs, TokenSample
from baton.ids import BlockId, LegId, LegKind, Role, SeqId, WorkerIdentity
from baton_engine.messages import Command, SampledTokens, SeqEvent
from baton_engine.ports import LayerReady
from baton_worker.legs import StreamId, WorkerLeg
from kv_transfer.ledger.ledger import (
    FromPeer,
    PagesVerified,
    PeerFenced,
    SessionLost,
    SessionOpened,
)
from kv_transfer.ledger.outbox import (
    FromDecode,
    HandOffDone,
    PeerDown,
    PeerUp,
    PushDone,
    Send,
    StartPush,
)
from kv_transfer.ledger.transfer import EndSession, ToPeer, VerifyPages
from kv_transfer.ticket import Permit

KINDS_OF_ROLE: dict[Role, frozenset[LegKind]] = {
    Role.PREFILL: frozenset({LegKind.PREFILL}),
    Role.DECODE: frozenset({LegKind.RECEIVE, LegKind.GENERATE}),
    Role.HYBRID: frozenset(LegKind),
}
"""Kinds of legs that make a role: routers ask for them, and a change of role waits for those that the new one lacks."""

STANDS_IN = frozenset({LegKind.GENERATE})
"""Kinds that a worker takes in any role:
a router asks a prefill worker for whole generations while no worker decodes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegReassigned:
    """A router gave the prefill of a receive leg to another worker."""

    stream: StreamId
    leg_id: LegId
    permit: Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class LegCancelled:
    """A router cancels a leg."""

    stream: StreamId
    leg_id: LegId


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamGone:
    """A router's stream ended: its legs are no longer wanted."""

    stream: StreamId


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPut:
    """The answer to `PutPrompt`; `complete` if the pool has every full block of the prompt."""

    seq_id: SeqId
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbe:
    """A router wants to know whether pages can be written to `peer`; `LinkProbedMessage` answers."""

    stream: StreamId
    peer: WorkerIdentity
    address: str


LegEvent = WorkerLeg | LegCancelled | StreamGone
SendingEvent = LayerReady | PromptPut | PeerUp | PeerDown | FromDecode | PushDone | LinkProbe
ReceivingEvent = LegReassigned | SessionOpened | FromPeer | PagesVerified | SessionLost | PeerFenced
WorkerEvent = LegEvent | SeqEvent | SampledTokens | SendingEvent | ReceivingEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class PutPrompt:
    """Put a computed prompt into the pool; `PromptPut` answers. `blocks` are all its pages, in order."""

    seq_id: SeqId
    prompt: Prompt
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Open a session with a receiving worker; `PeerUp` or `PeerDown` answers."""

    peer: WorkerIdentity
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensMessage:
    """Tokens drawn in one step for legs of one router, as columns of equal length: entry i of each describes one token.

    Attributes:
        finish_reasons: Of tokens that end their sample, by place in the columns.
        logprobs: Of tokens whose request asks for them, by place in the columns.
    """

    stream: StreamId
    leg_ids: list[LegId] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefilledMessage:
    """A leg's prompt was computed here, and where the time went.

    Attributes:
        first_tokens: Of a prefill leg, none where the receiving worker draws them;
            those of a generate leg follow as `TokensMessage`.
    """

    stream: StreamId
    leg_id: LegId
    first_tokens: tuple[TokenSample, ...]
    prompt_tokens: int
    cached_tokens: int
    pooled_tokens: int
    queue_s: float
    prefill_s: float
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOffMessage:
    """The receiving worker has the pages; the prefill leg is over."""

    stream: StreamId
    leg_id: LegId
    done: HandOffDone


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledMessage:
    """The receiving worker has no room and can fetch the prompt from the pool when it has; the prefill leg is over."""

    stream: StreamId
    leg_id: LegId


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLostMessage:
    """The sender of this attempt is gone; another one may take its place for a moment."""

    stream: StreamId
    leg_id: LegId
    attempt: int
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMessage:
    """This leg is over."""

    stream: StreamId
    leg_id: LegId
    kind: LegKind
    error: BatonError

    @classmethod
    def of(cls, leg: WorkerLeg, error: BatonError) -> "FailedMessage":
        """That of a leg that ends with a fault, or is not taken up."""
        return cls(stream=leg.stream, leg_id=leg.leg_id, kind=leg.kind, error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbedMessage:
    """Pages can be written to `peer`, or `error` says why not."""

    stream: StreamId
    peer: WorkerIdentity
    error: BatonError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LegBroken:
    """A sampled token met a leg that cannot have drawn one: our own bug.
    The other tokens of its step are not touched.
    """

    error: InvariantError


LegMessage = PrefilledMessage | HandedOffMessage | PooledMessage | WriterLostMessage | FailedMessage
RouterMessage = TokensMessage | LegMessage | LinkProbedMessage
SendingAction = Connect | PutPrompt | Send | StartPush
ReceivingAction = VerifyPages | ToPeer | EndSession
WorkerAction = Command | RouterMessage | LegBroken | SendingAction | ReceivingAction
