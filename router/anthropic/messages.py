"""The replies of POST /v1/messages, and POST /v1/messages/count_tokens: a conversation in Anthropic's words."""

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
    MessageTokensDetails,
    MessageUsage,
    Ping,
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
from router.http.streaming import json_text, model_event, named_event, while_connected
from router.openai.conversation import whole_arguments
from router.parsing.events import (
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegun,
)
from router.parsing.output_format import OutputFormat
from router.ports import Timing
from router.telemetry.metrics import RouterMetrics

_DELTAS: dict[type[MessageContent], bytes] = {
    TextContent: b'{"type":"text_delta","text":%b}',
    ThinkingContent: b'{"type":"thinking_delta","thinking":%b}',
    ToolUseContent: b'{"type":"input_json_delta","partial_json":%b}',
}
_DELTA = b'{"type":"content_block_delta","index":%d,"delta":%b}'


class TokenCounting:
    """The endpoint that says how many tokens a conversation has.

    Args:
        bodies: Reads what was sent.
        catalog: The served model.
        prompts: Makes token ids of what was sent.
        metrics: Counts clients that go away.
    """

    def __init__(
        self,
        bodies: BodyReader,
        catalog: ModelCatalog,
        prompts: PromptEncoder,
        metrics: RouterMetrics,
    ) -> None:
        self._bodies = bodies
        self._catalog = catalog
        self._prompts = prompts
        self._metrics = metrics

    async def __call__(self, request: Request) -> CountedTokens:
        """Counts the tokens of one."""
        body = await self._bodies.read(request, CountTokensRequest)
        tenant = account_of(request).tenant
        self._catalog.require_name(body.model, account_of(request))
        model = await self._catalog.require_model()
        counting = self._prompts.count(body.as_conversation(), model, tenant.tenant_id)
        tokens = await while_connected(request.receive, counting, self._metrics.client_gone)
        return CountedTokens(input_tokens=len(tokens))


@dataclass(slots=True, kw_only=True, eq=False)
class _Block:
    """A block of the message, as far as it has been drawn.

    Attributes:
        content: Empty until the end.
        texts: Of a message that is answered whole: its text, or its input's JSON.
    """

    content: MessageContent
    texts: list[str] = field(default_factory=list)

    def filled(self) -> MessageContent:
        """The content with its text."""
        said = "".join(self.texts)
        match self.content:
            case TextContent():
                self.content.text = said
            case ThinkingContent():
                self.content.thinking = said
            case ToolUseContent():
                self.content.input = whole_arguments(said)
        return self.content


class MessageWriter:
    """Writes deltas as a message, or as the events of one.

    message_start → (content_block_start → content_block_delta … → content_block_stop) … → message_delta → message_stop
    """

    keep_alive = model_event(Ping())

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
        self._blocks: list[_Block] = []

    def opening(self) -> bytes:
        """The message, empty. What of the prompt a cache held is known at the end only."""
        usage = MessageUsage(
            input_tokens=len(self._run.request.prompt.prompt_tokens), output_tokens=0
        )
        return model_event(MessageStart(message=self._message([], None, usage)))

    def piece(self, delta: Delta) -> bytes:
        """What it says, if it says something; the last delta may not."""
        written: list[bytes] = []
        begun = len(self._blocks)
        for block, text in self._gained(delta):
            if len(self._blocks) > begun:
                begun = len(self._blocks)
                written += [self._end(begun - 2), self._begin(block)]
            if text:
                written.append(self._delta(block, text))
        return b"".join(written)

    def _gained(self, delta: Delta) -> Iterator[tuple[_Block, str]]:
        """Each piece of text, or of a call's JSON, with its block, which is the last one; a new block comes with its
        first piece, which may be empty.
        """
        self._last = delta
        for event in self._parsed.push(delta):
            match event:
                case ContentText():
                    yield self._block(TextContent(text="")), event.text
                case ReasoningText():
                    text = "" if self._omits_thoughts else event.text
                    yield self._block(ThinkingContent(thinking="")), text
                case ToolCallBegun():
                    call_id = f"toolu_{secrets.token_hex(12)}"
                    yield self._new(ToolUseContent(id=call_id, name=event.name, input={})), ""
                case ToolCallArguments():
                    yield self._blocks[-1], event.text

    def _block(self, content: MessageContent) -> _Block:
        """The last one, if it is of this kind; else a new one."""
        last = self._blocks[-1] if self._blocks else None
        if last is not None and type(last.content) is type(content):
            return last
        return self._new(content)

    def _new(self, content: MessageContent) -> _Block:
        self._blocks.append(_Block(content=content))
        return self._blocks[-1]

    def _begin(self, block: _Block) -> bytes:
        return model_event(
            ContentBlockStart(index=len(self._blocks) - 1, content_block=block.content)
        )

    def _end(self, index: int) -> bytes:
        return b"" if index < 0 else model_event(ContentBlockStop(index=index))

    def _delta(self, block: _Block, text: str) -> bytes:
        kind = _DELTAS[type(block.content)] % json_text(text)
        return named_event("content_block_delta", _DELTA % (len(self._blocks) - 1, kind))

    async def before(self, deltas: Sequence[Delta]) -> None:
        """Nothing."""

    async def closing(self, timings: Sequence[Timing]) -> list[bytes]:  # noqa: ARG002
        """The last block and the message, both done. A message that says nothing has a block without text."""
        assert self._last is not None
        begun = b"" if self._blocks else self._begin(self._new(TextContent(text="")))
        stop = StopDelta(stop_reason=self._stop_reason(self._last), stop_sequence=self._last.stop)
        ended = MessageDelta(delta=stop, usage=_usage(self._run))
        last = self._end(len(self._blocks) - 1)
        return [begun + last, model_event(ended), model_event(MessageStop())]

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
        for delta in deltas:
            for block, text in self._gained(delta):
                block.texts.append(text)
            await asyncio.sleep(0)
        if not self._blocks:
            self._new(TextContent(text=""))
        content = [block.filled() for block in self._blocks]
        reply = self._message(content, deltas[-1], _usage(self._run))
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
        called = any(isinstance(block.content, ToolUseContent) for block in self._blocks)
        return "tool_use" if called else "end_turn"


def _usage(run: GenerationRun) -> MessageUsage:
    return MessageUsage(
        input_tokens=len(run.request.prompt.prompt_tokens) - run.reused_tokens,
        cache_read_input_tokens=run.reused_tokens,
        output_tokens=run.output_tokens,
        output_tokens_details=MessageTokensDetails(thinking_tokens=run.reasoning_tokens),
    )
