"""Tells other routers what this one admitted, and hears what they did, through Redis.

One hash holds a field per router: a number that grows with every message, and its totals. A router whose number stands still
for a lease is taken out by any that notices. While Redis is away every router is fair by itself, and asks again.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec

from baton.clock import Clock, MonotonicClock
from baton.config.schema import TenantsConfig
from baton.errors import UnavailableError
from baton.redis_link import asked, open_redis
from baton.telemetry.logs import get_logger
from router.admission.shares import Totals

if TYPE_CHECKING:
    from redis.asyncio import Redis

_PERIOD_S = 0.2
_LEASE_S = 3.0

_log = get_logger(__name__)


class AdmissionShares(Protocol):
    """Admits requests."""

    @property
    def admitted(self) -> Totals:
        """What it admitted since its start."""

    def hear(self, others: Mapping[str, Totals]) -> None:
        """What others admitted since theirs."""


class ShareMessage(msgspec.Struct, frozen=True, kw_only=True, rename={"admitted": "given"}):
    """A router's message: how many it has sent, and its totals (`given` for routers of every version)."""

    beat: int
    admitted: dict[str, float]


class ShareExchange:
    """The exchange of one router.

    Args:
        redis: Where the messages lie.
        key: Of the hash.
        router_id: Unique among routers and starts.
        admission: Admits requests here.
        clock: Monotonic.
    """

    def __init__(
        self, redis: "Redis", *, key: str, router_id: str, admission: AdmissionShares, clock: Clock
    ) -> None:
        self._redis = redis
        self._key = key
        self._router_id = router_id
        self._admission = admission
        self._clock = clock
        self._beat = 0
        self._up = True
        self._heard_at: dict[str, tuple[int, float]] = {}
        """The last beat of each other router, and when it was new here."""

    async def run(self) -> None:
        """Exchanges until cancelled."""
        while True:
            try:
                await self.exchange()
                self._note(up=True)
            except UnavailableError as error:
                self._note(up=False, why=error.message)
            await asyncio.sleep(_PERIOD_S)

    async def exchange(self) -> None:
        """Sends a message and reads those of others.

        Raises:
            UnavailableError: Redis gave no answer; nothing was heard.
        """
        self._beat += 1
        mine = msgspec.json.encode(
            ShareMessage(beat=self._beat, admitted=dict(self._admission.admitted))
        )
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hset(self._key, self._router_id, mine.decode())
        pipeline.pexpire(self._key, round(10 * _LEASE_S * 1e3))
        pipeline.hgetall(self._key)
        _, _, fields = await asked(pipeline.execute())
        messages = {name: message for name, text in fields.items() if (message := _message(text))}
        messages.pop(self._router_id, None)
        silent = self._silent(messages) | (fields.keys() - messages.keys() - {self._router_id})
        self._admission.hear(
            {name: m.admitted for name, m in messages.items() if name not in silent}
        )
        if silent:
            await asked(self._redis.hdel(self._key, *silent))

    async def leave(self) -> None:
        """Removes this router's message."""
        await asked(self._redis.hdel(self._key, self._router_id))

    def _silent(self, messages: Mapping[str, ShareMessage]) -> set[str]:
        """Routers that have sent nothing new for a lease."""
        now_s = self._clock.now_s()
        for name, message in messages.items():
            if name not in self._heard_at or self._heard_at[name][0] != message.beat:
                self._heard_at[name] = (message.beat, now_s)
        self._heard_at = {name: heard for name, heard in self._heard_at.items() if name in messages}
        return {name for name, (_, at_s) in self._heard_at.items() if now_s - at_s > _LEASE_S}

    def _note(self, *, up: bool, why: str = "") -> None:
        """One line in the log per change."""
        if up and not self._up:
            _log.info("shares hold over all routers again")
        elif self._up and not up:
            _log.warning("Redis is away: this router is fair by itself", why=why)
        self._up = up


@asynccontextmanager
async def sharing(config: TenantsConfig, admission: AdmissionShares) -> AsyncIterator[None]:
    """Exchanges in the background while inside, where a Redis is configured.

    Raises:
        ConfigError: Its URL is wrong, or the extra is not installed.
    """
    if not config.redis_url:
        yield
        return
    redis = open_redis(config.redis_url, config.redis_timeout_s)
    exchange = ShareExchange(
        redis,
        key=f"{config.redis_prefix}:given",
        router_id=secrets.token_hex(8),
        admission=admission,
        clock=MonotonicClock(),
    )
    task = asyncio.create_task(exchange.run(), name="shares")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            await exchange.leave()
        except UnavailableError as error:
            _log.info("this router's message stays until its lease is over", why=error.message)
        await redis.aclose()


def _message(text: str) -> ShareMessage | None:
    """None for what no router wrote."""
    try:
        return msgspec.json.decode(text, type=ShareMessage)
    except msgspec.DecodeError:
        return None
