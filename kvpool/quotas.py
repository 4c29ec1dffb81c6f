"""Keeps a node true to what the operator allows its tenants, while serving. What is wrong with the operator's word is said, and
changes nothing: the last good one holds.
"""

import asyncio
from collections.abc import Callable, Mapping

from baton.errors import BatonError
from baton.telemetry.logs import get_logger
from kvpool.accounts import Allowance
from kvpool.ports import AllowanceSource

_log = get_logger(__name__)


class QuotaKeeper:
    """Looks for news every few seconds.

    Args:
        source: Where allowances come from.
        allow: Has them obeyed.
        pause_s: Between two looks.
    """

    def __init__(
        self,
        source: AllowanceSource,
        allow: Callable[[Mapping[str, Allowance]], None],
        *,
        pause_s: float,
    ) -> None:
        self._source = source
        self._allow = allow
        self._pause_s = pause_s

    async def look(self) -> bool:
        """Takes over what is new; whether anything was. Raises nothing that an operator can cause."""
        try:
            allowances = await self._source.next()
        except BatonError as error:
            _log.warning("what tenants may keep in the pool stays as it was", why=error.message)
            return False
        if allowances is None:
            return False
        self._allow(allowances)
        _log.info("tenants' quotas taken over", tenants=len(allowances))
        return True

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            await self.look()
