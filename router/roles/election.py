"""Which of several routers plans: the one that holds a lease in Redis, or the only router itself.

While Redis is away nobody plans: roles stay what they are.
What lies there can do no more than keep every planner standing by.
"""

from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from baton.errors import UnavailableError
from baton.redis_link import asked

if TYPE_CHECKING:
    from redis.asyncio import Redis

LEASE_S = 15.0

_TAKE = """
if redis.call('GET', KEYS[1]) == ARGV[1] or redis.call('PTTL', KEYS[1]) < 0 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return 1
end
return 0
"""
_LEAVE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class Election(Protocol):
    """Says who plans."""

    async def standing_by(self) -> str:
        """Why this router does not plan now; empty if it does."""

    async def leave(self) -> None:
        """Lets another router plan."""


class Alone:
    """The only router plans."""

    async def standing_by(self) -> str:
        """Never."""
        return ""

    async def leave(self) -> None:
        """Nobody waits."""


class RedisElection:
    """The router that holds the lease plans; each asks for it again and again.

    Args:
        redis: Where it lies.
        key: Of the lease.
        router_id: Unique among routers and starts.
    """

    def __init__(self, redis: "Redis", *, key: str, router_id: str) -> None:
        self._redis = redis
        self._take = redis.register_script(_TAKE)
        self._leave = redis.register_script(_LEAVE)
        self._key = key
        self._router_id = router_id

    async def standing_by(self) -> str:
        """Why this router does not plan now; empty if it holds the lease, for `LEASE_S` from now on."""
        arguments: list[str | int] = [self._router_id, round(1000 * LEASE_S)]
        try:
            taken = await asked(self._take(keys=[self._key], args=arguments))
        except UnavailableError as error:
            return f"nobody plans: {error.message}"
        return "" if taken == 1 else "another router plans"

    async def leave(self) -> None:
        """Gives the lease back, if it is this router's, and disconnects."""
        with suppress(UnavailableError):  # else it ends by itself
            await asked(self._leave(keys=[self._key], args=[self._router_id]))
        await self._redis.aclose()
