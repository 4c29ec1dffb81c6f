"""One request's account: the tenant that pays for it, what the tenant's limits leave it, and what it used.

`RateLimiter` opens an account for every HTTP request that passes `router.http.auth` and settles it when the request
ends. Endpoints find it with `account_of`. What it holds at the end settles the tenant's limits and is written to the
audit log.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import count
from math import ceil, floor
from typing import Protocol

from starlette.requests import Request
from starlette.types import Scope

from baton.clock import Clock
from baton.errors import BatonError, RateLimitedError
from baton.generation import Prompt
from router.guardrails.ports import GuardrailInput
from router.limits.ports import GrantId, Level, Levels, Limiter, LimitKind, LimitRefused
from router.ports import GenerationRequest, Timing
from router.telemetry.metrics import RouterMetrics
from router.tenants.breakers import TenantBreakers
from router.tenants.tenant import Caller, Tenant

MAX_EXPECTED_OUTPUT = 4096
"""Of what a sample may generate, no more is charged in advance: few outputs are longer, and the end settles it."""

_KEY = "baton.account"


class Run(Protocol):
    """What an account reads of a generation that runs for it."""

    @property
    def request(self) -> GenerationRequest:
        """What is generated."""

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""

    @property
    def timing(self) -> Timing | None:
        """Where its time went, once it has ended."""


@dataclass(slots=True, eq=False, kw_only=True)
class RequestAccount:
    """What is known of one request.

    Attributes:
        caller: The tenant and key that sent it.
        name: The request id that the reply carries; the client's own if it gave one, so never a key to anything.
        limiter: Keeps the tenant's counts.
        grant: This request in those counts.
        arrived_s: When it came, on the router's clock.
        body_read_s: When its body had come, which is as long as its client took to send it; until then `arrived_s`.
        counted: It was counted, and has to be settled.
        levels: The tenant's limits as the last decision left them; what the reply's headers say.
        model: The name by which it asked for the model; empty until that is known.
        ignored_fields: What it was sent with that has no effect; its client is told the names.
        runs: What is generated for it.
        error: Why it failed, if it did.
        guarded_input: What is asked, as the guardrails let it pass; None before that, and where there are none.
        keeps_content: Whether what is asked and answered is kept for the audit.
        asked: The body as it came; only where that is kept.
        answered: The text of each choice; only there too.
    """

    caller: Caller
    name: str
    limiter: Limiter
    grant: GrantId
    arrived_s: float = 0.0
    body_read_s: float = 0.0
    counted: bool = False
    levels: Levels = field(default_factory=Levels)
    model: str = ""
    ignored_fields: Sequence[str] = ()
    runs: Sequence[Run] = ()
    error: BatonError | None = None
    guarded_input: GuardrailInput | None = None
    keeps_content: bool = False
    asked: str = ""
    answered: dict[int, StringIO] = field(default_factory=dict)

    @property
    def tenant(self) -> Tenant:
        """The tenant that pays."""
        return self.caller.tenant

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all its prompts."""
        return sum(len(run.request.prompt.prompt_tokens) for run in self.runs)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(run.output_tokens for run in self.runs)

    @property
    def is_served(self) -> bool:
        """Whether all that is generated for it came to its end: a request that asked no worker, or whose client left, says
        nothing of how they fare.
        """
        return bool(self.runs) and all(run.timing is not None for run in self.runs)

    @property
    def used_tokens(self) -> int:
        """What it is charged in the end: nothing if the cluster failed it before the first token."""
        if self.error is not None and not self.output_tokens:
            return 0
        return self.prompt_tokens + self.output_tokens

    def bind(self, scope: Scope) -> None:
        """Lets `account_of` find it."""
        scope[_KEY] = self

    def require_tokens(self, prompt_tokens: int, output_tokens: int | None) -> None:
        """Whether the tenant has any tokens left, asked before it is known how many are needed.

        Args:
            prompt_tokens: About so many in the prompt; the time to wait goes by these.
            output_tokens: So many are wanted, if that is said.

        Raises:
            RateLimitedError: None is left.
        """
        level = self.levels.tokens
        if level is not None and level.remaining < 1:
            wait_s = level.wait_s(prompt_tokens + _charged_output(output_tokens))
            raise refusal(
                LimitRefused(kind=LimitKind.TOKENS, retry_after_s=wait_s, levels=self.levels)
            )

    async def charge(self, runs: Sequence[Run]) -> None:
        """Charges the tenant what `runs` are expected to use. Nothing may run before this.

        Raises:
            RateLimitedError: The tenant has not that much left.
        """
        self.runs = runs
        expected = sum(_expected_tokens(run.request.prompt) for run in runs)
        decision = await self.limiter.charge(self.tenant, self.grant, expected)
        self.levels = decision.levels
        if isinstance(decision, LimitRefused):
            raise refusal(decision)


def account_of(request: Request) -> RequestAccount:
    """The account of `request`. Every request that passes the authorisation has one; without it nothing is served."""
    account: RequestAccount = request.scope[_KEY]
    return account


def note_error(scope: Scope, error: BatonError) -> None:
    """Notes in the account of `scope`, if there is one, why its request failed."""
    account: RequestAccount | None = scope.get(_KEY)
    if account is not None:
        account.error = error


def _expected_tokens(prompt: Prompt) -> int:
    expected = _charged_output(prompt.sampling.max_tokens)
    return len(prompt.prompt_tokens) + expected * len(prompt.samples)


def _charged_output(wanted: int | None) -> int:
    return MAX_EXPECTED_OUTPUT if wanted is None else min(wanted, MAX_EXPECTED_OUTPUT)


class RateLimiter:
    """Opens an account for every authorised request, counts the request against its tenant's limits,
    and settles it at the end.

    Args:
        limiter: Keeps the tenants' counts.
        breakers: Slow the tenants whose requests break workers.
        clock: The breakers'.
        metrics: Counts what is refused.
        keep_content: Whether every tenant's content is kept for the audit;
            tenants that ask for it have theirs kept anyway.
    """

    def __init__(
        self,
        limiter: Limiter,
        breakers: TenantBreakers,
        clock: Clock,
        metrics: RouterMetrics,
        *,
        keep_content: bool = False,
    ) -> None:
        self._limiter = limiter
        self._keep_content = keep_content
        self._breakers = breakers
        self._clock = clock
        self._metrics = metrics
        self._router = secrets.token_hex(8)
        self._numbers = count()

    def open(self, caller: Caller, name: str) -> RequestAccount:
        """The account of a request of `caller`; nothing is counted yet."""
        grant = GrantId(f"{self._router}-{next(self._numbers)}")
        now_s = self._clock.now_s()
        return RequestAccount(
            caller=caller,
            name=name,
            limiter=self._limiter,
            grant=grant,
            arrived_s=now_s,
            body_read_s=now_s,
            keeps_content=self._keep_content or caller.tenant.audit_content,
        )

    async def count(self, account: RequestAccount) -> None:
        """Counts the request. `settle` must follow.

        Raises:
            RateLimitedError: Its tenant has to wait.
        """
        try:
            self._check_breaker(account)
            await self._enter(account)
        except RateLimitedError as error:
            self._metrics.rejected(account.tenant.tenant_class, error.reason)
            raise
        account.counted = True

    async def settle(self, account: RequestAccount) -> None:
        """Gives back what the request was charged too much."""
        if not account.counted:
            return
        tenant_id, now_s = account.tenant.tenant_id, self._clock.now_s()
        self._breakers.finished(tenant_id, account.error, now_s, served=account.is_served)
        await self._limiter.leave(account.tenant, account.grant, account.used_tokens)

    async def _enter(self, account: RequestAccount) -> None:
        tenant_id = account.tenant.tenant_id
        # Before anything is waited for: of a slowed tenant's requests that come together one is the trial.
        self._breakers.started(tenant_id, self._clock.now_s())
        try:
            decision = await self._limiter.enter(account.tenant, account.grant)
            account.levels = decision.levels
            if isinstance(decision, LimitRefused):
                raise refusal(decision)
        except BaseException:
            self._breakers.finished(tenant_id, None, self._clock.now_s(), served=False)
            raise

    def _check_breaker(self, account: RequestAccount) -> None:
        wait_s = self._breakers.wait_s(account.tenant.tenant_id, self._clock.now_s())
        if wait_s > 0:
            raise RateLimitedError(
                "Requests of this tenant keep failing workers; it is slowed for a while.",
                retry_after_s=wait_s,
                reason="tenant_circuit",
            )


def is_limited(method: str) -> bool:
    """Whether requests of this method count against the limits: those that make work."""
    return method == "POST"


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


def refusal(refused: LimitRefused) -> RateLimitedError:
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
