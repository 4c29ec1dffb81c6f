"""What the dispatcher wants done about an event: commands to workers, and what clients are told.

The shells carry actions out in order: those to workers through `router.workers.links`,
those to clients through `router.generator`.
"""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.generation import Prompt, TokenLogprobs, TokenSample
from baton.ids import LegId, LegKind, RequestId, WorkerIdentity
from kv_transfer.ticket import Permit
from router.ports import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLeg:
    """A worker is to run a leg. The router's `Leg` holds it for as long as the leg is open.

    Attributes:
        permit: For the hand-off; None for a leg of kind generate.
        transfer_address: Of the worker that receives the pages of a prefill leg.
    """

    worker: WorkerIdentity
    leg_id: LegId
    kind: LegKind
    request_id: RequestId
    prompt: Prompt
    permit: Permit | None = None
    transfer_address: str = ""
    trace_parent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReassign:
    """D is to receive the KV from another P."""

    worker: WorkerIdentity
    leg_id: LegId
    permit: Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCancel:
    """The worker is to drop this leg; the router has."""

    worker: WorkerIdentity
    leg_id: LegId


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForSnapshot:
    """A worker is to report anew which blocks it holds."""

    worker: WorkerIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class SendProbe:
    """A worker is to try its link to `target`, without a request; `LinkProbed` answers.

    Attributes:
        transfer_address: Of `target`.
    """

    worker: WorkerIdentity
    target: WorkerIdentity
    transfer_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Tokens for the client, in order; the first of them with the prompt's log-probabilities, where it wants those."""

    request_id: RequestId
    tokens: tuple[TokenSample, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The request is complete."""

    request_id: RequestId
    timing: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The request ended with an error."""

    request_id: RequestId
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSuspected:
    """A worker with legs of this router fell silent; they continue elsewhere. To be logged."""

    worker: WorkerIdentity
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSuspected:
    """Two workers could not hand KV over; they get no request as a pair, and their link is tried after so long, never
    if they do not fit. To be logged.
    """

    prefill: WorkerIdentity
    decode: WorkerIdentity
    error: BatonError
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRestored:
    """Two workers of which `PairSuspected` told can hand KV over again. To be logged."""

    prefill: WorkerIdentity
    decode: WorkerIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseWorker:
    """The worker that joined at `address` cannot be used, or its name is another's now: disconnect from it, and ask
    there again.
    """

    address: str
    error: BatonError


SendAction = SendLeg | SendReassign | SendCancel | AskForSnapshot | SendProbe
Told = WorkerSuspected | PairSuspected | PairRestored
Action = SendAction | Emit | Finish | Fail | RefuseWorker | Told
