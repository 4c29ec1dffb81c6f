"""The replies of POST /v1/messages, and POST /v1/messages/count_tokens: a conversation in Anthropic's words."""

import asyncio
import secrets
from collections.abc import Sequence

from pydantic_core import from_json
from starlette.requests import Request

from baton.errors import BatonError
from baton.generation import FinishReason
from router.anthropic.replies import (
    ContentBlockStart,
    ContentBlockStop,
    CountedTokens,
    MessageContent,
    MessageDelta,
    MessageReply,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    StopDelta,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolUseContent,
)
from router.anthropic.requests import CountTokensRequest, MessagesRequest
from router.generation.generation_run import Delta, GenerationRun
from router.generation.model_catalog import ModelCatalog
from router.generation.parsed_choice import ParsedChoice
from router.generation.planner import RequestContext
from router.generation.prompt_encoder import PromptEncoder
from router.http.account import account_of
from router.http.body import BodyReader
from router.http.errors import anthropic_error
from router.http.fields import JsonObject
from router.http.streaming import json_text, model_event, named_event
from router.parsing.events import (
    ContentText,
    ParsedEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegun,
)
from router.parsing.output_format import OutputFormat
from router.ports import Timing

_DELTA = b'{"type":"content_block_delta","index":%d,"delta":%b}'


class TokenCounting:
    """The endpoint that says how many tokens a conversation has.

    Args:
        bodies: Reads what was sent.
        catalog: The served model.
        prompts: Makes token ids of what was sent.
    """

    def __init__(self, bodies: BodyReader, catalog: ModelCatalog, prompts: PromptEncoder) -> None:
        self._bodies = bodies
        self._catalog = catalog
        self._prompts = prompts

    async def __call__(self, request: Request) -> CountedTokens:
        """Counts the tokens of one."""
        body = await self._bodies.read(request, CountTokensRequest)
        self._catalog.require_name(body.model, account_of(request))
        model = await self._catalog.require_model()
        tokens = await self._prompts.count(body.as_conversation(), model)
        return CountedTokens(input_tokens=len(tokens))


class MessageWriter:
    """Writes deltas as a message, or as the events of one.

    message_start → (content_block_start → content_block_delta … → content_block_stop) … → message_delta → message_stop
    """

    def __init__(
        self,
        context: RequestContext,
        body: MessagesRequest,
        run: GenerationRun,
        output_format: OutputFormat,
    ) -> None:
        self._context = context
        self._run = run
        thinking = body.thinking
        self._parsed = ParsedChoice(
            output_format,
            body.callable_tools,
            in_reasoning=context.in_reasoning,
            tells_reasoning=thinking is None or thinking.type != "disabled",
        )
        self._omits_thoughts = thinking is not None and thinking.display == "omitted"
        self._last: Delta | None = None
        self._index = -1
        self._open: type[MessageContent] | None = None
        self._has_called = False

    def opening(self) -> bytes:
        """The message, empty. What of the prompt a cache held is known at the end only."""
        usage = MessageUsage(
            input_tokens=len(self._run.request.prompt.prompt_tokens), output_tokens=0
        )
        return model_event(MessageStart(message=self._message([], None, usage)))

    def piece(self, delta: Delta) -> bytes:
        """What it says, if it says something; the last delta may not."""
        self._last = delta
        return b"".join(map(self._event, self._parsed.push(delta)))

    def _event(self, event: ParsedEvent) -> bytes:
        match event:
            case ContentText():
                begun = self._begin(TextContent(text=""))
                return begun + self._delta(b'{"type":"text_delta","text":%b}', event.text)
            case ReasoningText():
                begun = self._begin(ThinkingContent(thinking=""))
                if self._omits_thoughts:
                    return begun
                return begun + self._delta(b'{"type":"thinking_delta","thinking":%b}', event.text)
            case ToolCallBegun():
                return self._begin(self._call(event), always=True)
            case ToolCallArguments():
                return self._delta(b'{"type":"input_json_delta","partial_json":%b}', event.text)
        return b""

    def _begin(self, block: MessageContent, *, always: bool = False) -> bytes:
        """Ends the block that is open and begins this one, unless one of its kind is open."""
        if self._open is type(block) and not always:
            return b""
        ended = self._end()
        self._open, self._index = type(block), self._index + 1
        return ended + model_event(ContentBlockStart(index=self._index, content_block=block))

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return model_event(ContentBlockStop(index=self._index))

    def _delta(self, kind: bytes, text: str) -> bytes:
        return named_event("content_block_delta", _DELTA % (self._index, kind % json_text(text)))

    def _call(self, event: ToolCallBegun) -> ToolUseContent:
        self._has_called = True
        return ToolUseContent(id=f"toolu_{secrets.token_hex(12)}", name=event.name, input={})

    async def before(self, deltas: Sequence[Delta]) -> None:
        """Nothing."""

    async def closing(self, timings: Sequence[Timing]) -> list[bytes]:  # noqa: ARG002
        """The last block and the message, both done. A message that says nothing has a block without text."""
        assert self._last is not None
        begun = b"" if self._index >= 0 else self._begin(TextContent(text=""))
        stop = StopDelta(stop_reason=self._stop_reason(self._last), stop_sequence=self._last.stop)
        ended = MessageDelta(delta=stop, usage=_usage(self._run))
        return [begun + self._end(), model_event(ended), model_event(MessageStop())]

    def fault(self, error: BatonError) -> bytes:
        """An event with the error."""
        return named_event("error", anthropic_error(error))

    async def whole(
        self,
        choices: Sequence[Sequence[Delta]],
        timings: Sequence[Timing],  # noqa: ARG002  # no place for them here
    ) -> list[bytes]:
        """The message with its blocks, with turns for others between its deltas."""
        (deltas,) = choices
        content: list[MessageContent] = []
        texts: list[list[str]] = []
        for delta in deltas:
            for event in self._parsed.push(delta):
                match event:
                    case ContentText():
                        block: MessageContent = TextContent(text="")
                    case ReasoningText():
                        block = ThinkingContent(thinking="")
                    case ToolCallBegun():
                        content.append(self._call(event))
                        texts.append([])
                        continue
                    case ToolCallArguments():
                        block = content[-1]
                    case _:
                        continue
                if not content or type(content[-1]) is not type(block):
                    content.append(block)
                    texts.append([])
                if not (self._omits_thoughts and isinstance(block, ThinkingContent)):
                    texts[-1].append(event.text)
            await asyncio.sleep(0)
        for block, said in zip(content, texts, strict=True):
            _fill(block, "".join(said))
        reply = self._message(content or [TextContent(text="")], deltas[-1], _usage(self._run))
        return [reply.model_dump_json().encode()]

    def _message(
        self, content: list[MessageContent], last: Delta | None, usage: MessageUsage
    ) -> MessageReply:
        return MessageReply(
            id=self._context.request_id,
            model=self._context.account.model,
            content=content,
            stop_reason=None if last is None else self._stop_reason(last),
            stop_sequence=None if last is None else last.stop,
            usage=usage,
        )

    def _stop_reason(self, last: Delta) -> StopReason:
        if last.stop is not None:
            return "stop_sequence"
        if last.finish is FinishReason.LENGTH:
            return "max_tokens"
        return "tool_use" if self._has_called else "end_turn"


def _fill(block: MessageContent, said: str) -> None:
    match block:
        case TextContent():
            block.text = said
        case ThinkingContent():
            block.thinking = said
        case ToolUseContent():
            block.input = _input(said)


def _input(arguments: str) -> JsonObject:
    """Of a call that broke off, what is whole. Arguments that a model begins of its own accord may be no JSON, or what no reply can hold: then
    nothing.
    """
    try:
        found = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _usage(run: GenerationRun) -> MessageUsage:
    return MessageUsage(
        input_tokens=len(run.request.prompt.prompt_tokens) - run.reused_tokens,
        cache_read_input_tokens=run.reused_tokens,
        output_tokens=run.output_tokens,
        output_tokens_details=OutputTokensDetails(thinking_tokens=run.reasoning_tokens),
    )
