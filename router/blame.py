"""Whose fault a leg's failure may be: which workers the next attempt avoids, and whose circuit breaker hears of it."""

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    DeadlineError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    StaleIncarnationError,
    TransferError,
    WorkerLostError,
    WrongRoleError,
)
from router.legs import Leg
from router.routing.worker_view import WorkerView

_BLAMES_EITHER = (TransferError, CancelledByPeerError, StaleIncarnationError, WorkerLostError)
"""Errors of one leg whose cause may lie with the other's worker."""

_OWN_FAULTS = (EngineError, DrainingError, WrongRoleError)
"""Errors of P's leg that say nothing about D's."""

_NOBODYS_FAULT = (
    CancelledByPeerError,
    DeadlineError,
    DrainingError,
    InvalidRequestError,
    OverloadedError,
    WrongRoleError,
)
"""Errors of a leg that say nothing about the health of its worker."""


def suspects(leg: Leg, error: BatonError) -> list[WorkerView]:
    """Workers that may be at fault for what ended `leg`, its own first."""
    others = leg.flight.legs if isinstance(error, _BLAMES_EITHER) else ()
    return [leg.worker, *(other.worker for other in others if other is not leg)]


def tells_of_health(error: BatonError) -> bool:
    """Whether it counts as a failure of those who are suspected."""
    return not isinstance(error, _NOBODYS_FAULT)


def spares_decode(error: BatonError) -> bool:
    """Whether what ended P's leg leaves D's pages as good as they were."""
    return isinstance(error, _OWN_FAULTS)
