"""POST /v1/completions: texts or token ids in, their continuations out."""

from collections.abc import Sequence

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import BatonError
from baton.tokens import PackedTokens
from router.http.body import parse_body, read_bounded
from router.http.fields import MAX_PROMPT_TOKENS
from router.http.streaming import fault_event
from router.openai.chunks import CUT, Chunks, TextEvents, prompt_ids_field, token_ids_field
from router.openai.context import ReplyHead, RequestContext, Wanted, plan_runs, take_request
from router.openai.guardrails import checked_prompts
from router.openai.job_run import Delta, JobRun, token_ids
from router.openai.logprobs import (
    Echo,
    PromptScores,
    completion_logprobs,
    echo_logprobs,
    echo_of,
    prompt_scores,
)
from router.openai.model_limits import check_text, check_vocabulary, completion_limit
from router.openai.prompt import infill
from router.openai.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TimingReply,
    Usage,
)
from router.openai.requests import CompletionRequest
from router.openai.respond import respond
from router.openai.serving import Serving
from router.text.token_bytes import PieceTable


async def completions(request: Request, serving: Serving) -> Response:
    """Continues one or several prompts."""
    body = read_completion(await read_bounded(request, serving.max_body_bytes))
    limit = completion_limit(body)
    context = await take_request(request, serving, body, limit, "cmpl")
    prompts = await _token_prompts(body, context)
    chooses = body.num_samples > (body.n or 1)
    wanted = Wanted(
        limit=limit,
        samples=body.num_samples,
        logprobs=0 if body.logprobs is None and chooses else body.logprobs,
        prompt_logprobs=body.num_scored,
    )
    runs = plan_runs(context, body, prompts, wanted)
    echoes = await _echoes(body, runs, serving)
    writer = CompletionWriter(context.head, body, runs, echoes, serving.tokenizer.pieces)
    return await respond(request, context, runs, writer, stream=body.stream)


def read_completion(raw: bytes) -> CompletionRequest:
    """The body of a request.

    Raises:
        InvalidRequestError: Not JSON, or not what the schema allows.
    """
    taken = take_token_prompt(raw)
    if taken is None:
        return parse_body(raw, CompletionRequest)
    rest, tokens = taken
    body = parse_body(rest, CompletionRequest)
    body.prompt = tokens  # type: ignore[assignment]  # a list of token ids in all but type
    return body


async def _token_prompts(body: CompletionRequest, context: RequestContext) -> list[Sequence[int]]:
    tokenizer, special = context.serving.tokenizer, body.add_special_tokens
    for prompt in (*body.prompts, body.suffix):
        if isinstance(prompt, str):
            check_text(prompt, context.model, tokenizer, "prompt")
    if body.suffix and isinstance(body.prompt, str):
        both = [body.prompt, body.suffix]
        before, after = await checked_prompts(both, context.serving.guards, context.account)
        return [await infill(before, after, tokenizer, special=special)]
    return [
        await tokenizer.encode(prompt, add_special_tokens=special)
        if isinstance(prompt, str)
        else prompt
        for prompt in await _guarded(body.prompts, context)
    ]


async def _guarded(
    prompts: Sequence[str | Sequence[int]], context: RequestContext
) -> Sequence[str | Sequence[int]]:
    """The prompts as the guardrails let them pass; token ids stay what they are unless their text was replaced."""
    serving = context.serving
    if not serving.guards.active:
        return prompts
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_vocabulary(prompt, context.model, "prompt")
    texts = [p if isinstance(p, str) else await serving.tokenizer.decode(p) for p in prompts]
    passed = await checked_prompts(texts, serving.guards, context.account)
    return [
        prompt if text == new else new
        for prompt, text, new in zip(prompts, texts, passed, strict=True)
    ]


async def _echoes(body: CompletionRequest, runs: Sequence[JobRun], serving: Serving) -> list[Echo]:
    """What is repeated of each prompt, if anything is: as it was sent, or what was left of it."""
    if not body.echo:
        return []
    texts = [p if isinstance(p, str) else None for p in body.prompts]
    if body.truncate_prompt_tokens is not None or serving.guards.active:
        texts = [None] * len(texts)
    return [
        await echo_of(text, run.job.prompt.prompt_tokens, serving.tokenizer)
        for text, run in zip(texts, runs, strict=True)
    ]


class CompletionWriter:
    """Writes deltas as OpenAI's (older) text completions.

    Args:
        head: What every chunk repeats.
        body: The request.
        runs: One per prompt.
        echoes: One per prompt, or none at all.
        pieces: What single tokens spell.
    """

    def __init__(
        self,
        head: ReplyHead,
        body: CompletionRequest,
        runs: Sequence[JobRun],
        echoes: Sequence[Echo],
        pieces: PieceTable,
    ) -> None:
        self._head = head
        self._body = body
        self._runs = runs
        self._echoes = echoes
        self._pieces = pieces
        self._with_tokens = bool(body.return_token_ids)
        self._begun = set[int]()
        self._has_head = bool(echoes) or self._with_tokens
        self._chunks = Chunks("text_completion", head, body, runs)
        more_than_text = body.logprobs is not None or self._has_head or body.usage_in_chunks
        self._text_event = None if more_than_text else TextEvents(self._event_around_text)

    def opening(self) -> bytes:
        """A stream begins with its first text."""
        return b""

    def piece(self, delta: Delta) -> bytes:
        """One chunk with the text and, at the end, why it ended."""
        if self._text_event is not None and delta.finish is None:  # nearly always
            return self._text_event(delta)
        head = b""
        if self._has_head and delta.index not in self._begun:
            head = self._choice_head(delta.index)
        logprobs = self._logprobs([delta])
        return head + self._event(
            delta.index,
            msgspec.json.encode(delta.text),
            b"null" if logprobs is None else logprobs.model_dump_json().encode(),
            msgspec.json.encode(delta.finish.value if delta.finish else None),
            token_ids_field(delta) if self._with_tokens else b"",
        )

    def _choice_head(self, index: int) -> bytes:
        """A chunk with what stands before a choice's own tokens: its prompt."""
        self._begun.add(index)
        echo, logprobs = self._echo(index), self._echoed_logprobs(index)
        ids = prompt_ids_field(self._run(index)) + b',"token_ids":[]'
        return self._event(
            index,
            msgspec.json.encode(echo.text if echo else ""),
            b"null" if logprobs is None else logprobs.model_dump_json().encode(),
            b"null",
            ids if self._with_tokens else b"",
        )

    def _event_around_text(self, index: int) -> bytes:
        return self._event(index, CUT, b"null", b"null", b"")

    def _event(self, index: int, text: bytes, logprobs: bytes, finish: bytes, more: bytes) -> bytes:
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}'
        return self._chunks.chunk(choice % (index, text, logprobs, finish, more))

    def closing(self, usage: Usage, timings: Sequence[TimingReply]) -> bytes:
        """As every stream of chunks."""
        return self._chunks.end(usage, timings)

    def fault(self, error: BatonError) -> bytes:
        """An event with the error."""
        return fault_event(error)

    def whole(
        self, choices: Sequence[Sequence[Delta]], usage: Usage, timings: Sequence[TimingReply]
    ) -> Completion:
        """The reply with every choice's whole text."""
        several = list(timings) if len(timings) > 1 else None
        return Completion(
            id=self._head.request_id,
            created=self._head.created,
            model=self._head.model,
            choices=[
                self._choice(number, index, choices[index])
                for number, index in enumerate(self._best(choices))
            ],
            usage=usage,
            baton=several or (timings[0] if timings else None),
        )

    def _best(self, choices: Sequence[Sequence[Delta]]) -> list[int]:
        """Which choices are shown: of each prompt's the `n` likeliest by the mean over their tokens."""
        shown, drawn = self._body.n or 1, self._body.num_samples
        if shown == drawn:
            return list(range(len(choices)))
        best: list[int] = []
        for begin in range(0, len(choices), drawn):
            group = range(begin, begin + drawn)
            best += sorted(group, key=lambda i: _mean_logprob(choices[i]), reverse=True)[:shown]
        return best

    def _choice(self, number: int, index: int, deltas: Sequence[Delta]) -> CompletionChoice:
        finish = deltas[-1].finish
        assert finish is not None
        echo, prompt = self._echo(index), self._run(index).job.prompt
        return CompletionChoice(
            index=number,
            text=(echo.text if echo else "") + "".join(delta.text for delta in deltas),
            logprobs=_joined(self._echoed_logprobs(index), self._logprobs(deltas)),
            finish_reason=finish.value,
            token_ids=token_ids(deltas) if self._with_tokens else None,
            prompt_token_ids=list(prompt.prompt_tokens) if self._with_tokens else None,
            prompt_logprobs=self._prompt_scores(index),
        )

    def _run(self, index: int) -> JobRun:
        return self._runs[index // self._body.num_samples]

    def _echo(self, index: int) -> Echo | None:
        return self._echoes[index // self._body.num_samples] if self._echoes else None

    def _prompt_scores(self, index: int) -> PromptScores | None:
        run, count = self._run(index), self._body.prompt_logprobs
        if count is None or run.prompt_logprobs is None:
            return None
        tokens = run.job.prompt.prompt_tokens
        return prompt_scores(tokens, run.prompt_logprobs, count, self._pieces)

    def _echoed_logprobs(self, index: int) -> CompletionLogprobs | None:
        echo, scores = self._echo(index), self._run(index).prompt_logprobs
        if echo is None or scores is None or self._body.logprobs is None:
            return None
        return echo_logprobs(echo, scores, self._body.logprobs, self._pieces)

    def _logprobs(self, deltas: Sequence[Delta]) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        echo = self._echo(deltas[0].index)
        logged = [token for delta in deltas for token in delta.logged]
        offset = len(echo.text) if echo else 0
        return completion_logprobs(logged, self._body.logprobs, self._pieces, offset)


def _mean_logprob(deltas: Sequence[Delta]) -> float:
    logprobs = [
        token.sample.logprobs.logprob
        for delta in deltas
        for token in delta.logged
        if token.sample.logprobs is not None
    ]
    return sum(logprobs) / max(1, len(logprobs))


def _joined(
    prompt: CompletionLogprobs | None, output: CompletionLogprobs | None
) -> CompletionLogprobs | None:
    if prompt is None or output is None:
        return output
    return CompletionLogprobs(
        text_offset=prompt.text_offset + output.text_offset,
        token_logprobs=prompt.token_logprobs + output.token_logprobs,
        tokens=prompt.tokens + output.tokens,
        top_logprobs=prompt.top_logprobs + output.top_logprobs,
    )


_WORTH_BYTES = 4096
"""Shorter bodies are checked as they are, in less time than it takes to look into them."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NUMBERS = b"0123456789, \t\r\n"
_TOO_LARGE = 2**31


def take_token_prompt(body: bytes) -> tuple[bytes, PackedTokens] | None:
    """The body with a short prompt in the place of its long one, and that prompt.

    None for every other body, and for one with any fault: whoever checks it then finds the fault, or none.
    """
    if len(body) < _WORTH_BYTES:
        return None
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # too deep: the check says so
        return None
    tokens = _token_array(bytes(fields.get("prompt", b"")))
    if tokens is None:
        return None
    fields["prompt"] = msgspec.Raw(b"[0]")
    return msgspec.json.encode(fields), tokens


def _token_array(raw: bytes) -> PackedTokens | None:
    inner = raw[1:-1]
    # It is JSON, so what consists of these signs is a list of whole numbers.
    if raw[:1] != b"[" or not inner.strip() or inner.translate(None, _NUMBERS):
        return None
    tokens = np.fromstring(
        inner, dtype=np.int64, sep=","
    )  # one that does not fit becomes the largest
    if len(tokens) > MAX_PROMPT_TOKENS or tokens.max() >= _TOO_LARGE:
        return None
    return PackedTokens(tokens.astype("<u4").tobytes())
