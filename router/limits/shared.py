"""Limits that hold over all routers: the counts lie in Redis, one script per step (`limits.lua`).

Every request in flight has a lease there, renewed while its router lives; those of a router that died run out. Unused
buckets expire. What lies in Redis may be false: the scripts repair what no router can have written, and a reply that is
still not right counts as none.
"""

from collections.abc import Iterable
from importlib import resources
from math import isfinite
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from baton.errors import UnavailableError
from baton.redis_link import RefusedValues, asked
from router.limits.local import CONCURRENCY_RETRY_S, BucketSize
from router.limits.ports import (
    GrantId,
    Level,
    Levels,
    LimitGranted,
    LimitKind,
    LimitRefused,
    LimitUsage,
)
from router.tenants.tenant import Tenant, TenantId, TenantLimits

if TYPE_CHECKING:
    from redis.asyncio import Redis

_NO_GRANT = GrantId("")
_PARTS = ("buckets", "in_flight", "charged")
_MOST_ROUTERS = 1024
_MOST_DEBT = 1e12
"""Of a bucket, in requests or tokens, and of a wait in seconds: no router's."""

_Count = Annotated[int, Meta(ge=0)]


class _Reply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What `limits.lua` returns; numbers that are not whole are text."""

    granted: Annotated[int, Meta(ge=0, le=1)]
    kind: bytes
    wait_ms: bytes
    requests: bytes
    tokens: bytes
    in_flight: _Count
    refused: _Count


class RedisLimiter:
    """A `Limiter` on Redis. Every method raises `UnavailableError` when Redis gives no answer.

    Args:
        redis: Where the counts lie.
        prefix: Of all keys; clusters that share a Redis need different ones.
        lease_s: How long a request stays counted after its router was last heard of.
        refused: Is told of what is not believed.
    """

    def __init__(
        self, redis: "Redis", *, prefix: str, lease_s: float, refused: RefusedValues
    ) -> None:
        self._refused = refused
        self._prefix = prefix
        self._lease_ms = round(lease_s * 1000)
        self._limits = redis.register_script(_script("limits.lua"))
        self._routers = redis.register_script(_script("routers.lua"))
        self._charged: dict[GrantId, int] = {}

    async def enter(self, tenant: Tenant, grant: GrantId) -> LimitGranted | LimitRefused:
        """See `Limiter`."""
        decision, _ = await self._run("enter", tenant, grant, 1)
        return decision

    async def charge(
        self, tenant: Tenant, grant: GrantId, tokens: int
    ) -> LimitGranted | LimitRefused:
        """See `Limiter`."""
        decision, _ = await self._run("charge", tenant, grant, tokens)
        if isinstance(decision, LimitGranted):
            self._charged[grant] = self._charged.get(grant, 0) + tokens
        return decision

    async def leave(self, tenant: Tenant, grant: GrantId, used_tokens: int) -> None:
        """See `Limiter`. Without an answer it may be said again."""
        await self._run("leave", tenant, grant, used_tokens, (self._charged.get(grant, 0),))
        self.forget(grant)

    def forget(self, grant: GrantId) -> None:
        """It has left, and Redis is not told of it any more."""
        self._charged.pop(grant, None)

    async def usage(self, tenant: Tenant) -> LimitUsage:
        """See `Limiter`."""
        decision, in_flight = await self._run("usage", tenant, _NO_GRANT, 0)
        return LimitUsage(in_flight=in_flight, levels=decision.levels)

    async def renew(self, tenant: Tenant, grants: Iterable[GrantId]) -> None:
        """Keeps requests counted for another lease; also those that Redis has forgotten."""
        await self._run("renew", tenant, _NO_GRANT, 0, grants)

    async def count_routers(self, router_id: str, *, leaving: bool = False) -> int:
        """Says that this router is here, or leaves, and how many there are."""
        lease_ms = 0 if leaving else self._lease_ms
        keys = [f"{self._prefix}:routers"]
        reply = await asked(self._routers(keys=keys, args=[router_id, lease_ms]))
        try:
            routers, refused = msgspec.convert(reply, tuple[_Count, _Count])
            if routers > _MOST_ROUTERS:
                raise ValueError(f"more than {_MOST_ROUTERS} routers")
        except ValueError as error:
            raise self._refuse("limits_routers", error) from error
        self._refused.note("limits_routers", ["no router's lease"] * refused)
        return routers

    async def _run(
        self,
        what: str,
        tenant: Tenant,
        grant: GrantId,
        amount: int,
        more: Iterable[GrantId | int] = (),
    ) -> tuple[LimitGranted | LimitRefused, int]:
        requests, tokens = _sizes(tenant.limits)
        most = tenant.limits.max_concurrency
        arguments: list[str | float] = [what, grant, amount, self._lease_ms]
        arguments += [*_numbers(requests), *_numbers(tokens), -1 if most is None else most, *more]
        answer = await asked(self._limits(keys=self._keys(tenant.tenant_id), args=arguments))
        try:
            reply = msgspec.convert(answer, _Reply)
            decision = _decision(reply, requests, tokens)
        except ValueError as error:
            raise self._refuse("limits", error) from error
        self._refused.note("limits", ["a bucket or lease that no router wrote"] * reply.refused)
        return decision, reply.in_flight

    def _refuse(self, reader: str, error: ValueError) -> UnavailableError:
        self._refused.note(reader, [str(error)])
        return UnavailableError(f"Redis gave no answer that can be right: {error}")

    def _keys(self, tenant_id: TenantId) -> list[str]:
        """All with the tenant as their hash tag, so that a Redis cluster keeps them in one place."""
        return [f"{self._prefix}:{{{tenant_id}}}:{part}" for part in _PARTS]


def _decision(
    reply: _Reply, requests: BucketSize | None, tokens: BucketSize | None
) -> LimitGranted | LimitRefused:
    """Raises `ValueError` where the reply is none."""
    levels = Levels(
        requests=_level(requests, _number(reply.requests)),
        tokens=_level(tokens, _number(reply.tokens)),
    )
    if reply.granted:
        return LimitGranted(levels=levels)
    kind = LimitKind(reply.kind.decode())
    wait_s = _number(reply.wait_ms) / 1000
    if kind is LimitKind.CONCURRENCY:
        wait_s = CONCURRENCY_RETRY_S
    elif wait_s <= 0 or (requests if kind is LimitKind.REQUESTS else tokens) is None:
        raise ValueError("a refusal for nothing")
    return LimitRefused(kind=kind, retry_after_s=wait_s, levels=levels)


def _number(text: bytes) -> float:
    value = float(text)
    if not isfinite(value) or abs(value) > _MOST_DEBT * 1000:
        raise ValueError("a number that is not finite, or of no bucket")
    return value


def _script(name: str) -> str:
    return (resources.files("router.limits") / name).read_text(encoding="utf-8")


def _sizes(limits: TenantLimits) -> tuple[BucketSize | None, BucketSize | None]:
    return (
        BucketSize.of(limits.requests_per_minute, limits.request_burst, 1.0),
        BucketSize.of(limits.tokens_per_minute, limits.token_burst, 1.0),
    )


def _numbers(size: BucketSize | None) -> tuple[float, float]:
    """Capacity and rate per millisecond, as the script takes them."""
    return (-1, 0) if size is None else (size.capacity, size.rate_per_s / 1000)


def _level(size: BucketSize | None, remaining: float) -> Level | None:
    if size is None:
        return None
    remaining = min(remaining, size.capacity)
    reset_s = (size.capacity - remaining) / size.rate_per_s
    return Level(limit=size.capacity, remaining=remaining, reset_s=reset_s)
