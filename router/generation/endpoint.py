"""The way of a request that holds a conversation, the same in every API: read, take, make token ids, plan, run,
reply.
"""

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from router.generation.generation_run import GenerationRun
from router.generation.planner import RequestContext, RequestPlanner
from router.generation.prompt_encoder import PromptEncoder
from router.generation.responder import ReplyWriter, Responder
from router.generation.sampling import SamplingBody
from router.http.body import BodyReader
from router.templates.renderer import Conversation

_Body = TypeVar("_Body", bound=SamplingBody)


class ConversationEndpoint(Generic[_Body]):
    """Answers conversations in the protocol of one API.

    Args:
        schema: What clients send.
        conversation_of: What of that is the conversation.
        writer_of: Writes what is generated as the API's replies.
        id_prefix: Begins the ids of those.
        bodies: Reads what was sent.
        planner: Takes the request, and plans what is generated.
        prompts: Makes token ids of the conversation.
        responder: Runs what was planned and replies.
    """

    def __init__(
        self,
        schema: type[_Body],
        conversation_of: Callable[[_Body], Conversation],
        writer_of: Callable[[RequestContext, _Body, GenerationRun], ReplyWriter],
        id_prefix: str,
        *,
        bodies: BodyReader,
        planner: RequestPlanner,
        prompts: PromptEncoder,
        responder: Responder,
    ) -> None:
        self._schema = schema
        self._conversation_of = conversation_of
        self._writer_of = writer_of
        self._id_prefix = id_prefix
        self._bodies = bodies
        self._planner = planner
        self._prompts = prompts
        self._responder = responder

    async def __call__(self, request: Request) -> Response:
        """Answers one conversation."""
        body = await self._bodies.read(request, self._schema)
        context = await self._planner.accept(request, body, self._id_prefix)
        conversation = self._conversation_of(body)
        context, prompt = await self._planner.check_form_beside(
            request, context, body, partial(self._prompts.of_conversation, conversation, context)
        )
        if body.tells_reasoning:
            end = await self._prompts.end_of(self._planner.truncated(context, body, prompt))
            context = await self._planner.behind_prompt(context, body, end)
        bad_words = await self._prompts.of_bad_words(
            body.bad_words or (), context.account.tenant.tenant_id
        )
        planned = self._planner.plan(context, body, [prompt], bad_words)
        (run,) = self._responder.runs(body, planned, in_reasoning=context.in_reasoning)
        writer = self._writer_of(context, body, run)
        return await self._responder.respond(
            request, context.account, [run], writer, stream=body.stream
        )
