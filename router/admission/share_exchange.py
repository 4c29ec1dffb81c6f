"""Tells other routers what this one admitted, and hears what they did, through Redis.

One hash holds a field per router: a number that grows with every message, and its totals, sealed with the cluster's
secret. A router whose number stands still for a lease is taken out by any that notices, and so is what no router of the
cluster wrote. What one wrote that is out of time by the clock here is not heard: the others may hear it. While Redis is
away every router is fair by itself, and asks again.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec
from msgspec import Meta

from baton.background import in_background
from baton.clock import Clock, MonotonicClock
from baton.config.schema import BatonConfig
from baton.errors import UnavailableError
from baton.redis_link import RefusedValues, asked, open_redis
from baton.seal import MAX_SKEW_S, Seal, SealError, SealTimeError
from baton.telemetry.logs import get_logger
from router.admission.shares import MAX_ACCOUNTS, Totals

if TYPE_CHECKING:
    from redis.asyncio import Redis

_PERIOD_S = 0.2
_LEASE_S = 3.0
_MOST_ROUTERS = 1024
_MOST_BYTES = 8 << 20
"""Of one message: all accounts, with names as long as they may be."""

_MOST_CHARS = 1024
_READER = "shares"

_log = get_logger(__name__)


class AdmissionShares(Protocol):
    """Admits requests."""

    @property
    def admitted(self) -> Totals:
        """What it admitted since its start."""

    def hear(self, others: Mapping[str, Totals]) -> None:
        """What others admitted since theirs."""


class _ShareMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A router's message: how many it has sent, and its totals."""

    beat: Annotated[int, Meta(ge=1, lt=1 << 53)]
    admitted: Annotated[
        dict[Annotated[str, Meta(max_length=_MOST_CHARS)], Annotated[float, Meta(ge=0, le=1e18)]],
        Meta(max_length=MAX_ACCOUNTS),
    ]


class ShareExchange:
    """The exchange of one router.

    Args:
        redis: Where the messages lie.
        key: Of the hash.
        router_id: Unique among routers and starts.
        admission: Admits requests here.
        clock: Monotonic.
        secret: Of the cluster: only its routers are heard.
        refused: Is told of what others wrote.
    """

    def __init__(
        self,
        redis: "Redis",
        *,
        key: str,
        router_id: str,
        admission: AdmissionShares,
        clock: Clock,
        secret: bytes,
        refused: RefusedValues,
    ) -> None:
        self._redis = redis
        script = resources.files("router.admission") / "exchange.lua"
        self._script = redis.register_script(script.read_text(encoding="utf-8"))
        self._seal = Seal(secret, "router shares")
        self._refused = refused
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
        mine = _ShareMessage(beat=self._beat, admitted=_tellable(self._admission.admitted))
        sealed = self._seal.close(self._router_id, msgspec.json.encode(mine))
        life_ms = round(10 * _LEASE_S * 1e3)
        arguments: list[str | bytes | int] = [self._router_id, sealed, life_ms]
        arguments += [_MOST_ROUTERS, _MOST_BYTES]
        refused, fields = _reply(await asked(self._script(keys=[self._key], args=arguments)))
        faults, messages, foreign = (
            ["no router's message"] * refused,
            dict[str, _ShareMessage](),
            [],
        )
        for name, text in zip(fields[::2], fields[1::2], strict=False):
            try:
                router = name.decode()
                messages[router] = self._opened(router, text)
            except ValueError as error:
                faults.append(str(error))
                if not isinstance(error, SealTimeError):
                    foreign.append(name)
        self._refused.note(_READER, faults)
        silent = self._silent(messages)
        self._admission.hear(
            {name: m.admitted for name, m in messages.items() if name not in silent}
        )
        if silent or foreign:
            await asked(self._redis.hdel(self._key, *silent, *foreign))

    def _opened(self, name: str, sealed: bytes) -> _ShareMessage:
        """Raises `ValueError` for what this router of the cluster did not write of late."""
        opened = self._seal.open(name, sealed, _MOST_BYTES)
        self._seal.check_age(opened, _LEASE_S)
        message = msgspec.json.decode(opened.content, type=_ShareMessage)
        if name in self._heard_at and message.beat < self._heard_at[name][0]:
            raise SealError("a message from before one that was heard")
        return message

    async def leave(self) -> None:
        """Removes this router's message."""
        await asked(self._redis.hdel(self._key, self._router_id))

    def _silent(self, messages: Mapping[str, _ShareMessage]) -> set[str]:
        """Routers that have sent nothing new for a lease."""
        now_s = self._clock.now_s()
        for name, message in messages.items():
            if name not in self._heard_at or self._heard_at[name][0] != message.beat:
                self._heard_at[name] = (message.beat, now_s)
        # For as long as an old message of a router would not be out of date by its seal, its last one is remembered.
        kept_s = _LEASE_S + 2 * MAX_SKEW_S
        self._heard_at = {
            name: heard
            for name, heard in self._heard_at.items()
            if name in messages or now_s - heard[1] <= kept_s
        }
        return {name for name in messages if now_s - self._heard_at[name][1] > _LEASE_S}

    def _note(self, *, up: bool, why: str = "") -> None:
        """One line in the log per change."""
        if up and not self._up:
            _log.info("shares hold over all routers again")
        elif self._up and not up:
            _log.warning("Redis is away: this router is fair by itself", why=why)
        self._up = up


@asynccontextmanager
async def sharing(
    config: BatonConfig, admission: AdmissionShares, refused: RefusedValues
) -> AsyncIterator[None]:
    """Exchanges in the background while inside, where a Redis is configured.

    Raises:
        ConfigError: Its URL is wrong, or the extra is not installed.
    """
    tenants = config.tenants
    if not tenants.redis_url:
        yield
        return
    redis = open_redis(tenants.redis_url, tenants.redis_timeout_s)
    exchange = ShareExchange(
        redis,
        key=f"{tenants.redis_prefix}:admitted",
        router_id=secrets.token_hex(8),
        admission=admission,
        clock=MonotonicClock(),
        secret=bytes.fromhex(config.cluster.secret),
        refused=refused,
    )
    death = "the exchange of shares died: this router is fair by itself"
    try:
        async with in_background(exchange.run(), "shares", death):
            yield
    finally:
        try:
            await exchange.leave()
        except UnavailableError as error:
            _log.info("this router's message stays until its lease is over", why=error.message)
        await redis.aclose()


def _tellable(totals: Totals) -> dict[str, float]:
    """Those that others read: a tenant's name may be of any length here."""
    return {account: total for account, total in totals.items() if len(account) <= _MOST_CHARS}


def _reply(answer: object) -> tuple[int, list[bytes]]:
    """What `exchange.lua` refused, and what it found.

    Raises:
        UnavailableError: This is not what it returns.
    """
    if isinstance(answer, list) and answer and isinstance(answer[0], int):
        fields = [field for field in answer[1:] if isinstance(field, bytes)]
        if len(fields) == len(answer) - 1:
            return answer[0], fields
    raise UnavailableError("Redis gave no answer that can be right")
