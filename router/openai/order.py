"""A request that may be worked on: its body is read, its tenant may use the model it names, and workers hold that model.

Every endpoint that generates takes an order, makes token ids of what it was sent, plans jobs for them (`router.openai.plan`)
and answers with what they draw (`router.openai.answer`).
"""

import time
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from baton.ids import RequestId, new_request_id
from router.openai.requests import DrawingBody
from router.openai.sampling import TokenLimit
from router.openai.serving import Serving
from router.openai.visit import Visit, visit_of
from router.ports import ServedModel
from router.slo import Slo
from router.tenants.tenant import Tenant

_BYTES_PER_TOKEN = 4
"""In a body, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """What every reply and every chunk of one request repeats."""

    request_id: RequestId
    created: int
    model: str

    def as_json(self, kind: str) -> bytes:
        """The beginning of an event's JSON object, up to and without its `choices`."""
        fields = {"id": self.request_id, "object": kind, "created": self.created}
        return b"data: " + msgspec.json.encode(fields | {"model": self.model})[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One request, and what working on it takes.

    Attributes:
        serving: What all requests share.
        visit: The request's own account.
        head: What its reply is called.
        slo: The class that it is served in.
        model: What the workers hold.
    """

    serving: Serving
    visit: Visit
    head: ReplyHead
    slo: Slo
    model: ServedModel

    @property
    def tenant(self) -> Tenant:
        """Who pays."""
        return self.visit.tenant


async def take_order(
    request: Request, serving: Serving, body: DrawingBody, limit: TokenLimit, kind: str
) -> Order:
    """The order of a request, whose reply's id begins with `kind`. What can be refused without looking at the prompt is
    refused here, before it costs anything.

    Raises:
        ModelNotFoundError: The model is not named, unknown, or not for this tenant.
        InvalidRequestError: The tier is not for this tenant.
        RateLimitedError: The tenant has no tokens left.
        OverloadedError: Too many are waiting.
        UnavailableError: No worker has said in time what it holds, or the router stops.
    """
    visit = visit_of(request)
    name = serving.require_name(body.model, visit)
    slo = serving.slo_book.chosen(
        visit.tenant.slo_class, service_tier=body.service_tier, priority=body.priority or 0
    )
    with serving.refusals_counted(visit):
        visit.require_tokens(_prompt_tokens(request), limit.wanted)
        serving.generator.check_capacity(visit.tenant, slo)
    head = ReplyHead(request_id=new_request_id(kind), created=int(time.time()), model=name)
    model = await serving.require_model()
    return Order(serving=serving, visit=visit, head=head, slo=slo, model=model)


def _prompt_tokens(request: Request) -> int:
    """About so many tokens the prompt has, by the length of the body."""
    length = request.headers.get("content-length", "")
    return int(length) // _BYTES_PER_TOKEN if length.isdecimal() else 1
