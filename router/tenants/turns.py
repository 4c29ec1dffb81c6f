"""Turns of tenants at what is done for one request at a time."""

import asyncio
from weakref import WeakValueDictionary


class Turns:
    """Lets one request of each tenant at a time wait among those of the others: nobody waits for more than one of each.
    For one event loop.
    """

    def __init__(self) -> None:
        # A tenant's turn lasts as long as somebody holds it or waits for it.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, tenant_id: str) -> asyncio.Lock:
        """The turn of a tenant; within the tenant it goes by the order of asking."""
        turn = self._turns.get(tenant_id)
        if turn is None:
            turn = self._turns[tenant_id] = asyncio.Lock()
        return turn
