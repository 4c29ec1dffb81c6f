"""Tokens with log-probabilities while a reply is made of them."""

import gc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.generation import FinishReason, TokenLogprobs
from baton.ids import RequestId
from router.fakes.generator import FakeGenerator
from router.generation.generation_run import Delta, LoggedToken, keep, take_logged, token_ids
from tests.router.served import events, serve

TOKENS = st.integers(min_value=0, max_value=2**32 - 1)
LOGPROBS = st.floats(allow_nan=False, max_value=0.0)


@given(
    top=st.lists(st.tuples(TOKENS, LOGPROBS), max_size=21),
    count=st.integers(min_value=0, max_value=30),
)
def test_a_packed_token_has_the_log_probabilities_that_it_was_made_of(
    top: list[tuple[int, float]], count: int
) -> None:
    known = TokenLogprobs(
        logprob=-0.1,
        rank=3,
        top_tokens=tuple(token for token, _ in top),
        top_logprobs=tuple(logprob for _, logprob in top),
    )
    packed = LoggedToken.of(7, known, 12)
    assert (packed.token, packed.text_offset, packed.logprob) == (7, 12, -0.1)
    assert list(packed.top(count)) == top[:count] == list(known.top(count))


def test_the_garbage_collector_has_nothing_to_look_at_in_a_packed_token() -> None:
    known = TokenLogprobs(logprob=-0.1, rank=1, top_tokens=(1, 2), top_logprobs=(-0.1, -3.0))
    assert not gc.is_tracked(LoggedToken.of(1, known, 0))


def delta_of(token: int, text: str) -> Delta:
    known = TokenLogprobs(logprob=-float(token), rank=1)
    return Delta(3, text, [token], [LoggedToken.of(token, known, token)])


def test_what_is_kept_of_many_deltas_says_the_same_in_few_objects() -> None:
    gained = [delta_of(token, "ab") for token in range(5000)]
    gained.append(Delta(3, "", [9], [], FinishReason.STOP, "end"))
    told = [replace(delta, tokens=list(delta.tokens)) for delta in gained]
    kept: list[Delta] = []
    for delta in gained:
        keep(kept, delta)
    assert [delta.tokens for delta in gained] == [delta.tokens for delta in told], (
        "not its to change"
    )
    assert len(kept) < 50
    assert {delta.index for delta in kept} == {3}
    assert "".join(delta.text for delta in kept) == "ab" * 5000
    assert token_ids(kept) == [*range(5000), 9]
    assert (kept[-1].finish, kept[-1].stop) == (FinishReason.STOP, "end")
    assert all(delta.finish is None for delta in kept[:-1])
    assert [token.token for token in take_logged(kept)] == list(range(5000))


def test_texts_without_tokens_are_not_copied_again_and_again() -> None:
    kept: list[Delta] = []
    for _ in range(3000):
        keep(kept, Delta(0, "guarded "))
    assert max(len(delta.text) for delta in kept) < 1024 + 8


class Late(FakeGenerator):
    """What it had on its way for a sample comes after that was stopped, as behind a client that reads slowly."""

    def stop_sample(self, request_id: RequestId, sample: int) -> None:
        """Too late."""


@pytest.mark.parametrize("n", [1, 2])
async def test_a_choice_that_a_stop_string_ended_ends_once(n: int) -> None:
    async with serve(generator=Late()) as served:
        served.says("ab. And much more.", "abcd. And so on.")
        fields: dict[str, Any] = {"stream": True, "stop": ["."], "n": n}
        for reply in (await served.chat(**fields), await served.complete(**fields)):
            choices = [c for chunk in events(reply.text)[:-1] for c in chunk["choices"]]
            ends = [c["index"] for c in choices if c["finish_reason"] is not None]
            assert sorted(ends) == list(range(n))
