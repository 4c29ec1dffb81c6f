"""What the tests of admission share: queued requests, and workers that take so many at a time."""

from dataclasses import dataclass, field

from baton.generation import Prompt, SamplingParams
from baton.ids import RequestId
from router.ports import GenerationRequest
from router.routing.view import WorkerView
from router.slo import STANDARD, Slo
from router.tenants.tenant import Tenant, TenantId


def queued(
    name: str,
    *,
    tenant: str = "a",
    weight: float = 1.0,
    prompt_tokens: int = 90,
    output_tokens: int = 10,
    samples: int = 1,
    slo: Slo = STANDARD,
    arrived_s: float = 0.0,
    deadline_s: float = 1e9,
) -> GenerationRequest:
    """One that costs 100 tokens unless told otherwise."""
    return GenerationRequest(
        request_id=RequestId(name),
        tenant=Tenant(tenant_id=TenantId(tenant), weight=weight),
        prompt=Prompt(
            prompt_tokens=(0,) * prompt_tokens,
            samples=tuple(range(samples)),
            sampling=SamplingParams(),
        ),
        timeout_s=deadline_s - arrived_s,
        slo=slo,
        arrived_s=arrived_s,
        expected_tokens=output_tokens,
    )


@dataclass(eq=False)
class FakeCapacity:
    """Workers with so many places."""

    places: int = 0
    first_s: float = 0.0
    workers: bool = True
    taken: list[RequestId] = field(default_factory=list)

    def has_room(self, queued: GenerationRequest, now_s: float) -> bool:
        return self.workers and len(self.taken) < self.places

    def has_workers(self, now_s: float) -> bool:
        return self.workers

    def first_token_s(self, queued: GenerationRequest, now_s: float) -> float:
        return self.first_s


class UnknownSpeed:
    """Knows nothing of any worker."""

    def step_s(self, worker: WorkerView, sequences: int, context_tokens: int) -> float | None:
        return None

    def queue_s(self, worker: WorkerView, now_s: float) -> float | None:
        return None

    def first_token_s(self, worker: WorkerView, prompt_tokens: int) -> float | None:
        return None
