"""What the decode worker's core is told and what it asks its shell to do, besides the engine's and the hand-off's own."""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.generation import Prompt, TokenLogprobs, TokenSample
from baton.ids import LegId, RequestId
from baton.rpc.frames import StreamId
from baton_engine.messages import Command, SeqEvent
from kv_transfer.ledger.ledger import (
    FromPeer,
    PagesVerified,
    PeerFenced,
    SessionLost,
    SessionOpened,
)
from kv_transfer.ledger.transfer import EndSession, ToPeer, VerifyPages
from kv_transfer.ticket import Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectLeg:
    """A router announces a leg whose KV comes as its permit says."""

    stream: StreamId
    leg_id: LegId
    request_id: RequestId
    prompt: Prompt
    permit: Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class ReassignLeg:
    """A router gave the prefill of a leg to another worker."""

    stream: StreamId
    leg_id: LegId
    permit: Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateLeg:
    """A router wants a prompt prefilled and decoded here."""

    stream: StreamId
    leg_id: LegId
    request_id: RequestId
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """A router wants a leg no more."""

    stream: StreamId
    leg_id: LegId


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamGone:
    """A router's stream ended: nobody wants its legs any more."""

    stream: StreamId


DecodeEvent = (
    ExpectLeg
    | ReassignLeg
    | GenerateLeg
    | Cancel
    | StreamGone
    | SeqEvent
    | SessionOpened
    | FromPeer
    | PagesVerified
    | SessionLost
    | PeerFenced
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TellTokens:
    """To the router: tokens of one leg drawn in one step."""

    stream: StreamId
    leg_id: LegId
    tokens: tuple[TokenSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TellPrefilled:
    """To the router: a leg was prefilled here; goes with its first tokens."""

    stream: StreamId
    leg_id: LegId
    prompt_tokens: int
    cached_tokens: int
    queue_s: float
    prefill_s: float
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    pooled_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TellWriterLost:
    """To the router: the prefill worker of this attempt is gone; another one may take its place for a moment."""

    stream: StreamId
    leg_id: LegId
    attempt: int
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class TellFailed:
    """To the router: this leg is over."""

    stream: StreamId
    leg_id: LegId
    error: BatonError


Tell = TellTokens | TellPrefilled | TellWriterLost | TellFailed
DecodeAction = Command | VerifyPages | ToPeer | EndSession | Tell
