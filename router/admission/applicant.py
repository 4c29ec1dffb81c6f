"""A job that asks to be let in, as far as admission needs to know it."""

from dataclasses import dataclass

from baton.ids import RequestId
from router.slo import Slo
from router.tenants.tenant import Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Applicant:
    """One job in line, or about to be.

    Attributes:
        request_id: Its name.
        tenant: Whose it is. All requests of one tenant wait in one line, first come first served.
        slo: What it was promised, and so how urgent it is.
        prompt_tokens: Length of its prompt.
        output_tokens: What it is expected to generate, over all samples.
        samples: Sequences that it will decode.
        arrived_s: When it came.
        deadline_s: When nobody wants it any more, on the same clock.
    """

    request_id: RequestId
    tenant: Tenant
    slo: Slo
    prompt_tokens: int
    output_tokens: int
    samples: int
    arrived_s: float
    deadline_s: float

    @property
    def cost(self) -> int:
        """What it takes of its tenant's share, in tokens."""
        return self.prompt_tokens + self.output_tokens
