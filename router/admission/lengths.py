"""How long a tenant's outputs usually are: the part of a request's cost that is not known when it comes."""

from collections import OrderedDict

from router.tenants.tenant import TenantId

_FIRST_GUESS_TOKENS = 256
_MEMORY = 0.1
_MAX_TENANTS = 4096


class OutputLengths:
    """A running mean per tenant, bounded by what each request allows itself.

    Pure. Tenants that have been away longest are forgotten.
    """

    def __init__(self) -> None:
        self._means: OrderedDict[TenantId, float] = OrderedDict()

    def expected(self, tenant: TenantId, max_tokens: int) -> int:
        """What one sample of a request that may generate `max_tokens` will probably generate."""
        mean = self._means.get(tenant, _FIRST_GUESS_TOKENS)
        return max(1, min(max_tokens, round(mean)))

    def observe(self, tenant: TenantId, tokens: int) -> None:
        """One sample of a request ended after `tokens`."""
        mean = self._means.get(tenant)
        self._means[tenant] = tokens if mean is None else mean + _MEMORY * (tokens - mean)
        self._means.move_to_end(tenant)
        if len(self._means) > _MAX_TENANTS:
            self._means.popitem(last=False)
