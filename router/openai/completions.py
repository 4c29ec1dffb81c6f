"""POST /v1/completions: texts or token ids in, their continuations out."""

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import BatonError
from baton.tokens import PackedTokens
from router.generation.generation_run import Delta, GenerationRun, token_ids
from router.generation.planner import RequestContext, RequestPlanner
from router.generation.prompt_encoder import PromptEncoder
from router.generation.responder import Responder
from router.guardrails.chain import GuardChain
from router.http.body import LARGE_BYTES, BodyReader, parse_body
from router.http.large_body import token_array
from router.http.streaming import fault_event
from router.openai.chunks import CUT, Chunks, TextEvents, prompt_ids_field, token_ids_field
from router.openai.logprobs import (
    Echo,
    PromptScores,
    completion_logprobs,
    echo_logprobs,
    echo_of,
    prompt_scores,
)
from router.openai.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    usage_of,
)
from router.openai.requests import CompletionRequest
from router.ports import GenerationRequest, Timing
from router.text.token_bytes import PieceTable
from router.text.tokenizer import Tokenizer


class Completions:
    """The endpoint.

    Args:
        bodies: Reads what was sent.
        planner: Takes the request, and plans what is generated.
        prompts: Makes token ids of what was sent.
        responder: Runs it and replies.
        pieces: What single tokens spell.
        tokenizer: Repeats prompts as text.
        guards: Where there are any, a prompt is not repeated as it was sent.
    """

    def __init__(
        self,
        bodies: BodyReader,
        planner: RequestPlanner,
        prompts: PromptEncoder,
        responder: Responder,
        pieces: PieceTable,
        tokenizer: Tokenizer,
        guards: GuardChain,
    ) -> None:
        self._bodies = bodies
        self._planner = planner
        self._prompts = prompts
        self._responder = responder
        self._pieces = pieces
        self._tokenizer = tokenizer
        self._guards = guards

    async def __call__(self, request: Request) -> Response:
        """Continues one or several prompts."""
        raw = await self._bodies.read_bytes(request)
        if len(raw) > LARGE_BYTES:
            body = await self._bodies.parse(raw, CompletionRequest)
        else:
            body = read_completion(raw)
        context = await self._planner.accept(request, body, "cmpl")
        planned = self._planner.plan(context, body, await self._token_ids(body, context))
        runs = self._responder.runs(body, planned)
        echoes = await self._echoes(body, planned)
        writer = CompletionWriter(context, body, runs, echoes, self._pieces)
        return await self._responder.respond(
            request, context.account, runs, writer, stream=body.stream
        )

    async def _token_ids(
        self, body: CompletionRequest, context: RequestContext
    ) -> Sequence[Sequence[int]]:
        special = body.add_special_tokens
        if body.suffix and isinstance(body.prompt, str):
            asked = (body.prompt, body.suffix, context)
            return [await self._prompts.of_infill(*asked, add_special_tokens=special)]
        return await self._prompts.of_prompts(body.prompts, context, add_special_tokens=special)

    async def _echoes(
        self, body: CompletionRequest, planned: Sequence[GenerationRequest]
    ) -> list[Echo]:
        """What is repeated of each prompt, if anything is: as it was sent, or what was left of it."""
        if not body.echo:
            return []
        texts = [p if isinstance(p, str) else None for p in body.prompts]
        if body.truncate_prompt_tokens is not None or self._guards.active:
            texts = [None] * len(texts)
        return [
            await echo_of(text, request.prompt.prompt_tokens, self._tokenizer)
            for text, request in zip(texts, planned, strict=True)
        ]


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


class CompletionWriter:
    """Writes deltas as OpenAI's (older) text completions.

    Args:
        context: The request.
        body: What its client asked for.
        runs: One per prompt.
        echoes: One per prompt, or none at all.
        pieces: What single tokens spell.
    """

    def __init__(
        self,
        context: RequestContext,
        body: CompletionRequest,
        runs: Sequence[GenerationRun],
        echoes: Sequence[Echo],
        pieces: PieceTable,
    ) -> None:
        self._context = context
        self._body = body
        self._runs = runs
        self._echoes = echoes
        self._pieces = pieces
        self._with_tokens = bool(body.return_token_ids)
        self._begun = set[int]()
        self._has_head = bool(echoes) or self._with_tokens
        self._chunks = Chunks("text_completion", context, body, runs)
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

    def closing(self, timings: Sequence[Timing]) -> bytes:
        """As every stream of chunks."""
        return self._chunks.end(timings)

    def fault(self, error: BatonError) -> bytes:
        """An event with the error."""
        return fault_event(error)

    def whole(self, choices: Sequence[Sequence[Delta]], timings: Sequence[Timing]) -> Completion:
        """The reply with every choice's whole text."""
        several = list(timings) if len(timings) > 1 else None
        return Completion(
            id=self._context.request_id,
            created=self._context.created,
            model=self._context.account.model,
            choices=[
                self._choice(number, index, choices[index])
                for number, index in enumerate(self._best(choices))
            ],
            usage=usage_of(self._runs),
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
        echo, prompt = self._echo(index), self._run(index).request.prompt
        return CompletionChoice(
            index=number,
            text=(echo.text if echo else "") + "".join(delta.text for delta in deltas),
            logprobs=_joined(self._echoed_logprobs(index), self._logprobs(deltas)),
            finish_reason=finish.value,
            token_ids=token_ids(deltas) if self._with_tokens else None,
            prompt_token_ids=list(prompt.prompt_tokens) if self._with_tokens else None,
            prompt_logprobs=self._prompt_scores(index),
        )

    def _run(self, index: int) -> GenerationRun:
        return self._runs[index // self._body.num_samples]

    def _echo(self, index: int) -> Echo | None:
        return self._echoes[index // self._body.num_samples] if self._echoes else None

    def _prompt_scores(self, index: int) -> PromptScores | None:
        run, count = self._run(index), self._body.prompt_logprobs
        if count is None or run.prompt_logprobs is None:
            return None
        tokens = run.request.prompt.prompt_tokens
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


def take_token_prompt(body: bytes) -> tuple[bytes, PackedTokens] | None:
    """The body with a short prompt in the place of its long one, and that prompt.

    None for every other body, and for one with any fault: the check that follows finds the fault, or none.
    """
    if len(body) < _WORTH_BYTES:
        return None
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # too deep: the check says so
        return None
    tokens = token_array(bytes(fields.get("prompt", b"")))
    if tokens is None:
        return None
    fields["prompt"] = msgspec.Raw(b"[0]")
    return msgspec.json.encode(fields), tokens
