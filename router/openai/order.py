"""A request that may be worked on: its body is read, its tenant may use the model it names, and workers hold that model.

Every endpoint that generates takes an order, makes token ids of what it was sent, plans jobs for them (`router.openai.plan`)
and answers with what they draw (`router.openai.answer`).
"""

import time
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from baton.ids import RequestId, new_request_id
from router.openai.serving import Serving
from router.openai.visit import Visit, visit_of
from router.ports import ServedModel
from router.tenants.tenant import Tenant


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
        model: What the workers hold.
    """

    serving: Serving
    visit: Visit
    head: ReplyHead
    model: ServedModel

    @property
    def tenant(self) -> Tenant:
        """Who pays."""
        return self.visit.tenant


async def take_order(
    request: Request, serving: Serving, model_name: str | None, kind: str
) -> Order:
    """The order of a request for `model_name`, whose reply's id begins with `kind`.

    Raises:
        ModelNotFoundError: The model is not named, unknown, or not for this tenant.
        UnavailableError: No worker has said in time what it holds.
    """
    visit = visit_of(request)
    head = ReplyHead(
        request_id=new_request_id(kind),
        created=int(time.time()),
        model=serving.require_name(model_name, visit),
    )
    return Order(serving=serving, visit=visit, head=head, model=await serving.require_model())
