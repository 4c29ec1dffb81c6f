"""POST /v1/completions: texts or token ids in, their continuations out."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import BatonError, InvalidRequestError
from baton.tokens import PackedTokens
from router.generation.generation_run import Delta, GenerationRun, take_logged, token_ids
from router.generation.planner import RequestContext, RequestPlanner
from router.generation.prompt_encoder import PromptEncoder
from router.generation.responder import Responder
from router.guardrails.chain import GuardChain
from router.http.body import BodyReader, parse_body
from router.http.fields import MAX_REPEATED
from router.http.large_body import token_array
from router.http.streaming import CUT, KEEP_ALIVE, Filling, fault_event, json_array
from router.openai.chunks import IDS_AT_ONCE, Chunks, TextEvents, token_ids_field
from router.openai.logprobs import (
    CompletionColumns,
    Echo,
    completion_entries,
    completion_logprobs,
    echo_logprobs,
    echo_of,
    joined,
    prompt_scores,
    token_id_name,
)
from router.openai.replies import (
    Completion,
    CompletionChoice,
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
        body = await self._bodies.read(request, CompletionRequest, parse_short=read_completion)
        context = await self._planner.accept(request, body, "cmpl")
        context, prompts = await self._planner.check_form_beside(
            request, context, body, partial(self._token_ids, body, context)
        )
        bad_words = await self._prompts.of_bad_words(
            body.bad_words or (), context.account.tenant.tenant_id
        )
        planned = self._planner.plan(context, body, prompts, bad_words)
        _check_repeated(body, planned)
        runs = self._responder.runs(body, planned)
        echoes = await self._echoes(body, planned)
        writer = CompletionWriter(context, body, runs, echoes, self._pieces)
        return await self._responder.respond(
            request, context.account, runs, writer, stream=body.stream
        )

    async def _token_ids(
        self, body: CompletionRequest, context: RequestContext
    ) -> Sequence[Sequence[int]]:
        special = body.add_special_tokens is not False
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


def _check_repeated(body: CompletionRequest, planned: Sequence[GenerationRequest]) -> None:
    """What is said of a prompt is said with each of its choices: there may not be too much of it."""
    tokens = sum(len(request.prompt.prompt_tokens) for request in planned)
    scored = 0 if body.num_prompt_logprobs is None else 1 + body.num_prompt_logprobs
    repeated = (bool(body.echo or body.return_token_ids) + scored) * tokens * (body.n or 1)
    if (body.n or 1) > 1 and repeated > MAX_REPEATED:
        raise InvalidRequestError(
            f"n: the reply would repeat {repeated} tokens of prompts and figures about them, at most {MAX_REPEATED} are.",
            param="n",
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenPrompt:
    """JSON of what is said of one prompt with each of its choices; None for what is not asked for."""

    token_ids: bytes
    logprobs: CompletionColumns | None
    scores: bytes | None


class CompletionWriter:
    """Writes deltas as OpenAI's (older) text completions.

    Args:
        context: The request.
        body: What its client asked for.
        runs: One per prompt.
        echoes: One per prompt, or none at all.
        pieces: What single tokens spell.
    """

    keep_alive = KEEP_ALIVE

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
        self._token_name = token_id_name if body.return_tokens_as_token_ids else pieces.label_of
        self._with_tokens = bool(body.return_token_ids)
        self._begun = set[int]()
        self._written: dict[int, _WrittenPrompt] = {}
        self._has_head = bool(echoes) or self._with_tokens
        self._chunks = Chunks("text_completion", context, body, runs)
        more_than_text = body.logprobs is not None or self._has_head or body.usage_in_chunks
        self._text_event = None if more_than_text else TextEvents(self._event_around_text)

    def opening(self) -> bytes:
        """A stream begins with its first text."""
        return b""

    async def before(self, deltas: Sequence[Delta]) -> None:
        """Writes what stands before the first token of their choices."""
        if self._has_head:
            for delta in deltas:
                await self._write_prompt(delta.index)

    def piece(self, delta: Delta) -> bytes:
        """One chunk with the text and, at the end, why it ended."""
        if self._text_event is not None and delta.finish is None:  # nearly always
            return self._text_event(delta)
        head = b""
        if self._has_head and delta.index not in self._begun:
            head = self._choice_head(delta.index)
        return head + self._event(
            delta.index,
            msgspec.json.encode(delta.text),
            self._logprobs_json(delta),
            msgspec.json.encode(delta.finish.value if delta.finish else None),
            token_ids_field(delta) if self._with_tokens else b"",
        )

    def _choice_head(self, index: int) -> bytes:
        """A chunk with what stands before a choice's own tokens: its prompt."""
        self._begun.add(index)
        echo, prompt = self._echo(index), self._written[index // self._body.num_samples]
        ids = b',"prompt_token_ids":%b,"token_ids":[]' % prompt.token_ids
        return self._event(
            index,
            msgspec.json.encode(echo.text if echo else ""),
            b"null" if prompt.logprobs is None else prompt.logprobs.json(),
            b"null",
            ids if self._with_tokens else b"",
        )

    def _event_around_text(self, index: int) -> bytes:
        return self._event(index, CUT, b"null", b"null", b"")

    def _event(self, index: int, text: bytes, logprobs: bytes, finish: bytes, more: bytes) -> bytes:
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}'
        return self._chunks.chunk(choice % (index, text, logprobs, finish, more))

    async def closing(self, timings: Sequence[Timing]) -> list[bytes]:
        """As every stream of chunks."""
        return [self._chunks.end(timings)]

    def fault(self, error: BatonError) -> bytes:
        """An event with the error."""
        return fault_event(error)

    async def whole(
        self, choices: Sequence[Sequence[Delta]], timings: Sequence[Timing]
    ) -> list[bytes]:
        """The reply with every choice's whole text."""
        several = list(timings) if len(timings) > 1 else None
        best = self._best(len(choices))
        reply = Completion(
            id=self._context.request_id,
            created=self._context.created,
            model=self._context.account.model,
            choices=[
                self._choice(number, index, choices[index]) for number, index in enumerate(best)
            ],
            usage=usage_of(self._runs),
            baton=several or (timings[0] if timings else None),
        ).model_dump()
        large, count = Filling(), self._body.logprobs
        for choice, index in zip(reply["choices"], best, strict=True):
            prompt = await self._write_prompt(index)
            if count is not None:
                written = await self._logprobs(choices[index], prompt, count)
                choice["logprobs"] = large.place(written)
            if self._with_tokens:
                choice["prompt_token_ids"] = large.place(prompt.token_ids)
            if prompt.scores is not None:
                choice["prompt_logprobs"] = large.place(prompt.scores)
        return large.filled(msgspec.json.encode(reply))

    async def _write_prompt(self, index: int) -> "_WrittenPrompt":
        """What is said of a choice's prompt, the same for all choices of that."""
        place = index // self._body.num_samples
        written = self._written.get(place)
        if written is None:
            tokens = self._runs[place].request.prompt.prompt_tokens
            written = self._written[place] = _WrittenPrompt(
                token_ids=await json_array(tokens, IDS_AT_ONCE) if self._with_tokens else b"[]",
                logprobs=await self._echoed_logprobs(index),
                scores=await self._prompt_scores(index),
            )
        return written

    def _best(self, num_choices: int) -> list[int]:
        """Which of so many choices are shown: of each prompt's the `n` likeliest by the mean over their tokens;
        a search has them in order.
        """
        shown, drawn = self._body.n or 1, self._body.num_samples
        if shown == drawn:
            return list(range(num_choices))
        best: list[int] = []
        for begin in range(0, num_choices, drawn):
            group = range(begin, begin + drawn)
            if self._body.use_beam_search:
                best += group[:shown]
                continue
            run = self._run(begin)
            best += sorted(group, key=lambda i: run.mean_logprob(i % drawn), reverse=True)[:shown]
        return best

    def _choice(self, number: int, index: int, deltas: Sequence[Delta]) -> CompletionChoice:
        finish = deltas[-1].finish
        assert finish is not None
        echo = self._echo(index)
        return CompletionChoice(
            index=number,
            text=(echo.text if echo else "") + "".join(delta.text for delta in deltas),
            finish_reason=finish.value,
            token_ids=token_ids(deltas) if self._with_tokens else None,
        )

    def _run(self, index: int) -> GenerationRun:
        return self._runs[index // self._body.num_samples]

    def _echo(self, index: int) -> Echo | None:
        return self._echoes[index // self._body.num_samples] if self._echoes else None

    async def _prompt_scores(self, index: int) -> bytes | None:
        run, count = self._run(index), self._body.prompt_logprobs
        if count is None or run.prompt_logprobs is None:
            return None
        tokens = run.request.prompt.prompt_tokens
        return await prompt_scores(tokens, run.prompt_logprobs, count, self._pieces)

    async def _echoed_logprobs(self, index: int) -> CompletionColumns | None:
        echo, scores = self._echo(index), self._run(index).prompt_logprobs
        if echo is None or scores is None or self._body.logprobs is None:
            return None
        return await echo_logprobs(echo, scores, self._body.logprobs, self._token_name)

    async def _logprobs(
        self, deltas: Sequence[Delta], prompt: "_WrittenPrompt", count: int
    ) -> bytes:
        offset = self._text_before(deltas[0].index)
        drawn = await completion_logprobs(take_logged(deltas), count, self._token_name, offset)
        whole = drawn if prompt.logprobs is None else joined([prompt.logprobs, drawn])
        return whole.json()

    def _logprobs_json(self, delta: Delta) -> bytes:
        count = self._body.logprobs
        if count is None:
            return b"null"
        offset = self._text_before(delta.index)
        return completion_entries(delta.logged, count, self._token_name, offset).json()

    def _text_before(self, index: int) -> int:
        echo = self._echo(index)
        return len(echo.text) if echo else 0


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
