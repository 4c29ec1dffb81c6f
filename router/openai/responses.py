"""POST /v1/responses: OpenAI's newer way to ask. Stateless: what is answered is forgotten, so whoever asks for a response by
its id, to see, delete or cancel it, is told that there is none.
"""

from collections.abc import Sequence
from itertools import count

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import BatonError
from baton.generation import FinishReason
from router.http.body import read_body
from router.http.errors import error_details
from router.http.streaming import json_text, model_event, named_event
from router.openai.context import ReplyHead, Wanted, plan_runs, take_request
from router.openai.job_run import Delta, JobRun, LoggedToken
from router.openai.logprobs import chat_logprobs
from router.openai.model_limits import TokenLimit
from router.openai.prompt import conversation_prompt
from router.openai.replies import ChatTokenLogprob, TimingReply, Usage
from router.openai.respond import respond
from router.openai.response_replies import (
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
from router.openai.response_requests import ResponsesRequest
from router.openai.serving import Serving
from router.text.token_bytes import PieceTable


async def responses(request: Request, serving: Serving) -> Response:
    """Answers one conversation."""
    body = await read_body(request, ResponsesRequest, serving.max_body_bytes)
    limit = TokenLimit(
        asked=body.max_output_tokens,
        default=None,
        param="max_output_tokens",
        prompt_param="input",
    )
    context = await take_request(request, serving, body, limit, "resp")
    prompt = await conversation_prompt(body.as_conversation(), context)
    (run,) = plan_runs(context, body, [prompt], Wanted(limit=limit, logprobs=body.logprobs))
    writer = ResponseWriter(context.head, body, run, serving.tokenizer.pieces)
    return await respond(request, context, [run], writer, stream=body.stream)


class ResponseWriter:
    """Writes deltas as a response, or as the numbered events of one.

    created → in_progress → item added → part added → text deltas … → text done → part done → item done → completed
    """

    def __init__(
        self, head: ReplyHead, body: ResponsesRequest, run: JobRun, pieces: PieceTable
    ) -> None:
        self._head = head
        self._body = body
        self._run = run
        self._pieces = pieces
        self._item_id = head.request_id.replace("resp", "msg", 1)
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
        self._said.append(delta)
        if not delta.text and not delta.logged:
            return b""
        logged = [entry.model_dump() for entry in self._logprobs(delta.logged)]
        data = b'%b,"delta":%b,"logprobs":%b,"sequence_number":%d}' % (
            self._delta_head,
            json_text(delta.text),
            msgspec.json.encode(logged),
            self._next(),
        )
        return named_event("response.output_text.delta", data)

    def closing(self, usage: Usage, timings: Sequence[TimingReply]) -> bytes:  # noqa: ARG002
        """The text, its message and the response, all of them done."""
        reply = self.whole([self._said], usage, [])
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
        return b"".join(map(model_event, done))

    def fault(self, error: BatonError) -> bytes:
        """An event with the error."""
        told = error_details(error)
        event = ErrorEvent(
            type="error",
            code=told.code,
            message=told.message,
            param=told.param,
            sequence_number=self._next(),
        )
        return model_event(event)

    def whole(
        self,
        choices: Sequence[Sequence[Delta]],
        usage: Usage,
        timings: Sequence[TimingReply],  # noqa: ARG002  # no place for them here
    ) -> ResponseReply:
        """The response with its one message."""
        (deltas,) = choices
        cut = deltas[-1].finish is FinishReason.LENGTH
        status: Status = "incomplete" if cut else "completed"
        text = OutputText(
            text="".join(delta.text for delta in deltas),
            logprobs=self._logprobs([token for delta in deltas for token in delta.logged]),
        )
        item = OutputMessage(id=self._item_id, status=status, content=[text])
        return self._reply(status, [item], usage)

    def _reply(
        self, status: Status, output: list[OutputMessage], usage: Usage | None
    ) -> ResponseReply:
        body, sampling = self._body, self._run.job.prompt.sampling
        return ResponseReply(
            id=self._head.request_id,
            created_at=self._head.created,
            status=status,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._head.model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            service_tier=body.served_tier or "default",
            temperature=sampling.temperature,
            tool_choice="none" if body.tool_choice == "none" else "auto",
            top_logprobs=body.top_logprobs or 0,
            top_p=sampling.top_p,
            usage=None if usage is None else _usage(usage),
            user=body.user,
        )

    def _logprobs(self, logged: Sequence[LoggedToken]) -> list[ChatTokenLogprob]:
        if self._body.logprobs is None:
            return []
        return chat_logprobs(logged, self._body.logprobs, self._pieces).content

    def _next(self) -> int:
        return next(self._numbers)


def _usage(usage: Usage) -> ResponseUsage:
    cached = InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens)
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=cached,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )
