"""The replies of POST /v1/chat/completions: the assistant's next message, whole or in chunks."""

import asyncio
import secrets
from collections.abc import Sequence

import msgspec

from baton.errors import BatonError, InvalidRequestError
from baton.generation import FinishReason
from router.generation.generation_run import Delta, GenerationRun, take_logged, token_ids
from router.generation.parsed_choice import ParsedChoice
from router.generation.planner import RequestContext
from router.http.fields import MAX_REPEATED
from router.http.streaming import CUT, KEEP_ALIVE, Filling, fault_event, json_array
from router.openai.chunks import (
    IDS_AT_ONCE,
    Chunks,
    TextEvents,
    prompt_ids_field,
    token_ids_field,
)
from router.openai.logprobs import chat_entries, chat_logprobs, prompt_scores
from router.openai.replies import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatFinishWord,
    MessageToolCall,
    usage_of,
)
from router.openai.requests import ChatCompletionRequest
from router.parsing.events import (
    ContentText,
    ParsedEvent,
    ReasoningText,
    TextKind,
    ToolCallArguments,
    ToolCallBegun,
)
from router.parsing.output_format import OutputFormat
from router.ports import Timing
from router.text.token_bytes import PieceTable

_LOGPROBS = b'{"content":%b,"refusal":null}'


class ChatWriter:
    """Writes deltas as OpenAI's chat completions.

    The per-token path joins bytes that were made once with the JSON of the text; no model object per token.
    """

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        context: RequestContext,
        body: ChatCompletionRequest,
        run: GenerationRun,
        pieces: PieceTable,
        output_format: OutputFormat,
    ) -> None:
        self._output_format = output_format
        self._parsed: dict[int, ParsedChoice] = {}
        self._calls: dict[tuple[int, int], str] = {}
        self._context = context
        self._body = body
        self._run = run
        self._pieces = pieces
        self._with_tokens = bool(body.return_token_ids)
        self._names_by_id = bool(body.return_tokens_as_token_ids)
        self._echo = echoed_text(body, context)
        self._chunks = Chunks("chat.completion.chunk", context, body, [run])
        self._tools = body.callable_tools
        self._parses = not output_format.is_content(with_calls=self._tools is not None)
        more_than_text = body.logprobs or self._with_tokens or body.usage_in_chunks
        self._text_event = None if more_than_text else TextEvents(self._event_around_text)
        self._reasoning_event = TextEvents(self._event_around_reasoning)

    def opening(self) -> bytes:
        """Each choice's first chunk names the role; what is echoed comes after it."""
        role = b'{"role":"assistant","content":""}'
        ids = prompt_ids_field(self._run) if self._with_tokens else b""
        choices = range(self._body.num_samples)
        events = [self._event(i, role, b"null", b"null", b"" if i else ids) for i in choices]
        if self._echo:
            said = b'{"content":' + msgspec.json.encode(self._echo) + b"}"
            events += [self._event(i, said, b"null", b"null") for i in choices]
        return b"".join(events)

    def piece(self, delta: Delta) -> bytes:
        """A chunk with the text, if there is some, and a chunk with the end, if it is there."""
        if self._text_event is not None and delta.finish is None:  # nearly always
            kind = self._plain_kind(delta) if self._parses else ContentText
            if kind is ContentText:
                return self._text_event(delta)
            if kind is ReasoningText:
                told = self._body.include_reasoning is not False
                return self._reasoning_event(delta) if told else b""
        if self._parses:
            return self._parsed_piece(delta)
        written = b""
        with_tokens = self._with_tokens and bool(delta.tokens)
        if delta.text or delta.logged or with_tokens:
            content = b'{"content":' + msgspec.json.encode(delta.text) + b"}"
            finish = b"null" + (token_ids_field(delta) if with_tokens else b"")
            written = self._event(delta.index, content, self._logprobs_json(delta), finish)
        if delta.finish is not None:
            reason = msgspec.json.encode(delta.finish.value)
            written += self._event(delta.index, b"{}", b"null", reason)
        return written

    def _plain_kind(self, delta: Delta) -> TextKind | None:
        """What a delta's text is, where the parser need not read it."""
        parsed = self._parsed.get(delta.index)
        return None if parsed is None else parsed.plain_kind(delta)

    def _parsed_piece(self, delta: Delta) -> bytes:
        """A chunk for each thing that the text says, and one with the end;
        the first has the log-probabilities and ids of the tokens.
        """
        said = [
            json for event in self._events(delta) if (json := self._event_json(delta.index, event))
        ]
        logprobs = self._logprobs_json(delta) if delta.logged else b"null"
        with_tokens = self._with_tokens and bool(delta.tokens)
        if not said and (delta.logged or with_tokens):
            said.append(b"{}")
        written = b""
        for place, content in enumerate(said):
            ids = token_ids_field(delta) if with_tokens and not place else b""
            written += self._event(
                delta.index, content, b"null" if place else logprobs, b"null" + ids
            )
        if delta.finish is not None:
            reason = msgspec.json.encode(self._finish_word(delta))
            written += self._event(delta.index, b"{}", b"null", reason)
        return written

    def _events(self, delta: Delta) -> list[ParsedEvent]:
        parsed = self._parsed.get(delta.index)
        if parsed is None:
            parsed = self._parsed[delta.index] = ParsedChoice(
                self._output_format,
                self._tools,
                in_reasoning=self._context.in_reasoning,
                tells_reasoning=self._body.include_reasoning is not False,
            )
        return parsed.push(delta)

    def _event_json(self, index: int, event: ParsedEvent) -> bytes:
        """The `delta` of a chunk; empty for what has none."""
        match event:
            case ContentText():
                return b'{"content":%b}' % msgspec.json.encode(event.text)
            case ReasoningText():
                text = msgspec.json.encode(event.text)
                return b'{"reasoning":%b,"reasoning_content":%b}' % (text, text)
            case ToolCallBegun():
                call_id = self._call_id(index, event.index)
                begun = {
                    "index": event.index,
                    "id": call_id,
                    "type": "function",
                    "function": {"name": event.name, "arguments": ""},
                }
                return msgspec.json.encode({"tool_calls": [begun]})
            case ToolCallArguments():
                more = {"index": event.index, "function": {"arguments": event.text}}
                return msgspec.json.encode({"tool_calls": [more]})
        return b""

    def _call_id(self, choice: int, call: int) -> str:
        return self._calls.setdefault((choice, call), f"call_{secrets.token_hex(12)}")

    def _finish_word(self, delta: Delta) -> ChatFinishWord:
        """`tool_calls` where the model stopped after it had called something."""
        assert delta.finish is not None
        called = (delta.index, 0) in self._calls
        return "tool_calls" if called and delta.finish is FinishReason.STOP else delta.finish.value

    def _event_around_text(self, index: int) -> bytes:
        return self._event(index, b'{"content":%b}' % CUT, b"null", b"null")

    def _event_around_reasoning(self, index: int) -> bytes:
        delta = b'{"reasoning":%b,"reasoning_content":%b}' % (CUT, CUT)
        return self._event(index, delta, b"null", b"null")

    async def before(self, deltas: Sequence[Delta]) -> None:
        """Nothing."""

    async def closing(self, timings: Sequence[Timing]) -> list[bytes]:
        """As every stream of chunks."""
        return [self._chunks.end(timings)]

    def fault(self, error: BatonError) -> bytes:
        """An event with the error."""
        return fault_event(error)

    async def whole(
        self, choices: Sequence[Sequence[Delta]], timings: Sequence[Timing]
    ) -> list[bytes]:
        """The reply with every choice's whole message."""
        reply = ChatCompletion(
            id=self._context.request_id,
            created=self._context.created,
            model=self._context.account.model,
            choices=[await self._choice(i, deltas) for i, deltas in enumerate(choices)],
            usage=usage_of([self._run]),
            service_tier=self._body.served_tier,
            baton=timings[0] if timings else None,
        ).model_dump()
        large, count = Filling(), self._body.num_logprobs
        for choice, deltas in zip(reply["choices"], choices, strict=True):
            if count is not None:
                choice["logprobs"] = large.place(await self._logprobs(deltas, count))
        if self._with_tokens:
            tokens = self._run.request.prompt.prompt_tokens
            reply["prompt_token_ids"] = large.place(await json_array(tokens, IDS_AT_ONCE))
        scores = await self._prompt_scores()
        if scores is not None:
            reply["prompt_logprobs"] = large.place(scores)
        return large.filled(msgspec.json.encode(reply))

    async def _prompt_scores(self) -> bytes | None:
        count, scores = self._body.num_prompt_logprobs, self._run.prompt_logprobs
        if count is None or scores is None:
            return None
        tokens = self._run.request.prompt.prompt_tokens
        return await prompt_scores(tokens, scores, count, self._pieces)

    async def _choice(self, index: int, deltas: Sequence[Delta]) -> ChatChoice:
        finish = deltas[-1].finish
        assert finish is not None
        if self._parses:
            message = await self._parsed_message(index, deltas)
        else:
            message = AssistantMessage(content=self._echo + "".join(d.text for d in deltas))
        return ChatChoice(
            index=index,
            message=message,
            finish_reason=self._finish_word(deltas[-1]),
            token_ids=token_ids(deltas) if self._with_tokens else None,
        )

    async def _parsed_message(self, index: int, deltas: Sequence[Delta]) -> AssistantMessage:
        """With turns for others between its deltas."""
        content, reasoning = [self._echo], list[str]()
        calls: list[MessageToolCall] = []
        arguments: list[list[str]] = []
        for delta in deltas:
            for event in self._events(delta):
                match event:
                    case ContentText():
                        content.append(event.text)
                    case ReasoningText():
                        reasoning.append(event.text)
                    case ToolCallBegun():
                        function = CalledFunction(name=event.name, arguments="")
                        call_id = self._call_id(index, event.index)
                        calls.append(MessageToolCall(id=call_id, function=function))
                        arguments.append([])
                    case ToolCallArguments():
                        arguments[event.index].append(event.text)
            await asyncio.sleep(0)
        for call, texts in zip(calls, arguments, strict=True):
            call.function.arguments = "".join(texts)
        thought = "".join(reasoning) or None
        return AssistantMessage(
            content="".join(content) or (None if calls or thought else ""),
            reasoning=thought,
            reasoning_content=thought,
            tool_calls=calls or None,
        )

    async def _logprobs(self, deltas: Sequence[Delta], count: int) -> bytes:
        content = await chat_logprobs(
            take_logged(deltas), count, self._pieces, by_id=self._names_by_id
        )
        return _LOGPROBS % b"".join(content)

    def _logprobs_json(self, delta: Delta) -> bytes:
        count = self._body.num_logprobs
        if count is None:
            return b"null"
        entries = list(chat_entries(delta.logged, count, self._pieces, by_id=self._names_by_id))
        return _LOGPROBS % msgspec.json.encode(entries)

    def _event(
        self, index: int, delta: bytes, logprobs: bytes, finish: bytes, more: bytes = b""
    ) -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}'
        return self._chunks.chunk(choice % (index, delta, logprobs, finish), more)


def echoed_text(body: ChatCompletionRequest, context: RequestContext) -> str:
    """What every choice begins with: the last message, where its role is the answer's and the client wants it repeated;
    as the guardrails let it pass.

    Raises:
        InvalidRequestError: It would be repeated too often.
    """
    last = body.messages[-1]
    continues = body.continue_final_message or body.add_generation_prompt is False
    if not body.echo or not (continues or last.role == "assistant"):
        return ""
    guarded = context.account.guarded_input
    text = last.text if guarded is None else guarded.texts[-1].text
    if body.num_samples > 1 and len(text) * body.num_samples > MAX_REPEATED:
        raise InvalidRequestError(
            f"n: the reply would repeat {len(text) * body.num_samples} characters of the last message, at most {MAX_REPEATED}"
            " are.",
            param="n",
        )
    return text
