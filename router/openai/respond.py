"""From running jobs to the HTTP reply, streamed or whole: what all endpoints that generate have in common."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import BatonError
from baton.telemetry.span_names import operation_of
from router.http.account import RequestAccount
from router.http.streaming import ClientGoneError, EventStream, while_connected
from router.openai.context import RequestContext
from router.openai.guardrails import checked_deltas
from router.openai.job_run import Delta, JobRun, merged, usage_of
from router.openai.replies import TimingReply, Usage
from router.openai.serving import Serving
from router.telemetry.explain import EXPLAIN_HEADER, EXPLANATION_HEADER, explanations_json
from router.telemetry.request_span import RequestSpan

TRACE_HEADER = "traceparent"
TIMING_HEADER = "x-baton-timing"
SESSION_HEADER = "x-baton-session"
MAX_SESSION_NAME = 256
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a reply that nobody waits for; it only shows in metrics."""


class ReplyWriter(Protocol):
    """How one endpoint writes what was generated."""

    def opening(self) -> bytes:
        """What a stream begins with; asked for when its first delta is there."""

    def piece(self, delta: Delta) -> bytes:
        """The event or events for one delta."""

    def closing(self, usage: Usage, timings: Sequence[TimingReply]) -> bytes:
        """What a stream ends with; there are timings only for who asked for them."""

    def fault(self, error: BatonError) -> bytes:
        """What a stream ends with that has begun and cannot go on."""

    def whole(
        self, choices: Sequence[Sequence[Delta]], usage: Usage, timings: Sequence[TimingReply]
    ) -> BaseModel:
        """The reply that is not streamed; `choices` holds the deltas of each, in order."""


async def respond(
    request: Request,
    context: RequestContext,
    runs: Sequence[JobRun],
    writer: ReplyWriter,
    *,
    stream: bool | None,
) -> Response:
    """Runs the jobs and replies in the way that the client asked for.

    Raises:
        RateLimitedError: The tenant has not enough tokens left.
    """
    serving, account = context.serving, context.account
    with serving.refusals_counted(account):
        await account.generate(runs)
    deltas = _deltas(runs)
    if serving.guards.active or account.keeps_content:
        deltas = checked_deltas(deltas, serving.guards, account)
    with_timing = request.headers.get(TIMING_HEADER) == "1"
    explained = account.tenant.admin and request.headers.get(EXPLAIN_HEADER) == "1"
    explain = partial(_explain, serving, runs) if explained else None
    for run in runs:
        run.arrived_s = account.arrived_s
        run.join_session(request.headers.get(SESSION_HEADER, "")[:MAX_SESSION_NAME])
        run.trace(_span(request, serving, account))
    if stream:
        pieces = _pieces(runs, deltas, writer, with_timing=with_timing, explain=explain)
        return EventStream(pieces, serving.metrics.client_gone, writer.fault)
    try:
        choices = await while_connected(
            request.receive, _collect(deltas), serving.metrics.client_gone
        )
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    reply = writer.whole(choices, usage_of(runs), _timings(runs) if with_timing else [])
    headers = {} if explain is None else {EXPLANATION_HEADER: explain().decode()}
    return Response(reply.model_dump_json(), headers=headers, media_type="application/json")


def _span(request: Request, serving: Serving, account: RequestAccount) -> RequestSpan:
    return RequestSpan(
        serving.tracer,
        operation=operation_of(request.scope["path"]),
        model=account.model,
        parent=request.headers.get(TRACE_HEADER, ""),
        arrived_s=account.arrived_s,
    )


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
    writer: ReplyWriter,
    *,
    with_timing: bool,
    explain: Callable[[], bytes] | None,
) -> AsyncGenerator[bytes, None]:
    head: bytes | None = None
    async with aclosing(deltas) as batches:
        async for batch in batches:
            if head is None:
                head = writer.opening()
            yield head + b"".join([writer.piece(delta) for delta in batch])
            head = b""
    comment = b"" if explain is None else b": baton-explain " + explain() + b"\n\n"
    yield comment + writer.closing(usage_of(runs), _timings(runs) if with_timing else [])


def _explain(serving: Serving, runs: Sequence[JobRun]) -> bytes:
    return explanations_json(serving.decisions, [run.job.request_id for run in runs])


def _deltas(runs: Sequence[JobRun]) -> AsyncGenerator[list[Delta], None]:
    return runs[0].deltas() if len(runs) == 1 else merged([run.deltas() for run in runs])


def _timings(runs: Sequence[JobRun]) -> list[TimingReply]:
    return [TimingReply(**asdict(run.timing)) for run in runs if run.timing is not None]
