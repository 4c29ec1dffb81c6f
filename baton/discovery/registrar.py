"""Keeps a process registered in Redis, so that routers find it; see `registry.py`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.background import in_background
from baton.config.schema import BatonConfig
from baton.discovery.registry import Registration, Registry
from baton.errors import UnavailableError
from baton.redis_link import open_redis
from baton.telemetry.logs import get_logger

RENEW_S = 0.5
"""So long after Redis was emptied a process is registered again. Routers look as often."""

LEASE_S = 5.0
"""A process that has not renewed for so long is gone, as far as registrations tell."""

_log = get_logger(__name__)


class Registrar:
    """Registers one process and renews its lease.

    Args:
        registry: Where.
        registration: What the process says of itself now; asked at each renewal, since roles change.
    """

    def __init__(self, registry: Registry, registration: Callable[[], Registration]) -> None:
        self._registry = registry
        self._registration = registration
        self._registered: bool | None = None

    async def run(self) -> None:
        """Renews until cancelled, whether Redis answers or not."""
        while True:
            try:
                await self._registry.register(self._registration())
                self._note(registered=True)
            except UnavailableError as error:
                self._note(registered=False, why=error.message)
            await asyncio.sleep(RENEW_S)

    async def withdraw(self) -> None:
        """The process leaves."""
        try:
            await self._registry.withdraw(self._registration())
        except UnavailableError as error:
            _log.info("the registration stays until its lease ends", why=error.message)

    def _note(self, *, registered: bool, why: str = "") -> None:
        """One line in the log per change."""
        if registered and not self._registered:
            _log.info("registered in Redis", address=self._registration().address)
        elif not registered and self._registered is not False:
            _log.warning("not registered in Redis, trying on", why=why)
        self._registered = registered


@asynccontextmanager
async def registered(
    config: BatonConfig, registration: Callable[[], Registration]
) -> AsyncIterator[None]:
    """Keeps this process registered while inside, where `cluster.discovery` is redis and others can reach its address.

    Raises:
        ConfigError: The URL of Redis is wrong, or the extra is not installed.
    """
    cluster = config.cluster
    if cluster.discovery != "redis" or registration().address.startswith("unix:"):
        yield
        return
    redis = open_redis(cluster.redis_url, cluster.redis_timeout_s, setting="cluster.redis_url")
    secret = bytes.fromhex(cluster.secret)
    registry = Registry(redis, prefix=cluster.redis_prefix, secret=secret, lease_s=LEASE_S)
    registrar = Registrar(registry, registration)
    death = "the registration is not renewed any more"
    try:
        async with in_background(registrar.run(), "registration", death):
            yield
    finally:
        await registrar.withdraw()
        await redis.aclose()
