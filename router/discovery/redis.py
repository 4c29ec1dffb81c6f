"""Discovery by registrations in Redis, which workers and pool nodes renew (`baton.discovery`). Asked twice a second,
and nothing pushed: a look that is missed is made good by the next one.
"""

from baton.discovery.registrar import RENEW_S
from baton.discovery.registry import Registration, Registry
from baton.errors import UnavailableError
from baton.redis_link import RefusedValues
from router.discovery.ports import Look, Sighting

_READER = "discovery"


class RedisDiscovery:
    """Reads registrations.

    Args:
        registry: Where they lie.
        refused: Is told of what others wrote there.
    """

    def __init__(self, registry: Registry, refused: RefusedValues) -> None:
        self.period_s = RENEW_S
        self._registry = registry
        self._refused = refused
        self._last = Look()

    async def look(self) -> Look:
        """Those that hold now; while Redis is away those that held last."""
        try:
            found = await self._registry.registrations()
        except UnavailableError as error:
            return Look(
                workers=self._last.workers,
                pool_nodes=self._last.pool_nodes,
                faults=(error.message,),
            )
        self._refused.note(_READER, found.faults)
        sightings = [(one.kind, _sighting(one)) for one in found.registrations]
        self._last = Look(
            workers=tuple(one for kind, one in sightings if kind == "worker"),
            pool_nodes=tuple(one for kind, one in sightings if kind == "pool"),
        )
        return self._last


def _sighting(registration: Registration) -> Sighting:
    words = [registration.role, str(registration.identity)]
    if registration.layout:
        words.append(f"layout {registration.layout}")
    return Sighting(
        address=registration.address,
        source="redis",
        registered_as=" ".join(filter(None, words)),
        labels=registration.labels,
    )
