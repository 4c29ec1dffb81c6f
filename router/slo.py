"""What a request was promised.

An operator names classes of service (`router.slo_classes`); a tenant belongs to one, and each of its requests may ask
for that one or for one that is less urgent. The choice is made in the HTTP face, once; admission,
routing and metrics read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.config.schema import SloClass
from baton.errors import ConfigError, InvalidRequestError
from baton.generation import SloTargets

_OWN_TIERS = frozenset({"auto", "default", "priority", "scale"})
"""OpenAI's tiers that ask for no less than the best that the tenant may have."""

_LEAST_URGENT_TIER = "flex"
_STANDARD_TIER = "standard_only"
"""Anthropic's, which asks for nothing above the standard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """One class of service, by its name; see `baton.config.schema.SloClass`."""

    name: str = "standard"
    ttft_s: float | None = None
    tbt_s: float | None = None
    priority: int = 1

    def promise(self, waited_s: float) -> SloTargets:
        """What is left of it for the worker, once the request has waited for so long."""
        left_s = None if self.ttft_s is None else max(0.0, self.ttft_s - waited_s)
        return SloTargets(ttft_s=left_s, tbt_s=self.tbt_s, priority=self.priority)


STANDARD = Slo()
"""The promise of a request without another."""


class SloClasses:
    """The classes of one cluster.

    Args:
        classes: As configured, by name.
    """

    def __init__(self, classes: Mapping[str, SloClass]) -> None:
        self._classes = {
            name: Slo(name=name, ttft_s=c.ttft_s, tbt_s=c.tbt_s, priority=c.priority)
            for name, c in classes.items()
        }
        self._by_urgency = sorted(self._classes.values(), key=lambda slo: -slo.priority)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all classes, the most urgent first."""
        return tuple(slo.name for slo in self._by_urgency)

    def named(self, name: str) -> Slo:
        """The class of that name.

        Raises:
            ConfigError: There is none.
        """
        if name not in self._classes:
            known = ", ".join(self.names)
            raise ConfigError(f"there is no SLO class {name!r}; there are {known}")
        return self._classes[name]

    def chosen(self, own: str, *, service_tier: str | None = None, priority: int = 0) -> Slo:
        """The class that a request of a tenant of class `own` is served in.

        Args:
            own: Name of the tenant's class: the most urgent that its requests may have. One that is not configured (a
                tenants file may be newer than this router's configuration) is as good as `standard`.
            service_tier: OpenAI's or Anthropic's name of a tier, or the name of a class.
            priority: How many classes less urgent (a lower number is sooner, as in vLLM); below 0 asks for what is
                never given.

        Raises:
            InvalidRequestError: There is no such tier, or it is above the tenant's.
        """
        tier = self._tier(self._classes.get(own) or self.named(STANDARD.name), service_tier)
        place = self._by_urgency.index(tier)
        return self._by_urgency[min(place + max(0, priority), len(self._by_urgency) - 1)]

    def _tier(self, own: Slo, service_tier: str | None) -> Slo:
        if service_tier is None or service_tier in _OWN_TIERS:
            return own
        if service_tier in self._classes:
            asked = self._classes[service_tier]
            if asked.priority > own.priority:
                message = f"The tier {service_tier} is above this tenant's, {own.name}."
                raise InvalidRequestError(message, param="service_tier")
            return asked
        if service_tier == _LEAST_URGENT_TIER:
            return self._by_urgency[-1]
        if service_tier == _STANDARD_TIER:
            return min(own, self.named(STANDARD.name), key=lambda slo: slo.priority)
        message = f"There is no service tier {service_tier[:64]!r}."
        raise InvalidRequestError(message, param="service_tier")
