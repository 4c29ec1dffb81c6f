"""What the prefill worker's core is told and what it asks its shell to do, besides the engine's and the hand-off's own."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import BatonError
from baton.generation import Prompt, TokenLogprobs, TokenSample
from baton.ids import BlockId, LegId, RequestId, SeqId, WorkerIdentity
from baton.pages import Ready
from baton.rpc.frames import StreamId
from baton_engine.messages import Command, SeqEvent
from baton_engine.ports import PageExport
from kv_transfer.ledger.outbox import (
    FromDecode,
    HandOver,
    PeerDown,
    PeerUp,
    PushDone,
    Send,
    StartPush,
)
from kv_transfer.ticket import Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A router wants `prompt` prefilled for the worker that its permit names, which serves transfers at `address`."""

    stream: StreamId
    leg_id: LegId
    request_id: RequestId
    prompt: Prompt
    permit: Permit
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """A router wants a leg no more."""

    stream: StreamId
    leg_id: LegId


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamGone:
    """A router's stream ended: nobody wants its legs any more."""

    stream: StreamId


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReady:
    """The engine completed pages in one layer, or has them once its GPU comes to `done`."""

    layer_index: int
    exports: Sequence[PageExport]
    done: Ready | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPut:
    """The answer to `PutPrompt`; `complete` if the pool has every full block of the prompt."""

    seq_id: SeqId
    complete: bool


PrefillEvent = (
    Submit
    | Cancel
    | StreamGone
    | LayerReady
    | PromptPut
    | SeqEvent
    | PeerUp
    | PeerDown
    | FromDecode
    | PushDone
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutPrompt:
    """Put a computed prompt into the pool; `PromptPut` answers. `blocks` are all its pages, in order."""

    seq_id: SeqId
    prompt: Prompt
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Open a session with a decode worker; `PeerUp` or `PeerDown` answers."""

    peer: WorkerIdentity
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TellFirstTokens:
    """To the router: the first token of each sample, and where the time went."""

    stream: StreamId
    leg_id: LegId
    tokens: tuple[TokenSample, ...]
    prompt_tokens: int
    cached_tokens: int
    queue_s: float
    prefill_s: float
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    pooled_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TellHandedOff:
    """To the router: the decode worker has the pages."""

    stream: StreamId
    leg_id: LegId
    done: HandOver


@dataclass(frozen=True, slots=True, kw_only=True)
class TellPooled:
    """To the router: the decode worker has no room, and can fetch the prompt from the pool when it has."""

    stream: StreamId
    leg_id: LegId


@dataclass(frozen=True, slots=True, kw_only=True)
class TellFailed:
    """To the router: this leg is over."""

    stream: StreamId
    leg_id: LegId
    error: BatonError


Tell = TellFirstTokens | TellHandedOff | TellPooled | TellFailed
PrefillAction = Command | Connect | PutPrompt | Send | StartPush | Tell
