"""Log-probabilities in the two shapes that OpenAI's protocol has for them."""

from collections.abc import Sequence

from baton.generation import TokenLogprobs, TokenSample
from router.openai.choices import LoggedToken
from router.openai.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)
from router.pieces import PieceTable

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
