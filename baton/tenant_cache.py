"""What is kept for several tenants, in room that they share: grammars that a router has checked
(`router.generation.grammars`) and that a worker has compiled (`baton_engine.grammar`).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class TenantCache(Generic[_Key, _Value]):
    """Values by their keys, whichever tenant asks; each counts for the tenant that had it made. Where there are too
    many, the tenant with the most gives one up, so that nobody loses anything to who has more. Not thread-safe.

    Args:
        most: Values that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values = OrderedDict[_Key, tuple[str, _Value]]()
        """By key: whose, and the value; those used last behind."""

    def __contains__(self, key: _Key) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: _Key) -> _Value | None:
        """The value, which is used now; None where it is not kept."""
        if (found := self._values.get(key)) is None:
            return None
        self._values.move_to_end(key)
        return found[1]

    def put(self, key: _Key, value: _Value, tenant: str) -> int:
        """Keeps a value that was made for `tenant`. Where that is one too many, the tenant with the most gives up the
        one that was used longest ago.

        Returns:
            How many were given up for it.
        """
        self._values.pop(key, None)
        self._values[key] = tenant, value
        if len(self._values) <= self._most:
            return 0
        (largest, _), *_ = Counter(owner for owner, _ in self._values.values()).most_common(1)
        del self._values[next(k for k, (owner, _) in self._values.items() if owner == largest)]
        return 1

    def shrink(self, weight: Callable[[_Value], float], most: float) -> int:
        """Gives up values until they weigh no more than `most`: each time the heaviest one of the tenant whose values
        are the heaviest.

        Returns:
            How many.
        """
        weights = {key: weight(value) for key, (_, value) in self._values.items()}
        by_tenant: dict[str, list[_Key]] = {}
        for key, (tenant, _) in self._values.items():
            by_tenant.setdefault(tenant, []).append(key)
        num_given_up = 0
        while weights and sum(weights.values()) > most:
            heaviest = max(by_tenant.values(), key=lambda keys: sum(weights[key] for key in keys))
            key = max(heaviest, key=weights.__getitem__)
            heaviest.remove(key)
            del weights[key], self._values[key]
            num_given_up += 1
        return num_given_up

    def pop(self, key: _Key) -> None:
        """It is not kept any more, if it was."""
        self._values.pop(key, None)
