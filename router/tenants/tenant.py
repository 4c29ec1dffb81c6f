"""A tenant: the party that a share of the cluster was promised to. Every request belongs to exactly one.

The access gate finds it by the request's key or token; from then on it travels with the request as a frozen object, so
that a reload of the tenants in mid-request changes nothing for that request.
"""

from dataclasses import dataclass, field
from typing import NewType

TenantId = NewType("TenantId", str)
"""Unique among tenants; letters, digits, `.`, `_` and `-`."""

DEFAULT_SLO_CLASS = "standard"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What a tenant may use at most, over all routers together. None is no limit.

    Attributes:
        requests_per_minute: Long-run rate of requests.
        request_burst: Requests that may come at once after a pause; what a minute allows unless given.
        tokens_per_minute: Long-run rate of tokens, of prompts and outputs together.
        token_burst: Tokens that may be asked for at once after a pause; what a minute allows unless given.
        max_concurrency: Requests in flight.
    """

    requests_per_minute: float | None = None
    request_burst: float | None = None
    tokens_per_minute: float | None = None
    token_burst: float | None = None
    max_concurrency: int | None = None

    @property
    def unlimited(self) -> bool:
        """Whether there is nothing to count."""
        return self == TenantLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant, as the operator described it.

    Attributes:
        tenant_id: Its name.
        weight: Its share of a crowded cluster, relative to the others'.
        slo_class: Name of the promise that its requests are held to.
        tenant_class: The value of metrics' `tenant_class` label; from a bounded set that the operator chose.
        limits: What it may use at most.
        kv_bytes: KV that it may keep in the pool, on all nodes together;
            the nodes read it from the same document and enforce it.
        models: Names of the models that it may use; None for all.
        cache_scope: Scope of the prefix cache; equal only for tenants that the operator lets share one.
        audit_content: Its prompts and outputs stand in the audit log.
        admin: It may ask how its requests were routed.
    """

    tenant_id: TenantId
    weight: float = 1.0
    slo_class: str = DEFAULT_SLO_CLASS
    tenant_class: str = DEFAULT_SLO_CLASS
    limits: TenantLimits = field(default_factory=TenantLimits)
    kv_bytes: int | None = None
    models: frozenset[str] | None = None
    cache_scope: str = ""
    audit_content: bool = False
    admin: bool = False

    def may_use(self, model: str) -> bool:
        """Whether the model of this name is on its list."""
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request.

    Attributes:
        tenant: On whose account.
        key_id: Names the key or token without giving it away; empty where none was asked for.
    """

    tenant: Tenant
    key_id: str = ""


ANONYMOUS = Tenant(tenant_id=TenantId("anonymous"), tenant_class="anonymous")
"""The tenant of all requests, where the operator describes none."""
