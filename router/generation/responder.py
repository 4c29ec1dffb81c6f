"""From what was planned to the HTTP reply, streamed or whole: what all endpoints that generate have in common."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from baton.clock import Clock
from baton.errors import BatonError
from baton.telemetry.span_names import operation_of
from baton.telemetry.tracing import Tracer
from router.generation.generation_run import (
    UNMARKED,
    Choice,
    Delta,
    GenerationRun,
    MarkedTokens,
    keep,
    merged,
)
from router.generation.guardrails import checked_deltas
from router.generation.sampling import SamplingBody
from router.guardrails.chain import GuardChain
from router.http.account import RequestAccount
from router.http.streaming import (
    EventStream,
    json_reply,
    one_line_each,
    portions,
    while_connected,
)
from router.parsing.output_format import OutputFormat
from router.ports import GenerationRequest, Generator, Timing
from router.routing.explanation import DecisionLog
from router.telemetry.explain import EXPLAIN_HEADER, EXPLANATION_HEADER, explanations_json
from router.telemetry.metrics import RouterMetrics
from router.telemetry.request_span import RequestSpan
from router.text.stop_strings import StopStrings
from router.text.tokenizer import Tokenizer

TRACE_HEADER = "traceparent"
TIMING_HEADER = "x-baton-timing"
SESSION_HEADER = "x-baton-session"
MAX_SESSION_NAME = 256
_LOGGED_AT_ONCE = 16
"""Tokens with log-probabilities, each perhaps with those of twenty others,
that are written before the event loop runs again.
"""


class ReplyWriter(Protocol):
    """How one endpoint writes what was generated.

    Attributes:
        keep_alive: The event of a stream that says nothing, while there is nothing to say.
    """

    keep_alive: bytes

    def opening(self) -> bytes:
        """What a stream begins with; asked for when its first delta is there."""

    async def before(self, deltas: Sequence[Delta]) -> None:
        """Writes in advance, with turns for others, what the pieces of these deltas hold of their prompts, or of
        log-probabilities, which these then no longer have.
        """

    def piece(self, delta: Delta) -> bytes:
        """The event or events for one delta."""

    async def closing(self, timings: Sequence[Timing]) -> list[bytes]:
        """What a stream ends with, in pieces; there are timings only where the client asked for them."""

    def fault(self, error: BatonError) -> bytes:
        """What a stream ends with that has begun and cannot go on."""

    async def whole(
        self, choices: Sequence[Sequence[Delta]], timings: Sequence[Timing]
    ) -> list[bytes]:
        """The JSON of the reply that is not streamed, in pieces, written with turns for others; `choices` holds the
        deltas of each, in order, and their log-probabilities only until they are written.
        """


class Responder:
    """Runs what was planned for a request, and replies in the way that its client asked for.

    Args:
        generator: Generates.
        tokenizer: Makes text of tokens.
        metrics: Counts what clients get.
        clock: Measures what they wait for.
        guards: The operator's checks of what is answered.
        decisions: What routing remembers of the last requests, shown to admins.
        tracer: Takes the spans of requests.
        output_format: How the model writes calls and reasoning.
        sse_keep_alive_s: A stream on which nothing was sent for so long is sent what keeps its connection open.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        clock: Clock,
        guards: GuardChain,
        decisions: DecisionLog,
        tracer: Tracer,
        output_format: OutputFormat,
        *,
        sse_keep_alive_s: float,
    ) -> None:
        self._sse_keep_alive_s = sse_keep_alive_s
        self._output_format = output_format
        self._generator = generator
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._guards = guards
        self._decisions = decisions
        self._tracer = tracer

    def runs(
        self,
        body: SamplingBody,
        requests: Sequence[GenerationRequest],
        *,
        in_reasoning: bool = False,
    ) -> list[GenerationRun]:
        """A run for each of a request's generation requests, with the choices numbered as OpenAI does: all of the first
        prompt, then the next. Nothing runs yet. `in_reasoning` says that the prompt ends within reasoning.
        """
        stops = StopStrings(body.stops) if body.stops else None
        reads = self._reads(body, in_reasoning=in_reasoning)
        return [
            GenerationRun(
                request,
                self._choices(body, stops, request, number, reads),
                self._generator,
                self._metrics,
                self._clock,
            )
            for number, request in enumerate(requests)
        ]

    def _choices(
        self,
        body: SamplingBody,
        stops: StopStrings | None,
        request: GenerationRequest,
        number: int,
        reads: MarkedTokens,
    ) -> dict[int, Choice]:
        samples = request.prompt.samples
        skip_special = body.skip_special_tokens is not False
        return {
            sample: Choice(
                number * len(samples) + place,
                self._tokenizer.decoder(skip_special=skip_special),
                body,
                stops,
                reads,
            )
            for place, sample in enumerate(samples)
        }

    def _reads(self, body: SamplingBody, *, in_reasoning: bool) -> MarkedTokens:
        """Marks are read where replies tell them apart. Guardrails change texts,
        so behind them marks are looked for in the text.
        """
        found = self._output_format
        if not body.tells_reasoning:
            return UNMARKED
        return MarkedTokens(
            texts={token: mark for mark, token in found.marker_ids.items()},
            reasoning_begin=found.reasoning_begin if found.reasoning_ends else (),
            reasoning_ends=found.reasoning_ends,
            in_reasoning=in_reasoning,
        )

    async def respond(
        self,
        request: Request,
        account: RequestAccount,
        runs: Sequence[GenerationRun],
        writer: ReplyWriter,
        *,
        stream: bool | None,
    ) -> Response:
        """The reply of `runs`, which begin now; a stream goes on after this returns.

        Raises:
            OverloadedError: It was refused; that is counted here, once for all runs.
            RateLimitedError: The tenant has not enough tokens left.
            ClientGoneError: The client went away before a reply that is not streamed was there.
        """
        refusals = partial(self._metrics.counting_refusals, account.tenant.tenant_class)
        with refusals():
            await account.charge(runs)
        deltas = _deltas(runs)
        if self._guards.active or account.keeps_content:
            deltas = checked_deltas(deltas, self._guards, account)
        with_timing = request.headers.get(TIMING_HEADER) == "1"
        explained = account.tenant.admin and request.headers.get(EXPLAIN_HEADER) == "1"
        explain = partial(self._explain, runs) if explained else None
        for run in runs:
            run.arrived_s, run.asked_s = account.arrived_s, account.body_read_s
            run.join_session(request.headers.get(SESSION_HEADER, "")[:MAX_SESSION_NAME])
            run.trace(self._span(request, account))
        if stream:
            pieces = _pieces(
                runs, deltas, writer, refusals(), with_timing=with_timing, explain=explain
            )
            return EventStream(
                pieces,
                self._metrics.client_gone,
                writer.fault,
                keep_alive=writer.keep_alive,
                interval_s=self._sse_keep_alive_s,
                waited_s=self._clock.now_s() - account.body_read_s,
            )
        with refusals():
            choices = await while_connected(
                request.receive, _collect(deltas), self._metrics.client_gone
            )
        reply = await writer.whole(choices, _timings(runs) if with_timing else [])
        headers = {} if explain is None else {EXPLANATION_HEADER: explain().decode()}
        return json_reply(reply, headers)

    def _span(self, request: Request, account: RequestAccount) -> RequestSpan:
        return RequestSpan(
            self._tracer,
            operation=operation_of(request.scope["path"]),
            model=account.model,
            parent=request.headers.get(TRACE_HEADER, ""),
            arrived_s=account.arrived_s,
        )

    def _explain(self, runs: Sequence[GenerationRun]) -> bytes:
        return explanations_json(self._decisions, [run.request.request_id for run in runs])


async def _collect(deltas: AsyncGenerator[list[Delta], None]) -> list[list[Delta]]:
    by_choice = defaultdict[int, list[Delta]](list)
    async with aclosing(deltas) as batches:
        async for batch in batches:
            for delta in batch:
                keep(by_choice[delta.index], delta)
    return [by_choice[index] for index in sorted(by_choice)]


async def _pieces(
    runs: Sequence[GenerationRun],
    deltas: AsyncGenerator[list[Delta], None],
    writer: ReplyWriter,
    refusals: AbstractContextManager[None],
    *,
    with_timing: bool,
    explain: Callable[[], bytes] | None,
) -> AsyncGenerator[bytes, None]:
    head: bytes | None = None
    with refusals:
        async with aclosing(deltas) as batches:
            async for batch in batches:
                if head is None:
                    head = writer.opening()
                await writer.before(batch)
                parts = _parts(batch)
                for part in parts:
                    yield one_line_each(head + b"".join([writer.piece(delta) for delta in part]))
                    head = b""
                    if len(parts) > 1:
                        await asyncio.sleep(0)
    comment = b"" if explain is None else b": baton-explain " + explain() + b"\n\n"
    closing = await writer.closing(_timings(runs) if with_timing else [])
    for portion in portions(map(one_line_each, [comment, *closing])):
        yield portion
        await asyncio.sleep(0)


def _parts(batch: list[Delta]) -> list[list[Delta]]:
    """The deltas of a batch in parts that are written one after the other,
    cut where they have many tokens with log-probabilities.
    """
    if sum([len(delta.logged) for delta in batch]) <= _LOGGED_AT_ONCE:  # nearly always
        return [batch]
    parts: list[list[Delta]] = [[]]
    room = _LOGGED_AT_ONCE
    for delta in batch:
        for piece in _cut(delta):
            if len(piece.logged) > room:
                parts.append([])
                room = _LOGGED_AT_ONCE
            parts[-1].append(piece)
            room -= len(piece.logged)
    return parts


def _cut(delta: Delta) -> Iterator[Delta]:
    """What a choice gained as several deltas, if it is much: the text and its marks with the first of its tokens,
    its end with the last.
    """
    text, marks, last = delta.text, delta.marks, max(1, len(delta.logged)) - 1
    for begin in range(0, last + 1, _LOGGED_AT_ONCE):
        end = begin + _LOGGED_AT_ONCE
        if end > last:
            rest = delta.tokens[begin:], delta.logged[begin:]
            yield Delta(delta.index, text, *rest, delta.finish, delta.stop, marks)
        else:
            some = delta.tokens[begin:end], delta.logged[begin:end]
            yield Delta(delta.index, text, *some, marks=marks)
        text, marks = "", []


def _deltas(runs: Sequence[GenerationRun]) -> AsyncGenerator[list[Delta], None]:
    return runs[0].deltas() if len(runs) == 1 else merged([run.deltas() for run in runs])


def _timings(runs: Sequence[GenerationRun]) -> list[Timing]:
    return [run.timing for run in runs if run.timing is not None]
