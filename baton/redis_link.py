"""The one place where Redis is opened, which is optional: limits and tenants that several routers share, the pool's directory.

Redis is asked on the way of requests, so it is asked not for long, and again only where the connection was lost, as when
it was restarted: each caller has a fallback for when there is no reply. Needs the `redis` extra.
"""

import asyncio
import importlib
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from baton.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from redis.asyncio import Redis

_Reply = TypeVar("_Reply")


def open_redis(
    url: str, timeout_s: float, *, setting: str = "tenants.redis_url", text: bool = True
) -> "Redis":
    """A client that connects when it is first asked, and after a fault again.

    Args:
        url: `redis://`, `rediss://` (TLS) or `unix://`, with user and password if there are.
        timeout_s: How long to wait for a connection, and for a reply.
        setting: Where the URL was given.
        text: Whether replies are text; bytes otherwise.

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
    lost = importlib.import_module("redis.exceptions").ConnectionError
    try:
        client: Redis = library.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=retry.Retry(backoff.NoBackoff(), 1, supported_errors=(lost,)),
            decode_responses=text,
        )
    except ValueError:
        # The URL may hold a password, and so may the text of the error.
        raise ConfigError(
            f"{setting}: must begin with redis://, rediss:// or unix://", param=setting
        ) from None
    return client


async def asked(reply: Awaitable[_Reply]) -> _Reply:
    """The reply; for a task. A task that is cancelled meanwhile is, whatever has come of the question.

    Raises:
        UnavailableError: There is none: Redis is away, slow, or refuses.
    """
    faults = importlib.import_module("redis.exceptions")
    task = asyncio.current_task()
    assert task is not None
    cancelled = task.cancelling()
    try:
        return await reply
    except (faults.RedisError, OSError, TimeoutError) as error:
        raise UnavailableError(f"Redis gave no answer: {type(error).__name__}") from error
    finally:
        # redis-py sends under `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes as the bytes have just
        # been sent: a task that asks in a loop would never end.
        if task.cancelling() > cancelled:
            raise asyncio.CancelledError
