"""A prompt as its reply repeats it (`echo`), and its tokens' own log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from baton.generation import TokenLogprobs
from router.openai.logprobs import finite
from router.openai.replies import CompletionLogprobs, PromptTokenScore
from router.pieces import PieceTable
from router.tokenizer import Tokenizer

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
