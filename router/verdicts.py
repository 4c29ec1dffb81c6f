"""What an attempt has come to, as its progress tells the dispatcher: nothing left to do, a short wait, or a failure."""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.ids import WorkerIdentity
from router.flight import Flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The flight's samples want nothing more; what legs are open may go."""

    flight: Flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """The same, but P's account of the hand-off is worth a short wait."""

    flight: Flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A leg is gone that the flight cannot do without.

    Attributes:
        error: Why.
        blamed: Workers that may be at fault.
    """

    flight: Flight
    error: BatonError
    blamed: frozenset[WorkerIdentity] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphaned(Broken):
    """The leg that is gone is P's, before the hand-off, and D keeps the pages for another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """D has no room for the prompt, which lies in the pool."""

    flight: Flight


Verdict = Over | Settling | Broken | Orphaned | Pooled
