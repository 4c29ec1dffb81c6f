"""What the gate asks of limits, wherever the counts are kept.

A request *enters* (one request, one place in flight) before its body is read, is *charged* the tokens that it may use
once they are known, and *leaves* at its end, settled by what it did use. Entering and charging may be refused;
leaving never is.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from router.tenants.tenant import Tenant

GrantId = NewType("GrantId", str)
"""One request in the counts of all routers; made by its router, never by a client."""


class LimitKind(Enum):
    """What has run out. The values are metrics' labels."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How full one bucket is.

    Attributes:
        limit: What it holds when it is full.
        remaining: What it holds; below 0 after a request took more than it had asked for.
        reset_s: Seconds until it is full again.
    """

    limit: float
    remaining: float
    reset_s: float

    def wait_s(self, amount: float) -> float:
        """Seconds until so much could be taken; a bucket that is full gives any amount."""
        missing = min(amount, self.limit) - self.remaining
        return missing * self.reset_s / (self.limit - self.remaining) if missing > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """A tenant's buckets after a decision; None where it has no such limit."""

    requests: Level | None = None
    tokens: Level | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitGranted:
    """It may go on."""

    levels: Levels


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRefused:
    """It may not.

    Attributes:
        kind: What has run out.
        retry_after_s: When there will be enough, if no other request takes it first.
        levels: As they stand; a refusal takes nothing.
    """

    kind: LimitKind
    retry_after_s: float
    levels: Levels


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUsage:
    """What a tenant uses now, for operators."""

    in_flight: int
    levels: Levels


class Limiter(Protocol):
    """Keeps the counts of all tenants."""

    async def enter(self, tenant: Tenant, grant: GrantId) -> LimitGranted | LimitRefused:
        """Takes one request and a place in flight, which `leave` gives back."""

    async def charge(
        self, tenant: Tenant, grant: GrantId, tokens: int
    ) -> LimitGranted | LimitRefused:
        """Takes tokens for a request that has entered. More than the bucket can ever hold are taken once it is full;
        it is in debt after that.
        """

    async def leave(self, tenant: Tenant, grant: GrantId, used_tokens: int) -> None:
        """Gives the place back, and the difference to what was charged. A second time is nothing."""

    async def usage(self, tenant: Tenant) -> LimitUsage:
        """What it uses now."""
