"""What the endpoints share, handed to each of them, and the checks that each begins with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.clock import Clock, MonotonicClock
from baton.errors import ModelNotFoundError, OverloadedError, UnavailableError
from baton.telemetry.tracing import NotTraced, Tracer
from router.guardrails.chain import GuardChain
from router.http.account import RequestAccount
from router.openai.sampling import SamplingDefaults
from router.ports import Generator, ServedModel
from router.routing.explanation import DecisionLog
from router.slo import SloBook
from router.telemetry.metrics import RouterMetrics
from router.tenants.tenant import Tenant
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One served model and everything that answers for it.

    Attributes:
        model_names: Names that clients may use; the first is the model's own.
        created_s: When serving began, Unix time; shown with the model.
        generator: Makes tokens.
        tokenizer: The model's.
        defaults: How tokens are drawn where a request says nothing.
        metrics: The router's.
        clock: Measures what clients wait for.
        max_body_bytes: Larger bodies get 413.
        request_timeout_s: Deadline of a request.
        slo_book: The classes of service.
        revision: The model's commit, if it has one.
        guards: The operator's checks of what is asked and answered.
        decisions: What routing remembers of the last requests.
        tracer: Takes the spans of requests.
    """

    model_names: tuple[str, ...]
    created_s: int
    generator: Generator
    tokenizer: Tokenizer
    defaults: SamplingDefaults
    metrics: RouterMetrics
    clock: Clock = field(default_factory=MonotonicClock)
    max_body_bytes: int
    request_timeout_s: float
    slo_book: SloBook
    revision: str | None = None
    guards: GuardChain = field(default_factory=GuardChain)
    decisions: DecisionLog = field(default_factory=lambda: DecisionLog(""))
    tracer: Tracer = field(default_factory=NotTraced)

    def names_for(self, tenant: Tenant) -> tuple[str, ...]:
        """The names that `tenant` may use."""
        return tuple(name for name in self.model_names if tenant.may_use(name))

    def require_name(self, model: str | None, account: RequestAccount) -> str:
        """The name, if it is served, and to this tenant. One that is not on its list does not exist for it.

        Raises:
            ModelNotFoundError: It is missing or unknown.
        """
        if model is None:
            raise ModelNotFoundError("The request names no model.", param="model")
        if model not in self.names_for(account.tenant):
            raise ModelNotFoundError(f"The model `{model[:200]}` does not exist.", param="model")
        account.model = model
        return model

    @contextmanager
    def refusals_counted(self, account: RequestAccount) -> Iterator[None]:
        """Counts a refusal that is raised inside."""
        try:
            yield
        except OverloadedError as error:
            self.metrics.rejected(account.tenant.tenant_class, error.reason)
            raise

    async def require_model(self) -> ServedModel:
        """What the workers hold. A router that has just started waits for the first of them.

        Raises:
            UnavailableError: None has said so in time.
        """
        model = await self.generator.model(wait=True)
        if model is None:
            raise UnavailableError("No worker is ready yet.")
        return model
