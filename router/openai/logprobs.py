"""Log-probabilities in the shapes that OpenAI's protocol has for them,
of generated tokens and of an echoed prompt's.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

import msgspec

from baton.generation import TokenLogprobs
from router.generation.generation_run import LoggedToken
from router.http.streaming import json_array, json_array_pieces
from router.text.token_bytes import PieceTable
from router.text.tokenizer import Tokenizer

Entry = dict[str, object]
"""What one of the models in `router.openai.replies` describes."""

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""

AT_ONCE = 16
"""Tokens that are written before the event loop runs again; each may list twenty others."""

TokenName = Callable[[int], str]
"""What a token is called, by its id."""


def token_id_name(token_id: int) -> str:
    """What vLLM calls a token whose text is not wanted; unlike a text, it tells any two tokens apart."""
    return f"token_id:{token_id}"


def chat_entries(
    logged: Iterable[LoggedToken], count: int, pieces: PieceTable, *, by_id: bool = False
) -> Iterator[Entry]:
    """One `ChatTokenLogprob` per token, each with its `count` likeliest;
    called by their ids where that is asked for.
    """
    name = token_id_name if by_id else pieces.text_of
    for token in logged:
        entry = _chat_token(token.token, token.logprob, name, pieces)
        entry["top_logprobs"] = [
            _chat_token(i, logprob, name, pieces) for i, logprob in token.top(count)
        ]
        yield entry


async def chat_logprobs(
    logged: Iterable[LoggedToken], count: int, pieces: PieceTable, *, by_id: bool = False
) -> list[bytes]:
    """The JSON array of these, in pieces."""
    return await json_array_pieces(chat_entries(logged, count, pieces, by_id=by_id), AT_ONCE)


def _chat_token(token_id: int, logprob: float, name: TokenName, pieces: PieceTable) -> Entry:
    spelt = list(pieces.bytes_of(token_id))
    return {"token": name(token_id), "logprob": finite(logprob), "bytes": spelt}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionColumns:
    """The JSON of a `CompletionLogprobs`: an array for each of its fields."""

    text_offset: bytes
    token_logprobs: bytes
    tokens: bytes
    top_logprobs: bytes

    def json(self) -> bytes:
        """All of it."""
        return b'{"text_offset":%b,"token_logprobs":%b,"tokens":%b,"top_logprobs":%b}' % (
            self.text_offset,
            self.token_logprobs,
            self.tokens,
            self.top_logprobs,
        )


def joined(parts: Sequence[CompletionColumns]) -> CompletionColumns:
    """Those of some tokens and then of others."""
    return CompletionColumns(
        text_offset=_array([part.text_offset for part in parts]),
        token_logprobs=_array([part.token_logprobs for part in parts]),
        tokens=_array([part.tokens for part in parts]),
        top_logprobs=_array([part.top_logprobs for part in parts]),
    )


def _array(arrays: Sequence[bytes]) -> bytes:
    """One JSON array of the elements of several."""
    return b"[" + b",".join([array[1:-1] for array in arrays if len(array) > 2]) + b"]"


def completion_entries(
    logged: Sequence[LoggedToken], count: int, name: TokenName, offset: int = 0
) -> CompletionColumns:
    """The parallel lists of a few tokens. The drawn token is always among the tops, so that there may be `count + 1`.

    Args:
        logged: The tokens.
        count: How many likeliest are listed.
        name: What tokens are called.
        offset: Characters that stand before the first of the choice's own.
    """
    encode = msgspec.json.encode
    return CompletionColumns(
        text_offset=encode([offset + token.text_offset for token in logged]),
        token_logprobs=encode([finite(token.logprob) for token in logged]),
        tokens=encode([name(token.token) for token in logged]),
        top_logprobs=encode(
            [_tops(token.token, token.logprob, token.top(count), name) for token in logged]
        ),
    )


async def completion_logprobs(
    logged: Iterable[LoggedToken], count: int, name: TokenName, offset: int = 0
) -> CompletionColumns:
    """The same of what may be very many tokens."""
    parts: list[CompletionColumns] = []
    coming = iter(logged)
    while some := list(islice(coming, AT_ONCE)):
        parts.append(completion_entries(some, count, name, offset))
        await asyncio.sleep(0)
    return joined(parts)


_LIGHT_AT_ONCE = 4096


def _tops(
    token: int, own: float, top: Iterable[tuple[int, float]], name: TokenName
) -> dict[str, float]:
    tops = {name(token): finite(own)}
    for i, logprob in top:
        tops[name(i)] = finite(logprob)
    return tops


def finite(logprob: float) -> float:
    """As JSON can write it."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # not a number is no more likely


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
    if text is not None:
        steps = list(_spelt(text, tokens, steps, tokenizer))
    offsets = [0, *accumulate(len(step) for step in steps)][:-1]
    shown = "".join(steps) if text is None else text
    return Echo(text=shown, tokens=tokens, offsets=offsets)


def _spelt(
    text: str, tokens: Sequence[int], steps: Sequence[str], tokenizer: Tokenizer
) -> Iterator[str]:
    """The steps with the special tokens that `text` writes out; those that were added to it stand nowhere in it."""
    place = 0
    for token, step in zip(tokens, steps, strict=True):
        name = tokenizer.token_text(token) if token in tokenizer.special_ids else ""
        if name and text.startswith(name, place):
            step = name
        place += len(step)
        yield step


async def echo_logprobs(
    echo: Echo, scores: Sequence[TokenLogprobs], count: int, name: TokenName
) -> CompletionColumns:
    """The prompt's part of a completion's log-probabilities; nothing stands before the first token, so it has none."""
    scored = zip(echo.tokens[1:], scores, strict=True)
    tops = (_tops(token, score.logprob, score.top(count), name) for token, score in scored)
    logprobs = (finite(score.logprob) for score in scores)
    return CompletionColumns(
        text_offset=await json_array(echo.offsets, _LIGHT_AT_ONCE),
        token_logprobs=await json_array(chain((None,), logprobs), _LIGHT_AT_ONCE),
        tokens=await json_array((name(i) for i in echo.tokens), _LIGHT_AT_ONCE),
        top_logprobs=await json_array(chain((None,), tops), AT_ONCE),
    )


async def prompt_scores(
    tokens: Sequence[int], scores: Sequence[TokenLogprobs], count: int, pieces: PieceTable
) -> bytes:
    """What vLLM's clients know as `prompt_logprobs`: per token null, or the token's and the likeliest tokens' by id."""
    scored = zip(tokens[1:], scores, strict=True)
    entries = (_entry(token, score, count, pieces) for token, score in scored)
    return await json_array(chain((None,), entries), AT_ONCE)


def _entry(token: int, score: TokenLogprobs, count: int, pieces: PieceTable) -> dict[int, Entry]:
    """A `PromptTokenScore` each."""
    own: Entry = {"logprob": finite(score.logprob), "rank": score.rank}
    own["decoded_token"] = pieces.text_of(token)
    entry = {token: own}
    for rank, (i, logprob) in enumerate(score.top(count), start=1):
        if i != token:
            entry[i] = {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": pieces.text_of(i),
            }
    return entry
