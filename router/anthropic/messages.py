"""The replies of POST /v1/messages, and POST /v1/messages/count_tokens: a conversation in Anthropic's words."""

from collections.abc import Sequence

from starlette.requests import Request

from baton.errors import BatonError
from baton.generation import FinishReason
from router.anthropic.replies import (
    ContentBlockStart,
    ContentBlockStop,
    CountedTokens,
    MessageDelta,
    MessageReply,
    MessageStart,
    MessageStop,
    MessageUsage,
    StopDelta,
    StopReason,
    TextContent,
)
from router.anthropic.requests import CountTokensRequest
from router.generation.generation_run import Delta, GenerationRun
from router.generation.model_catalog import ModelCatalog
from router.generation.planner import RequestContext
from router.generation.prompt_encoder import PromptEncoder
from router.http.account import account_of
from router.http.body import BodyReader
from router.http.errors import anthropic_error
from router.http.streaming import json_text, model_event, named_event
from router.ports import Timing

_DELTA = b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":%b}}'


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

    message_start → content_block_start → content_block_delta … → content_block_stop → message_delta → message_stop
    """

    def __init__(self, context: RequestContext, run: GenerationRun) -> None:
        self._context = context
        self._run = run
        self._last: Delta | None = None

    def opening(self) -> bytes:
        """The message and its one block, both empty. What of the prompt a cache held is known at the end only."""
        usage = MessageUsage(
            input_tokens=len(self._run.request.prompt.prompt_tokens), output_tokens=0
        )
        message = self._message([], None, usage)
        return model_event(MessageStart(message=message)) + model_event(ContentBlockStart())

    def piece(self, delta: Delta) -> bytes:
        """The text, if there is some; the last delta may have none."""
        self._last = delta
        if not delta.text:
            return b""
        return named_event("content_block_delta", _DELTA % json_text(delta.text))

    async def before(self, deltas: Sequence[Delta]) -> None:
        """Nothing."""

    async def closing(self, timings: Sequence[Timing]) -> list[bytes]:  # noqa: ARG002
        """The block and the message, both done."""
        assert self._last is not None
        stop = StopDelta(stop_reason=_stop_reason(self._last), stop_sequence=self._last.stop)
        ended = MessageDelta(delta=stop, usage=_usage(self._run))
        return [model_event(event) for event in (ContentBlockStop(), ended, MessageStop())]

    def fault(self, error: BatonError) -> bytes:
        """An event with the error."""
        return named_event("error", anthropic_error(error))

    async def whole(
        self,
        choices: Sequence[Sequence[Delta]],
        timings: Sequence[Timing],  # noqa: ARG002  # no place for them here
    ) -> list[bytes]:
        """The message with its one block."""
        (deltas,) = choices
        text = TextContent(text="".join(delta.text for delta in deltas))
        reply = self._message([text], deltas[-1], _usage(self._run))
        return [reply.model_dump_json().encode()]

    def _message(
        self, content: list[TextContent], last: Delta | None, usage: MessageUsage
    ) -> MessageReply:
        return MessageReply(
            id=self._context.request_id,
            model=self._context.account.model,
            content=content,
            stop_reason=None if last is None else _stop_reason(last),
            stop_sequence=None if last is None else last.stop,
            usage=usage,
        )


def _stop_reason(last: Delta) -> StopReason:
    if last.stop is not None:
        return "stop_sequence"
    return "max_tokens" if last.finish is FinishReason.LENGTH else "end_turn"


def _usage(run: GenerationRun) -> MessageUsage:
    return MessageUsage(
        input_tokens=len(run.request.prompt.prompt_tokens) - run.reused_tokens,
        cache_read_input_tokens=run.reused_tokens,
        output_tokens=run.output_tokens,
    )
