"""What operators are told, as JSON."""

from pydantic import BaseModel

from router.breaker import Circuit
from router.limits.ports import Level, LimitUsage
from router.tenants.tenant import Tenant


class LimitsReply(BaseModel):
    """What a tenant may use at most; null is no limit."""

    requests_per_minute: float | None
    request_burst: float | None
    tokens_per_minute: float | None
    token_burst: float | None
    max_concurrency: int | None


class TenantReply(BaseModel):
    """One tenant, without its keys."""

    id: str
    weight: float
    slo_class: str
    tenant_class: str
    limits: LimitsReply
    kv_bytes: int | None
    models: list[str] | None
    cache_scope: str
    audit_content: bool
    admin: bool


class LevelReply(BaseModel):
    """How full a bucket is."""

    limit: float
    remaining: float
    reset_s: float


class TenantUsage(BaseModel):
    """What a tenant uses now, over all routers that share their counts.

    `circuit` is this router's own view: anything but `closed` says that the tenant's requests keep breaking workers.
    """

    tenant: TenantReply
    in_flight: int
    requests: LevelReply | None
    tokens: LevelReply | None
    circuit: str


class Reloaded(BaseModel):
    """Whether the tenants document had changed."""

    changed: bool


def tenant_reply(tenant: Tenant) -> TenantReply:
    """The public side of `tenant`."""
    limits = tenant.limits
    return TenantReply(
        id=tenant.tenant_id,
        weight=tenant.weight,
        slo_class=tenant.slo_class,
        tenant_class=tenant.tenant_class,
        limits=LimitsReply(
            requests_per_minute=limits.requests_per_minute,
            request_burst=limits.request_burst,
            tokens_per_minute=limits.tokens_per_minute,
            token_burst=limits.token_burst,
            max_concurrency=limits.max_concurrency,
        ),
        kv_bytes=tenant.kv_bytes,
        models=None if tenant.models is None else sorted(tenant.models),
        cache_scope=tenant.cache_scope,
        audit_content=tenant.audit_content,
        admin=tenant.admin,
    )


def usage_reply(tenant: Tenant, usage: LimitUsage, circuit: Circuit) -> TenantUsage:
    """What `tenant` uses."""
    return TenantUsage(
        tenant=tenant_reply(tenant),
        in_flight=usage.in_flight,
        requests=_level(usage.levels.requests),
        tokens=_level(usage.levels.tokens),
        circuit=circuit.value,
    )


def _level(level: Level | None) -> LevelReply | None:
    if level is None:
        return None
    return LevelReply(limit=level.limit, remaining=level.remaining, reset_s=level.reset_s)
