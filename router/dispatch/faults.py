"""What the end of a leg says of workers, and of the hand-off that it was part of. Pure."""

from collections.abc import Sequence

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    DeadlineError,
    DrainingError,
    EngineError,
    HandedOffError,
    InvalidRequestError,
    NoRoomError,
    OverloadedError,
    StaleIncarnationError,
    TransferError,
    UnreachableError,
    WorkerLostError,
    WrongRoleError,
)
from baton.ids import LegKind
from router.dispatch.attempt import Attempt, Leg
from router.routing.view import WorkerView

_EITHER_WORKERS_FAULT = (
    TransferError,
    CancelledByPeerError,
    StaleIncarnationError,
    WorkerLostError,
)
"""Errors of one leg whose cause may lie with the other leg's worker."""

PREFILL_WORKERS_OWN_FAULT = (EngineError, DrainingError, WrongRoleError)
"""Errors of P's leg that leave D's pages as good as they were."""

NO_WORKERS_FAULT = (
    CancelledByPeerError,
    DeadlineError,
    DrainingError,
    HandedOffError,
    InvalidRequestError,
    NoRoomError,
    OverloadedError,
    UnreachableError,
    WrongRoleError,
)
"""Errors of a leg that say nothing about the health of its worker."""


def given_up_by_prefill(leg: Leg, error: BatonError) -> bool:
    """Whether D says that P gave the hand-off up, and P has not said why yet: its prompt is complete with its first
    tokens, lies in the pool, or failed. What P says may be overtaken by D; if it is lost, so is P's stream.
    """
    attempt = leg.attempt
    waits = attempt.prefill is not None and not attempt.decoded
    return leg.kind is LegKind.RECEIVE and isinstance(error, CancelledByPeerError) and waits


def has_pages(attempt: Attempt, error: BatonError) -> bool:
    """Whether D has what an earlier P committed, though another was to take over: D has sent tokens, or that P was told
    so. The client has the first tokens, from which D goes on.
    """
    told = bool(attempt.early) or isinstance(error, HandedOffError)
    return told and attempt.first_tokens is not None


def suspects(leg: Leg, error: BatonError) -> list[WorkerView]:
    """Workers that may be at fault for what ended `leg`, its own first."""
    if isinstance(error, HandedOffError):
        return []
    if isinstance(error, NoRoomError) and leg.attempt.decode is not None:
        return [leg.attempt.decode.worker]  # also where P was told so before this router
    others: Sequence[Leg] = leg.attempt.legs if isinstance(error, _EITHER_WORKERS_FAULT) else ()
    return [leg.worker, *(other.worker for other in others if other is not leg)]
