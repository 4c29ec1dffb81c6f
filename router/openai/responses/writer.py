"""The replies of POST /v1/responses: one response with one message, whole or as the numbered events of its making."""

from collections.abc import Sequence
from itertools import count

import msgspec

from baton.errors import BatonError
from baton.generation import FinishReason
from router.generation.generation_run import Delta, GenerationRun, keep, take_logged
from router.generation.planner import RequestContext
from router.http.errors import error_details
from router.http.streaming import json_text, model_event, named_event
from router.openai.logprobs import chat_entries, chat_logprobs
from router.openai.responses.replies import (
    ErrorEvent,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    OutputMessage,
    OutputText,
    PartEvent,
    ResponseEvent,
    ResponseReply,
    ResponseUsage,
    Status,
    TextDoneEvent,
)
from router.openai.responses.requests import ResponsesRequest
from router.ports import Timing
from router.text.token_bytes import PieceTable


class ResponseWriter:
    """Writes deltas as a response, or as the numbered events of one.

    created → in_progress → item added → part added → text deltas … → text done → part done → item done → completed
    """

    def __init__(
        self,
        context: RequestContext,
        body: ResponsesRequest,
        run: GenerationRun,
        pieces: PieceTable,
    ) -> None:
        self._context = context
        self._body = body
        self._run = run
        self._pieces = pieces
        self._item_id = context.request_id.replace("resp", "msg", 1)
        self._numbers = count()
        self._said: list[Delta] = []
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        kind = {"type": "response.output_text.delta"}
        self._delta_head = msgspec.json.encode(kind | place)[:-1]

    def opening(self) -> bytes:
        """The response, its message and its text, all of them empty."""
        begun = self._reply("in_progress", [], None)
        empty = OutputText(text="")
        item = OutputMessage(id=self._item_id, status="in_progress", content=[])
        events = (
            ResponseEvent(type="response.created", response=begun, sequence_number=self._next()),
            ResponseEvent(
                type="response.in_progress", response=begun, sequence_number=self._next()
            ),
            ItemEvent(type="response.output_item.added", item=item, sequence_number=self._next()),
            PartEvent(
                type="response.content_part.added",
                item_id=self._item_id,
                part=empty,
                sequence_number=self._next(),
            ),
        )
        return b"".join(map(model_event, events))

    def piece(self, delta: Delta) -> bytes:
        """The text, if there is some; the last delta may have none."""
        keep(self._said, delta)
        if not delta.text and not delta.logged:
            return b""
        count = self._body.num_logprobs
        logged = [] if count is None else list(chat_entries(delta.logged, count, self._pieces))
        data = b'%b,"delta":%b,"logprobs":%b,"sequence_number":%d}' % (
            self._delta_head,
            json_text(delta.text),
            msgspec.json.encode(logged),
            self._next(),
        )
        return named_event("response.output_text.delta", data)

    async def before(self, deltas: Sequence[Delta]) -> None:
        """Nothing."""

    async def closing(self, timings: Sequence[Timing]) -> list[bytes]:  # noqa: ARG002
        """The text, its message and the response, all of them done."""
        reply = self._done(self._said)
        logprobs = await self._logprobs(self._said)
        (item,) = reply.output
        (part,) = item.content
        done = (
            TextDoneEvent(
                type="response.output_text.done",
                item_id=item.id,
                text=part.text,
                logprobs=part.logprobs,
                sequence_number=self._next(),
            ),
            PartEvent(
                type="response.content_part.done",
                item_id=item.id,
                part=part,
                sequence_number=self._next(),
            ),
            ItemEvent(type="response.output_item.done", item=item, sequence_number=self._next()),
            ResponseEvent(
                type="response.incomplete"
                if reply.status == "incomplete"
                else "response.completed",
                response=reply,
                sequence_number=self._next(),
            ),
        )
        return [piece for event in done for piece in _with_logprobs(model_event(event), logprobs)]

    def fault(self, error: BatonError) -> bytes:
        """An event with the error."""
        details = error_details(error)
        event = ErrorEvent(
            type="error",
            code=details.code,
            message=details.message,
            param=details.param,
            sequence_number=self._next(),
        )
        return model_event(event)

    async def whole(
        self,
        choices: Sequence[Sequence[Delta]],
        timings: Sequence[Timing],  # noqa: ARG002  # no place for them here
    ) -> list[bytes]:
        """The response with its one message."""
        (deltas,) = choices
        reply = self._done(deltas).model_dump_json().encode()
        return _with_logprobs(reply, await self._logprobs(deltas))

    def _done(self, deltas: Sequence[Delta]) -> ResponseReply:
        """The same without log-probabilities."""
        cut = deltas[-1].finish is FinishReason.LENGTH
        status: Status = "incomplete" if cut else "completed"
        text = OutputText(text="".join(delta.text for delta in deltas))
        item = OutputMessage(id=self._item_id, status=status, content=[text])
        return self._reply(status, [item], _usage(self._run))

    def _reply(
        self, status: Status, output: list[OutputMessage], usage: ResponseUsage | None
    ) -> ResponseReply:
        body, sampling = self._body, self._run.request.prompt.sampling
        return ResponseReply(
            id=self._context.request_id,
            created_at=self._context.created,
            status=status,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._context.account.model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            service_tier=body.served_tier or "default",
            temperature=sampling.temperature,
            tool_choice="none" if body.tool_choice == "none" else "auto",
            top_logprobs=body.top_logprobs or 0,
            top_p=sampling.top_p,
            usage=usage,
            user=body.user,
        )

    async def _logprobs(self, deltas: Sequence[Delta]) -> list[bytes]:
        count = self._body.num_logprobs
        if count is None:
            return [b"[]"]
        return await chat_logprobs(take_logged(deltas), count, self._pieces)

    def _next(self) -> int:
        return next(self._numbers)


def _with_logprobs(json: bytes, logprobs: Sequence[bytes]) -> list[bytes]:
    """The pieces of `json` with log-probabilities in the place of their empty list. No text of a client's has that sign by sign: within
    JSON's strings a quotation mark has a backslash before it."""
    before, _, after = json.partition(b'"logprobs":[]')
    return [before, b'"logprobs":', *logprobs, after]


def _usage(run: GenerationRun) -> ResponseUsage:
    prompt_tokens = len(run.request.prompt.prompt_tokens)
    return ResponseUsage(
        input_tokens=prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=run.reused_tokens),
        output_tokens=run.output_tokens,
        total_tokens=prompt_tokens + run.output_tokens,
    )
