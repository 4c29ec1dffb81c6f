"""POST /v1/chat/completions: a conversation in, the assistant's next message out."""

import time
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from baton.ids import new_request_id
from router.openai.answer import ReplyHead, answer, token_ids, token_ids_field
from router.openai.body import read_body
from router.openai.choices import Delta
from router.openai.guarding import checked_messages
from router.openai.length import check_messages
from router.openai.logprobs import chat_logprobs
from router.openai.plan import plan_runs
from router.openai.replies import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    TimingReply,
    Usage,
)
from router.openai.requests import ChatCompletionRequest
from router.openai.sampling import chat_limit
from router.openai.serving import Serving
from router.openai.visit import visit_of
from router.pieces import PieceTable


async def chat_completions(request: Request, serving: Serving) -> Response:
    """Answers one conversation."""
    body = await read_body(request, ChatCompletionRequest, serving.max_body_bytes)
    visit = visit_of(request)
    head = ReplyHead(
        request_id=new_request_id("chatcmpl"),
        created=int(time.time()),
        model=serving.require_name(body.model, visit),
    )
    model = await serving.require_model()
    messages = await checked_messages(
        [message.for_template() for message in body.messages], serving.guards, visit
    )
    check_messages(messages, model, serving.tokenizer)
    prompt = await serving.tokenizer.encode_chat(
        messages, add_generation_prompt=body.add_generation_prompt
    )
    shape = ChatShape(head, body, serving.tokenizer.pieces)
    runs = plan_runs(
        serving,
        body,
        [prompt],
        tenant=visit.tenant,
        model=model,
        request_id=head.request_id,
        limit=chat_limit(body),
        logprobs=shape.logprobs,
    )
    return await answer(request, serving, body, runs, shape)


class ChatShape:
    """Writes deltas as OpenAI's chat completions.

    The per-token path joins bytes that were made once with the JSON of the text; no model object per token.

    Attributes:
        logprobs: How many top log-probabilities are wanted per token; None for none at all.
    """

    def __init__(self, head: ReplyHead, body: ChatCompletionRequest, pieces: PieceTable) -> None:
        self.logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self._head = head
        self._pieces = pieces
        self._num_choices = body.n or 1
        self._with_tokens = bool(body.return_token_ids)
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        self._event_head = head.as_json("chat.completion.chunk")
        self._event_tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"

    def opening(self) -> bytes:
        """Each choice's first chunk names the role."""
        role = b'{"role":"assistant","content":""}'
        return b"".join(self._event(i, role, b"null", b"null") for i in range(self._num_choices))

    def piece(self, delta: Delta) -> bytes:
        """A chunk with the text, if there is some, and a chunk with the end, if it is there."""
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

    def usage_piece(self, usage: Usage) -> bytes:
        """A chunk without choices."""
        tail = b',"choices":[],"usage":' + usage.model_dump_json().encode()
        return self._event_head + tail + b"}\n\n"

    def whole(
        self, choices: Sequence[Sequence[Delta]], usage: Usage, timings: Sequence[TimingReply]
    ) -> ChatCompletion:
        """The reply with every choice's whole message."""
        return ChatCompletion(
            id=self._head.request_id,
            created=self._head.created,
            model=self._head.model,
            choices=[self._choice(i, deltas) for i, deltas in enumerate(choices)],
            usage=usage,
            baton=timings[0] if timings else None,
        )

    def _choice(self, index: int, deltas: Sequence[Delta]) -> ChatChoice:
        finish = deltas[-1].finish
        assert finish is not None
        return ChatChoice(
            index=index,
            message=AssistantMessage(content="".join(delta.text for delta in deltas)),
            logprobs=self._logprobs(deltas),
            finish_reason=finish.value,
            token_ids=token_ids(deltas) if self._with_tokens else None,
        )

    def _logprobs(self, deltas: Sequence[Delta]) -> ChatLogprobs | None:
        if self.logprobs is None:
            return None
        logged = [token for delta in deltas for token in delta.logged]
        return chat_logprobs(logged, self.logprobs, self._pieces)

    def _logprobs_json(self, delta: Delta) -> bytes:
        logprobs = self._logprobs([delta])
        return b"null" if logprobs is None else logprobs.model_dump_json().encode()

    def _event(self, index: int, delta: bytes, logprobs: bytes, finish: bytes) -> bytes:
        return b'%b,"choices":[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._event_head,
            index,
            delta,
            logprobs,
            finish,
            self._event_tail,
        )
