"""How /v1/completions writes what was drawn: whole, or as the chunks of a stream."""

from collections.abc import Sequence

import msgspec

from baton.errors import BatonError
from router.openai.choices import Delta, token_ids
from router.openai.chunks import Chunks, prompt_ids_field, token_ids_field
from router.openai.connection import fault_event
from router.openai.echo import Echo, PromptScores, echo_logprobs, prompt_scores
from router.openai.jobs import JobRun
from router.openai.logprobs import completion_logprobs
from router.openai.order import ReplyHead
from router.openai.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TimingReply,
    Usage,
)
from router.openai.requests import CompletionRequest
from router.openai.text_events import CUT, TextEvents
from router.pieces import PieceTable


class CompletionShape:
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
