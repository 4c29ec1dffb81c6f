"""The replies of POST /v1/responses: one response with its items, whole or as the numbered events of its making."""

import asyncio
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from baton.errors import BatonError
from baton.generation import FinishReason
from router.generation.generation_run import Delta, GenerationRun, take_logged
from router.generation.parsed_choice import ParsedChoice
from router.generation.planner import RequestContext
from router.http.errors import error_details
from router.http.streaming import KEEP_ALIVE, json_text, model_event, named_event
from router.openai.logprobs import AT_ONCE, chat_entries
from router.openai.responses.replies import (
    ArgumentsDoneEvent,
    ErrorEvent,
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    PartEvent,
    Reasoning,
    ReasoningDoneEvent,
    ReasoningText,
    ResponseEvent,
    ResponseReply,
    ResponseUsage,
    Status,
    TextDoneEvent,
    TextReply,
)
from router.openai.responses.requests import ResponsesRequest
from router.parsing.events import (
    ContentText,
    ToolCallArguments,
    ToolCallBegun,
)
from router.parsing.events import ReasoningText as ReasoningTold
from router.parsing.output_format import OutputFormat
from router.ports import Timing
from router.text.token_bytes import PieceTable

_Kind = Literal["message", "reasoning", "function_call"]
_PREFIXES: dict[_Kind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PartEvent = Literal["response.content_part.added", "response.content_part.done"]
_DELTAS: dict[_Kind, str] = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}


@dataclass(slots=True, kw_only=True, eq=False)
class _Item:
    """An item of the output, as far as it has been drawn.

    Attributes:
        place: Among all.
        name: Of the function that is called.
        call_id: Of the call.
        texts: Its text, or its arguments.
        logprobs: Of a message, the JSON of those of each of its tokens.
    """

    kind: _Kind
    id: str
    place: int
    name: str = ""
    call_id: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)

    def as_output(self, status: Status, *, is_empty: bool = False) -> OutputItem:
        """As it is answered, without log-probabilities."""
        text = "" if is_empty else "".join(self.texts)
        match self.kind:
            case "message":
                parts = [] if is_empty else [OutputText(text=text)]
                return OutputMessage(id=self.id, status=status, content=parts)
            case "reasoning":
                thoughts = [] if is_empty else [ReasoningText(text=text)]
                return Reasoning(id=self.id, status=status, content=thoughts)
            case "function_call":
                return FunctionCall(
                    id=self.id,
                    call_id=self.call_id,
                    name=self.name,
                    arguments=text,
                    status=status,
                )


class ResponseWriter:
    """Writes deltas as a response, or as the numbered events of one.

    created → in_progress → (item added → part added → deltas … → text done → part done → item done) … → completed;
    calls have no parts.
    """

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        context: RequestContext,
        body: ResponsesRequest,
        run: GenerationRun,
        pieces: PieceTable,
        output_format: OutputFormat,
    ) -> None:
        self._context = context
        self._body = body
        self._run = run
        self._pieces = pieces
        self._parsed = ParsedChoice(
            output_format,
            body.callable_tools,
            in_reasoning=context.in_reasoning,
            tells_reasoning=body.include_reasoning is not False,
        )
        self._logged = deque[tuple[int, bytes]]()
        self._numbers = count()
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._delta_head = b""
        self._finish: FinishReason | None = None

    def opening(self) -> bytes:
        """The response, empty."""
        begun = self._reply("in_progress", [], None)
        created = ResponseEvent(
            type="response.created", response=begun, sequence_number=self._next()
        )
        going_on = ResponseEvent(
            type="response.in_progress", response=begun, sequence_number=self._next()
        )
        return model_event(created) + model_event(going_on)

    def piece(self, delta: Delta) -> bytes:
        """What it says, if it says something; the last delta may not."""
        written: list[bytes] = []
        for item, text, logged in self._gained(delta):
            if item is not self._open:
                written += [*self._ended(), *self._begun(item)]
            item.texts.append(text)
            if text or logged:
                written.append(self._delta_event(item, text, logged))
        return b"".join(written)

    def _gained(self, delta: Delta) -> Iterator[tuple[_Item, str, list[bytes]]]:
        """Each piece of an item's text with the item, before it is in the item's texts; where that is a message, with
        the log-probabilities of the tokens that begin in the piece, and at the end of those without a text of their own.
        """
        self._finish = delta.finish
        for event in self._parsed.push(delta):
            match event:
                case ContentText():
                    self._logged_before(event.begin)
                    logged = self._logged_before(event.begin + len(event.text))
                    yield self._item("message"), event.text, logged
                case ReasoningTold():
                    yield self._item("reasoning"), event.text, []
                case ToolCallBegun():
                    yield self._new("function_call", event.name), "", []
                case ToolCallArguments():
                    yield self._items[-1], event.text, []
        if self._logged:
            self._logged_before(self._parsed.settled)
        in_message = bool(self._items) and self._items[-1].kind == "message"
        if delta.finish is not None and self._logged and (in_message or self._parsed.is_text):
            yield self._item("message"), "", [entry for _, entry in self._logged]

    def _logged_before(self, place: int) -> list[bytes]:
        """Takes what is written of the tokens that begin before this place in the text."""
        taken: list[bytes] = []
        while self._logged and self._logged[0][0] < place:
            taken.append(self._logged.popleft()[1])
        return taken

    def _item(self, kind: _Kind) -> _Item:
        """The last one, if it is of this kind; else a new one."""
        last = self._items[-1] if self._items else None
        return last if last is not None and last.kind == kind else self._new(kind)

    def _new(self, kind: _Kind, name: str = "") -> _Item:
        place = len(self._items)
        item_id = self._context.request_id.replace("resp", _PREFIXES[kind], 1)
        item = _Item(
            kind=kind,
            id=f"{item_id}-{place}" if place else item_id,
            place=place,
            name=name,
            call_id=f"call_{secrets.token_hex(12)}" if name else "",
        )
        self._items.append(item)
        return item

    def _begun(self, item: _Item) -> Iterator[bytes]:
        """An item, empty, and its part."""
        added = ItemEvent(
            type="response.output_item.added",
            output_index=item.place,
            item=item.as_output("in_progress", is_empty=True),
            sequence_number=self._next(),
        )
        yield model_event(added)
        if item.kind != "function_call":
            yield self._part(item, "response.content_part.added", "")
        about = {"type": _DELTAS[item.kind], "item_id": item.id, "output_index": item.place}
        part = {} if item.kind == "function_call" else {"content_index": 0}
        self._delta_head = msgspec.json.encode(about | part)[:-1]
        self._open = item

    def _part(self, item: _Item, kind: _PartEvent, text: str) -> bytes:
        part = OutputText(text=text) if item.kind == "message" else ReasoningText(text=text)
        event = PartEvent(
            type=kind,
            item_id=item.id,
            output_index=item.place,
            part=part,
            sequence_number=self._next(),
        )
        return model_event(event)

    def _delta_event(self, item: _Item, text: str, logged: list[bytes]) -> bytes:
        logprobs = b""
        if item.kind == "message":
            logprobs = b',"logprobs":[%b]' % b",".join(logged)
            item.logprobs += logged
        data = b'%b,"delta":%b%b,"sequence_number":%d}' % (
            self._delta_head,
            json_text(text),
            logprobs,
            self._next(),
        )
        return named_event(_DELTAS[item.kind], data)

    def _ended(self, status: Status = "completed") -> Iterator[bytes]:
        """The last item begun, if there is one, done: its text, its part and itself."""
        if self._open is None:
            return
        item, self._open = self._open, None
        text = "".join(item.texts)
        about: dict[str, Any] = {"item_id": item.id, "output_index": item.place}
        about["sequence_number"] = self._next()
        done: BaseModel
        match item.kind:
            case "message":
                done = TextDoneEvent(type="response.output_text.done", text=text, **about)
            case "reasoning":
                done = ReasoningDoneEvent(type="response.reasoning_text.done", text=text, **about)
            case "function_call":
                kind: Literal["response.function_call_arguments.done"]
                kind = "response.function_call_arguments.done"
                done = ArgumentsDoneEvent(type=kind, name=item.name, arguments=text, **about)
        yield from _with_logprobs(model_event(done), [item])
        if item.kind != "function_call":
            part = self._part(item, "response.content_part.done", text)
            yield from _with_logprobs(part, [item])
        whole = ItemEvent(
            type="response.output_item.done",
            output_index=item.place,
            item=item.as_output(status),
            sequence_number=self._next(),
        )
        yield from _with_logprobs(model_event(whole), [item])

    async def before(self, deltas: Sequence[Delta]) -> None:
        """Writes the log-probabilities of their tokens. Which of these a message has is known with its text."""
        if (count := self._body.num_logprobs) is None:
            return
        for place, token in enumerate(take_logged(deltas), start=1):
            (entry,) = chat_entries([token], count, self._pieces)
            self._logged.append((token.text_offset, msgspec.json.encode(entry)))
            if place % AT_ONCE == 0:
                await asyncio.sleep(0)

    async def closing(self, timings: Sequence[Timing]) -> list[bytes]:  # noqa: ARG002
        """The last item and the response, both of them done.
        A response that says nothing has a message without text.
        """
        written = [] if self._items else [*self._begun(self._new("message"))]
        reply = self._done()
        written += self._ended(reply.status)
        incomplete = reply.status == "incomplete"
        event = ResponseEvent(
            type="response.incomplete" if incomplete else "response.completed",
            response=reply,
            sequence_number=self._next(),
        )
        return [*written, *_with_logprobs(model_event(event), self._items)]

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
        """The response with its items, with turns for others between its deltas."""
        (deltas,) = choices
        for delta in deltas:
            await self.before([delta])
            for item, text, logged in self._gained(delta):
                item.texts.append(text)
                item.logprobs += logged
            await asyncio.sleep(0)
        if not self._items:
            self._new("message")
        return _with_logprobs(self._done().model_dump_json().encode(), self._items)

    def _done(self) -> ResponseReply:
        """Without log-probabilities."""
        status: Status = "incomplete" if self._finish is FinishReason.LENGTH else "completed"
        *before, last = self._items
        output = [item.as_output("completed") for item in before]
        return self._reply(status, [*output, last.as_output(status)], _usage(self._run))

    def _reply(
        self, status: Status, output: list[OutputItem], usage: ResponseUsage | None
    ) -> ResponseReply:
        body, sampling = self._body, self._run.request.prompt.sampling
        choice = body.tool_choice
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
            text=TextReply(format=body.text_format),
            tool_choice=choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
            tools=[tool.model_dump() for tool in body.functions],
            top_logprobs=body.top_logprobs or 0,
            top_p=sampling.top_p,
            usage=usage,
            user=body.user,
        )

    def _next(self) -> int:
        return next(self._numbers)


def _with_logprobs(json: bytes, items: Sequence[_Item]) -> list[bytes]:
    """The pieces of `json`, which tells of these items, with the log-probabilities of messages in the place of their
    empty lists. No text of a client's before the last of them has that sign by sign: within JSON's strings a quotation
    mark has a backslash before it, and the client's own JSON comes after the output.
    """
    messages = [item for item in items if item.kind == "message"]
    first, *others = json.split(b'"logprobs":[]', len(messages)) if messages else [json]
    pieces = [first]
    for item, after in zip(messages, others, strict=True):
        pieces.append(b'"logprobs":[')
        for place, entries in enumerate(item.logprobs):
            pieces += [b",", entries] if place else [entries]
        pieces += [b"]", after]
    return pieces


def _usage(run: GenerationRun) -> ResponseUsage:
    prompt_tokens = len(run.request.prompt.prompt_tokens)
    return ResponseUsage(
        input_tokens=prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=run.reused_tokens),
        output_tokens=run.output_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=run.reasoning_tokens),
        total_tokens=prompt_tokens + run.output_tokens,
    )
