"""One HTTP request from the gate to its last byte: who sent it, what it may use, and what became of it.

The gate opens a visit and closes it (`router.openai.access`); the endpoints find it by `visit_of` and tell it what they
do on the tenant's account. What the visit has learned by its end settles the tenant's limits and stands in the audit log.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request
from starlette.types import Scope

from baton.errors import BatonError
from baton.generation import Prompt
from router.guardrails.ports import Ask
from router.limits.ports import GrantId, Levels, Limiter, LimitKind, Refused
from router.openai.limit_headers import refusal
from router.ports import GenerationRequest, Timing
from router.tenants.tenant import Caller, Tenant

MAX_EXPECTED_OUTPUT = 4096
"""Of what a sample may generate, no more is charged in advance: few outputs are longer, and the end settles it."""

_KEY = "baton.visit"


class Run(Protocol):
    """What a visit asks of a job that runs for it."""

    @property
    def job(self) -> GenerationRequest:
        """What is generated."""

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""

    @property
    def timing(self) -> Timing | None:
        """Where its time went, once it has ended."""


@dataclass(slots=True, eq=False, kw_only=True)
class Visit:
    """What is known of one request.

    Attributes:
        caller: Who sent it.
        name: The request id that the reply carries; the client's own if it gave one, so never a key to anything.
        limiter: Keeps the tenant's counts.
        grant: This request in those counts.
        arrived_s: When it came, on the router's clock.
        entered: It was counted, and has to be settled.
        levels: The tenant's limits as the last decision left them; what the reply's headers say.
        model: The name by which it asked for the model; empty until that is known.
        runs: The jobs that run for it.
        error: Why it failed, if it did.
        ask: What is asked, as the guardrails let it pass; None before that, and where there are none.
        keeps_content: Whether what is asked and answered is kept for the audit.
        asked: The body as it came; only where that is kept.
        answered: The text of each choice; only there too.
    """

    caller: Caller
    name: str
    limiter: Limiter
    grant: GrantId
    arrived_s: float = 0.0
    entered: bool = False
    levels: Levels = field(default_factory=Levels)
    model: str = ""
    runs: Sequence[Run] = ()
    error: BatonError | None = None
    ask: Ask | None = None
    keeps_content: bool = False
    asked: str = ""
    answered: dict[int, str] = field(default_factory=dict)

    @property
    def tenant(self) -> Tenant:
        """On whose account it is."""
        return self.caller.tenant

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all its prompts."""
        return sum(len(run.job.prompt.prompt_tokens) for run in self.runs)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(run.output_tokens for run in self.runs)

    @property
    def used_tokens(self) -> int:
        """What it is charged in the end: nothing if the cluster failed it before the first token."""
        if self.error is not None and not self.output_tokens:
            return 0
        return self.prompt_tokens + self.output_tokens

    def enter(self, scope: Scope) -> None:
        """Lets `visit_of` find it."""
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
            raise refusal(Refused(kind=LimitKind.TOKENS, retry_after_s=wait_s, levels=self.levels))

    async def generate(self, runs: Sequence[Run]) -> None:
        """Charges the tenant what `runs` are expected to use. Nothing may run before this.

        Raises:
            RateLimitedError: The tenant has not that much left.
        """
        self.runs = runs
        expected = sum(_expected_tokens(run.job.prompt) for run in runs)
        decision = await self.limiter.charge(self.tenant, self.grant, expected)
        self.levels = decision.levels
        if isinstance(decision, Refused):
            raise refusal(decision)


def visit_of(request: Request) -> Visit:
    """The visit that `request` belongs to. Every request past the gate has one; without it nobody is served."""
    visit: Visit = request.scope[_KEY]
    return visit


def note_error(scope: Scope, error: BatonError) -> None:
    """Tells the visit of `scope`, if there is one, why its request failed."""
    visit: Visit | None = scope.get(_KEY)
    if visit is not None:
        visit.error = error


def _expected_tokens(prompt: Prompt) -> int:
    expected = _charged_output(prompt.sampling.max_tokens)
    return len(prompt.prompt_tokens) + expected * len(prompt.samples)


def _charged_output(wanted: int | None) -> int:
    return MAX_EXPECTED_OUTPUT if wanted is None else min(wanted, MAX_EXPECTED_OUTPUT)
