"""Log-probabilities in the shapes that OpenAI's protocol has for them, of generated tokens and of an echoed prompt's."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from baton.generation import TokenLogprobs, TokenSample
from router.generation.generation_run import LoggedToken
from router.openai.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptTokenScore,
    TopLogprob,
)
from router.text.token_bytes import PieceTable
from router.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def chat_logprobs(logged: Sequence[LoggedToken], count: int, pieces: PieceTable) -> ChatLogprobs:
    """One entry per token, each with its `count` likeliest."""
    return ChatLogprobs(content=[_chat_entry(token.sample, count, pieces) for token in logged])


def completion_logprobs(
    logged: Sequence[LoggedToken], count: int, pieces: PieceTable, offset: int = 0
) -> CompletionLogprobs:
    """Parallel lists. The drawn token is always among the tops, so that there may be `count + 1`.

    Args:
        logged: The tokens.
        count: How many likeliest are listed.
        pieces: What tokens spell.
        offset: Characters that stand before the first of the choice's own.
    """
    lists = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token in logged:
        sample, known = token.sample, _known(token.sample)
        drawn = {pieces.label_of(sample.token): finite(known.logprob)}
        top = {pieces.label_of(i): finite(logprob) for i, logprob in known.top[:count]}
        lists.text_offset.append(offset + token.text_offset)
        lists.token_logprobs.append(finite(known.logprob))
        lists.tokens.append(pieces.label_of(sample.token))
        lists.top_logprobs.append(drawn | top)
    return lists


def _chat_entry(sample: TokenSample, count: int, pieces: PieceTable) -> ChatTokenLogprob:
    known = _known(sample)
    top = [_top_entry(i, logprob, pieces) for i, logprob in known.top[:count]]
    drawn = _top_entry(sample.token, known.logprob, pieces)
    return ChatTokenLogprob(
        token=drawn.token, logprob=drawn.logprob, bytes=drawn.bytes, top_logprobs=top
    )


def _top_entry(token_id: int, logprob: float, pieces: PieceTable) -> TopLogprob:
    return TopLogprob(
        token=pieces.text_of(token_id),
        logprob=finite(logprob),
        bytes=list(pieces.bytes_of(token_id)),
    )


def _known(sample: TokenSample) -> TokenLogprobs:
    assert sample.logprobs is not None
    return sample.logprobs


def finite(logprob: float) -> float:
    """As JSON can write it."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # not a number is no more likely


PromptScores = list[dict[int, PromptTokenScore] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """One prompt.

    Attributes:
        text: What is shown of it.
        tokens: Its ids.
        offsets: Where in `text` each token begins.
    """

    text: str
    tokens: Sequence[int]
    offsets: Sequence[int]


async def echo_of(text: str | None, tokens: Sequence[int], tokenizer: Tokenizer) -> Echo:
    """The echo of `tokens`; `text` is what they were made from, if they were."""
    steps = await tokenizer.decode_steps(tokens)
    offsets = [0, *accumulate(len(step) for step in steps)][:-1]
    shown = "".join(steps) if text is None else text
    return Echo(text=shown, tokens=tokens, offsets=offsets)


def echo_logprobs(
    echo: Echo, scores: Sequence[TokenLogprobs], count: int, pieces: PieceTable
) -> CompletionLogprobs:
    """The prompt's part of a completion's log-probabilities; nothing stands before the first token, so it has none."""
    labels = [pieces.label_of(token) for token in echo.tokens]
    tops = [
        {label: finite(score.logprob)}
        | {pieces.label_of(i): finite(logprob) for i, logprob in score.top[:count]}
        for label, score in zip(labels[1:], scores, strict=True)
    ]
    return CompletionLogprobs(
        text_offset=list(echo.offsets),
        token_logprobs=[None, *(finite(score.logprob) for score in scores)],
        tokens=labels,
        top_logprobs=[None, *tops],
    )


def prompt_scores(
    tokens: Sequence[int], scores: Sequence[TokenLogprobs], count: int, pieces: PieceTable
) -> PromptScores:
    """What vLLM's clients know as `prompt_logprobs`: per token null, or the token's and the likeliest tokens' by id."""
    return [
        None,
        *(
            _entry(token, score, count, pieces)
            for token, score in zip(tokens[1:], scores, strict=True)
        ),
    ]


def _entry(
    token: int, score: TokenLogprobs, count: int, pieces: PieceTable
) -> dict[int, PromptTokenScore]:
    ranked = enumerate(score.top[:count], start=1)
    likeliest = {
        i: PromptTokenScore(logprob=finite(logprob), rank=rank, decoded_token=pieces.text_of(i))
        for rank, (i, logprob) in ranked
    }
    own = PromptTokenScore(
        logprob=finite(score.logprob), rank=score.rank, decoded_token=pieces.text_of(token)
    )
    return {token: own} | likeliest | {token: own}
