"""How clients are told of their limits: OpenAI's `x-ratelimit-*` headers, and the error of a request beyond them."""

from collections.abc import Iterator
from math import ceil, floor

from baton.errors import RateLimitedError
from router.limits.ports import Level, Levels, LimitKind, Refused

_EXHAUSTED = {
    LimitKind.REQUESTS: "requests per minute",
    LimitKind.TOKENS: "tokens per minute",
    LimitKind.CONCURRENCY: "requests in flight",
}


def limit_headers(levels: Levels) -> Iterator[tuple[str, str]]:
    """One header per fact; none for what is not limited."""
    for name, level in (("requests", levels.requests), ("tokens", levels.tokens)):
        if level is not None:
            yield from _of_one(name, level)


def refusal(refused: Refused) -> RateLimitedError:
    """The error of a request that was refused."""
    wait_s = ceil(refused.retry_after_s)
    return RateLimitedError(
        f"Rate limit reached for {_EXHAUSTED[refused.kind]}. Try again in {wait_s} s.",
        retry_after_s=refused.retry_after_s,
        reason=f"limit_{refused.kind.value}",
    )


def _of_one(name: str, level: Level) -> Iterator[tuple[str, str]]:
    yield f"x-ratelimit-limit-{name}", str(floor(level.limit))
    yield f"x-ratelimit-remaining-{name}", str(max(0, floor(level.remaining)))
    yield f"x-ratelimit-reset-{name}", _duration(level.reset_s)


def _duration(seconds: float) -> str:
    """As OpenAI writes it: `20ms`, `1s`, `6m0s`."""
    if seconds < 1:
        return f"{ceil(seconds * 1000)}ms"
    whole = ceil(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60}s"
