"""From running jobs to the HTTP reply, streamed or whole: what chat and plain completions have in common."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from baton.ids import RequestId
from router.openai.choices import Delta
from router.openai.connection import ClientGoneError, EventStream, while_connected
from router.openai.guarding import watched
from router.openai.jobs import JobRun, merged, usage_of
from router.openai.replies import TimingReply, Usage
from router.openai.requests import GenerationBody
from router.openai.serving import Serving
from router.openai.visit import visit_of

TIMING_HEADER = "x-baton-timing"
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a reply that nobody waits for; it only shows in metrics."""


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


class ReplyShape(Protocol):
    """How one endpoint writes what was generated."""

    def opening(self) -> bytes:
        """What a stream begins with."""

    def piece(self, delta: Delta) -> bytes:
        """The event or events for one delta."""

    def usage_piece(self, usage: Usage) -> bytes:
        """The event that ends a stream whose client asked for usage."""

    def whole(
        self, choices: Sequence[Sequence[Delta]], usage: Usage, timings: Sequence[TimingReply]
    ) -> BaseModel:
        """The reply that is not streamed; `choices` holds the deltas of each, in order."""


async def answer(
    request: Request,
    serving: Serving,
    body: GenerationBody,
    runs: Sequence[JobRun],
    shape: ReplyShape,
) -> Response:
    """Runs the jobs and replies in the way that the client asked for.

    Raises:
        RateLimitedError: The tenant has not enough tokens left.
    """
    visit = visit_of(request)
    await visit.generate(runs)
    deltas = watched(_deltas(runs), serving.guards, visit)
    with_timing = request.headers.get(TIMING_HEADER) == "1"
    if body.stream:
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        pieces = _pieces(runs, deltas, shape, with_usage=with_usage, with_timing=with_timing)
        return EventStream(pieces, serving.metrics.client_gone)
    try:
        choices = await while_connected(
            request.receive, _collect(deltas), serving.metrics.client_gone
        )
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    timings = _timings(runs) if with_timing else []
    reply = shape.whole(choices, usage_of(runs), timings)
    left_out: dict[str, Any] = {} if with_timing else {"baton": True}
    if not body.return_token_ids:
        left_out["choices"] = {"__all__": {"token_ids"}}
    return Response(reply.model_dump_json(exclude=left_out), media_type="application/json")


def token_ids(deltas: Sequence[Delta]) -> list[int]:
    """Ids of all tokens of one choice, those without visible text included."""
    return [token for delta in deltas for token in delta.tokens]


def token_ids_field(delta: Delta) -> bytes:
    """The member that a streamed choice ends with when its client asked for token ids."""
    return b',"token_ids":' + msgspec.json.encode(delta.tokens)


async def _collect(deltas: AsyncGenerator[list[Delta], None]) -> list[list[Delta]]:
    by_choice = defaultdict[int, list[Delta]](list)
    async with aclosing(deltas) as batches:
        async for batch in batches:
            for delta in batch:
                by_choice[delta.index].append(delta)
    return [by_choice[index] for index in sorted(by_choice)]


async def _pieces(
    runs: Sequence[JobRun],
    deltas: AsyncGenerator[list[Delta], None],
    shape: ReplyShape,
    *,
    with_usage: bool,
    with_timing: bool,
) -> AsyncGenerator[bytes, None]:
    head = shape.opening()
    async with aclosing(deltas) as batches:
        async for batch in batches:
            yield head + b"".join(map(shape.piece, batch))
            head = b""
    tail = shape.usage_piece(usage_of(runs)) if with_usage else b""
    for timing in _timings(runs) if with_timing else ():
        tail += b": baton " + msgspec.json.encode(timing.model_dump()) + b"\n\n"
    yield tail + b"data: [DONE]\n\n"


def _deltas(runs: Sequence[JobRun]) -> AsyncGenerator[list[Delta], None]:
    return runs[0].deltas() if len(runs) == 1 else merged([run.deltas() for run in runs])


def _timings(runs: Sequence[JobRun]) -> list[TimingReply]:
    return [TimingReply(**asdict(run.timing)) for run in runs if run.timing is not None]
