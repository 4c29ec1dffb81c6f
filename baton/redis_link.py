"""The one place where Redis is opened, which is optional: limits and tenants that several routers share,
the pool's directory.

Redis is asked on the way of requests, so it is asked not for long, and again only where the connection was lost, as
when it was restarted, or leads to a server that is the master no more: each caller has a fallback for when there is no
reply. Needs the `redis` extra.

Redis is a hint, and may hold anything. Replies are bytes; each reader parses them strictly, passes over what is not
right and tells `RefusedValues` of it. What would make a process connect somewhere,
drop something or let somebody in is sealed (`baton.seal`).
"""

import asyncio
import importlib
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, Counter

from baton.clock import Clock, MonotonicClock
from baton.errors import ConfigError, UnavailableError
from baton.telemetry.logs import get_logger

if TYPE_CHECKING:
    from redis.asyncio import Redis

_MOST_CONNECTIONS = 32
"""Of a client. One loop asks, so more do not make it quicker, and each has to be opened first."""

_QUIET_S = 60.0
"""A reader that refused nothing for so long is said to be in order again."""

_NO_REPLY = (ValueError, TypeError, IndexError)
"""What redis-py's parsers raise for bytes that are no reply; it closes the connection then."""

_Reply = TypeVar("_Reply")
_log = get_logger(__name__)


def open_redis(url: str, timeout_s: float, *, setting: str = "tenants.redis_url") -> "Redis":
    """A client that connects when it is first asked, and after a fault again. Its replies are bytes.

    Args:
        url: `redis://`, `rediss://` (TLS) or `unix://`, with user and password if there are.
        timeout_s: How long to wait while all connections are in use, for a new one, and for a reply.
        setting: Where the URL was given.

    Raises:
        ConfigError: redis-py is not installed, or the URL is none of these.
    """
    try:
        library: Any = importlib.import_module("redis.asyncio")
    except ImportError as error:
        raise ConfigError(
            "sharing through Redis needs: pip install 'baton-serve[redis]'"
        ) from error
    retry = importlib.import_module("redis.asyncio.retry")
    backoff = importlib.import_module("redis.backoff")
    faults = importlib.import_module("redis.exceptions")
    # After either it connects anew: a name may lead to another server by now.
    elsewhere = (faults.ConnectionError, faults.ReadOnlyError)
    try:
        pool = library.BlockingConnectionPool.from_url(
            url,
            max_connections=_MOST_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=retry.Retry(backoff.NoBackoff(), 1, supported_errors=elsewhere),
        )
    except ValueError:
        # The URL may hold a password, and so may the text of the error.
        raise ConfigError(
            f"{setting}: must begin with redis://, rediss:// or unix://", param=setting
        ) from None
    client: Redis = library.Redis.from_pool(pool)
    return client


async def asked(reply: Awaitable[_Reply]) -> _Reply:
    """The reply; for a task. A task that is cancelled meanwhile is, whatever has come of the question.

    Raises:
        UnavailableError: There is none: Redis is away, slow, refuses, or says what is no reply.
    """
    faults = importlib.import_module("redis.exceptions")
    task = asyncio.current_task()
    assert task is not None
    cancelled = task.cancelling()
    try:
        return await reply
    except (faults.RedisError, OSError, TimeoutError, *_NO_REPLY) as error:
        raise UnavailableError(f"Redis gave no answer: {type(error).__name__}") from error
    finally:
        # redis-py sends under `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes as the bytes
        # have just been sent: a task that asks in a loop would never end.
        if task.cancelling() > cancelled:
            raise asyncio.CancelledError


class RefusedValues:
    """Counts what readers of Redis refused, and logs once when that begins and once when it is over.

    Args:
        registry: Of the process.
        clock: Monotonic.
    """

    def __init__(self, registry: CollectorRegistry, clock: Clock | None = None) -> None:
        self._refused = Counter(
            "baton_redis_refused_values",
            "Values read from Redis that were malformed, not sealed or not plausible, and passed over.",
            ["reader"],
            registry=registry,
        )
        self._clock = clock or MonotonicClock()
        self._last_s: dict[str, float] = {}
        """Of the readers that refused something of late."""

    def note(self, reader: str, faults: Sequence[str]) -> None:
        """What one look of a reader refused, in a few words each; empty where all was in order.

        Args:
            reader: A constant: it is a metric's label.
            faults: None of what was read stands in them.
        """
        now_s = self._clock.now_s()
        if faults:
            self._refused.labels(reader).inc(len(faults))
            if reader not in self._last_s:
                _log.warning("values in Redis are refused", reader=reader, why=faults[0])
            self._last_s[reader] = now_s
        elif reader in self._last_s and now_s - self._last_s[reader] >= _QUIET_S:
            del self._last_s[reader]
            _log.info("values in Redis are in order again", reader=reader)
