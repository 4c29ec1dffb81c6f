"""One HTTP request from the gate to its last byte: who sent it, and under which name it is answered."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Scope

from router.tenants.tenant import Caller, Tenant

_KEY = "baton.visit"


@dataclass(slots=True, eq=False, kw_only=True)
class Visit:
    """What the gate knows of a request, for those behind it.

    Attributes:
        caller: Who sent it.
        name: The request id that the reply carries; the client's own if it gave one, so never a key to anything.
        arrived_s: When the gate saw it, on the serving clock.
    """

    caller: Caller
    name: str
    arrived_s: float

    @property
    def tenant(self) -> Tenant:
        """On whose account it is."""
        return self.caller.tenant

    def enter(self, scope: Scope) -> None:
        """Lets `visit_of` find it."""
        scope[_KEY] = self


def visit_of(request: Request) -> Visit:
    """The visit that `request` belongs to. Every request past the gate has one; without it nobody is served."""
    visit: Visit = request.scope[_KEY]
    return visit
