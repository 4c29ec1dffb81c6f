"""What penalties count of a text that grows, is guessed on, and begins again: as counted from scratch, and read once."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.messages import Generate
from baton_engine.sampling.sampler import Sampler
from baton_engine.sampling.token_counts import CountedTexts
from baton_engine.scheduling.plan import Row
from baton_engine.scheduling.request import Request, Sequence

PARAMS = SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5)


class Tokens(list[int]):
    """A text that knows how many of its tokens were read."""

    num_read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


def sequence(prompt: Iterable[int]) -> Sequence:
    asked = Prompt(prompt_tokens=tuple(prompt), sampling=PARAMS)
    request = Request(asked=Generate(seq_id=SeqId("a"), prompt=asked), final_len=10**6)
    return Sequence(request=request, samples=(0,), tokens=Tokens(asked.prompt_tokens))


def decode(of: Sequence, draft: tuple[int, ...] = ()) -> Row:
    return Row(
        seq=of, start=len(of.tokens) + len(draft) - 1, num_tokens=1, samples=(0,), draft=draft
    )


def counts(texts: CountedTexts, row: Row, begin: int) -> dict[int, float]:
    tokens, often = texts.counted(row, begin)
    assert len(set(tokens.tolist())) == len(tokens)
    return dict(zip(tokens.tolist(), often.tolist(), strict=True))


@given(
    st.lists(st.integers(0, 9) | st.integers(0, 10**6), min_size=1, max_size=300),
    st.lists(
        st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.none(),
        max_size=200,
    ),
)
def test_counts_are_those_of_the_whole_text(
    prompt: list[int], steps: list[int | tuple[int, ...] | None]
):
    """Steps append a token, ask for guesses behind it, or begin again."""
    texts, of = CountedTexts(), sequence(prompt)
    for step in steps:
        draft: tuple[int, ...] = ()
        if step is None:
            of.tokens = list(prompt)
        elif isinstance(step, tuple):
            draft = step
        else:
            of.tokens.append(step)
        row = decode(of, draft)
        for begin in (0, len(prompt)):
            assert counts(texts, row, begin) == Counter([*of.tokens, *draft][begin:])


def test_a_step_reads_what_is_new_alone():
    sampler, of = Sampler((0,), torch.device("cpu")), sequence(n % 50 for n in range(5000))
    assert isinstance(of.tokens, Tokens)
    sampler.sample(torch.zeros(1, 64), [decode(of)]).read()
    before = of.tokens.num_read
    for token in range(10):
        of.tokens.append(token)
        sampler.sample(torch.zeros(1, 64), [decode(of)]).read()
    assert of.tokens.num_read - before <= 20  # each token for either penalty


def test_a_text_that_begins_again_and_grows_unasked_is_counted_anew():
    texts, of = CountedTexts(), sequence([1])
    of.tokens.append(2)
    assert counts(texts, decode(of), 1) == {2: 1}
    of.tokens = [1, 3]
    assert counts(texts, decode(of), 1) == {3: 1}


def test_a_text_that_is_gone_is_forgotten():
    texts, of = CountedTexts(), sequence([1, 2])
    texts.counted(decode(of), 0)
    assert len(texts._of) == 1
    del of
    assert not texts._of


def test_texts_are_counted_apart_with_their_guesses():
    scores = torch.zeros(3, 16)
    one, other = sequence([1]), sequence([2])
    other.tokens.append(3)
    rows = [decode(one), decode(other), decode(other, (5, 5))]
    sampler = Sampler((0,), torch.device("cpu"))
    for _ in range(2):
        drawn = scores.clone()
        sampler.sample(drawn, [replace(row) for row in rows]).read()
        expected = torch.zeros(3, 16)
        expected[1, 3] = expected[2, 3] = -0.5
        expected[2, 5] = -1.0
        assert torch.equal(drawn, expected)
