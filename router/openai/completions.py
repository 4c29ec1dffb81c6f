"""POST /v1/completions: texts or token ids in, their continuations out."""

import time
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from baton.ids import new_request_id
from router.openai.answer import ReplyHead, answer, token_ids, token_ids_field
from router.openai.body import read_body
from router.openai.choices import Delta
from router.openai.guarding import checked_prompts
from router.openai.length import check_text
from router.openai.logprobs import completion_logprobs
from router.openai.plan import plan_runs
from router.openai.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TimingReply,
    Usage,
)
from router.openai.requests import CompletionRequest
from router.openai.sampling import completion_limit
from router.openai.serving import Serving
from router.openai.visit import Visit, visit_of
from router.openai.vocabulary import check_vocabulary
from router.pieces import PieceTable
from router.ports import ServedModel


async def completions(request: Request, serving: Serving) -> Response:
    """Continues one or several prompts."""
    body = await read_body(request, CompletionRequest, serving.max_body_bytes)
    visit = visit_of(request)
    head = ReplyHead(
        request_id=new_request_id("cmpl"),
        created=int(time.time()),
        model=serving.require_name(body.model, visit),
    )
    model = await serving.require_model()
    runs = plan_runs(
        serving,
        body,
        await _token_prompts(body, serving, model, visit),
        tenant=visit.tenant,
        model=model,
        request_id=head.request_id,
        limit=completion_limit(body),
        logprobs=body.logprobs,
    )
    shape = CompletionShape(head, body, serving.tokenizer.pieces)
    return await answer(request, serving, body, runs, shape)


async def _token_prompts(
    body: CompletionRequest, serving: Serving, model: ServedModel, visit: Visit
) -> list[list[int]]:
    tokenizer = serving.tokenizer
    for prompt in body.prompts:
        if isinstance(prompt, str):
            check_text(prompt, model, tokenizer, "prompt")
    return [
        await tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
        if isinstance(prompt, str)
        else prompt
        for prompt in await _guarded(body.prompts, serving, model, visit)
    ]


async def _guarded(
    prompts: list[str] | list[list[int]], serving: Serving, model: ServedModel, visit: Visit
) -> Sequence[str | list[int]]:
    """The prompts as the guardrails let them pass; token ids stay what they are unless their text was replaced."""
    if not serving.guards.active:
        return prompts
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_vocabulary(prompt, model, "prompt")
    texts = [p if isinstance(p, str) else await serving.tokenizer.decode(p) for p in prompts]
    passed = await checked_prompts(texts, serving.guards, visit)
    unchanged: list[str | list[int]] = list(prompts)
    return [
        prompt if text == new else new
        for prompt, text, new in zip(unchanged, texts, passed, strict=True)
    ]


class CompletionShape:
    """Writes deltas as OpenAI's (older) text completions."""

    def __init__(self, head: ReplyHead, body: CompletionRequest, pieces: PieceTable) -> None:
        self._head = head
        self._pieces = pieces
        self._logprobs_count = body.logprobs
        self._with_tokens = bool(body.return_token_ids)
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        self._event_head = head.as_json("text_completion")
        self._event_tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"

    def opening(self) -> bytes:
        """A stream begins with its first text."""
        return b""

    def piece(self, delta: Delta) -> bytes:
        """One chunk with the text and, at the end, why it ended."""
        logprobs = self._logprobs([delta])
        return b'%b,"choices":[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}]%b' % (
            self._event_head,
            delta.index,
            msgspec.json.encode(delta.text),
            b"null" if logprobs is None else logprobs.model_dump_json().encode(),
            msgspec.json.encode(delta.finish.value if delta.finish else None),
            token_ids_field(delta) if self._with_tokens else b"",
            self._event_tail,
        )

    def usage_piece(self, usage: Usage) -> bytes:
        """A chunk without choices."""
        tail = b',"choices":[],"usage":' + usage.model_dump_json().encode()
        return self._event_head + tail + b"}\n\n"

    def whole(
        self, choices: Sequence[Sequence[Delta]], usage: Usage, timings: Sequence[TimingReply]
    ) -> Completion:
        """The reply with every choice's whole text."""
        several = list(timings) if len(timings) > 1 else None
        return Completion(
            id=self._head.request_id,
            created=self._head.created,
            model=self._head.model,
            choices=[self._choice(i, deltas) for i, deltas in enumerate(choices)],
            usage=usage,
            baton=several or (timings[0] if timings else None),
        )

    def _choice(self, index: int, deltas: Sequence[Delta]) -> CompletionChoice:
        finish = deltas[-1].finish
        assert finish is not None
        return CompletionChoice(
            index=index,
            text="".join(delta.text for delta in deltas),
            logprobs=self._logprobs(deltas),
            finish_reason=finish.value,
            token_ids=token_ids(deltas) if self._with_tokens else None,
        )

    def _logprobs(self, deltas: Sequence[Delta]) -> CompletionLogprobs | None:
        if self._logprobs_count is None:
            return None
        logged = [token for delta in deltas for token in delta.logged]
        return completion_logprobs(logged, self._logprobs_count, self._pieces)
