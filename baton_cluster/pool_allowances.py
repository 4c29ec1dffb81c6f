"""What the tenants document says to a pool node: it reads the same source as the routers, so that quotas hold whichever
of them starts again, however many routers there are, and before the first has come.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from baton.config.schema import BatonConfig
from baton.redis_link import RefusedValues, open_redis
from kvpool.messages import Allowance
from router.tenants.document import TenantsDocument, tenant_of
from router.tenants.sources import FileSource, RedisSource, TenantSource


class DocumentAllowances:
    """Quotas and weights of a tenants document (a `kvpool.ports.AllowanceSource`).

    Args:
        source: Where the document comes from.
        usual_bytes: What a tenant without a quota in the document may keep; None for any number.
    """

    def __init__(self, source: TenantSource, usual_bytes: int | None) -> None:
        self._source = source
        self._usual_bytes = usual_bytes

    async def next(self) -> Mapping[str, Allowance] | None:
        """See AllowanceSource."""
        edition = await self._source.next_edition()
        return None if edition is None else allowances_of(edition.document, self._usual_bytes)


def allowances_of(document: TenantsDocument, usual_bytes: int | None) -> dict[str, Allowance]:
    """What each tenant of a checked document may take."""
    tenants = [tenant_of(entry, document.metrics_label) for entry in document.tenants]
    return {
        tenant.tenant_id: Allowance(
            max_bytes=usual_bytes if tenant.kv_bytes is None else tenant.kv_bytes,
            weight=tenant.weight,
        )
        for tenant in tenants
    }


@asynccontextmanager
async def open_allowances(
    config: BatonConfig, refused: RefusedValues
) -> AsyncIterator[DocumentAllowances | None]:
    """The document that the configuration names, None where it names none.

    Raises:
        ConfigError: The URL of Redis is wrong.
    """
    tenants, usual_bytes = config.tenants, config.pool.tenant_bytes
    if tenants.source == "redis":
        redis = open_redis(tenants.redis_url, tenants.redis_timeout_s)
        secret = bytes.fromhex(config.cluster.secret)
        source = RedisSource(redis, tenants.redis_prefix, secret, refused, reads_keys=False)
        try:
            yield DocumentAllowances(source, usual_bytes)
        finally:
            await redis.aclose()
    elif tenants.file:
        yield DocumentAllowances(FileSource(Path(tenants.file), reads_keys=False), usual_bytes)
    else:
        yield None
