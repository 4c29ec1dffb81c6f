"""Which tokens a request lets be drawn."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.generation import SamplingParams
from baton.tokens import PackedTokens
from baton_engine.sampling.adjust import adjust, collect_changes
from baton_engine.sampling.allowed import completing_tokens
from baton_engine.sampling.sampler import Sampler
from baton_engine.sampling.token_counts import CountedTexts
from baton_engine.scheduling.plan import Row
from baton_engine.staging import DeviceStaging, StagedBatch
from tests.baton_engine.sequences import sequence

EOS = 0
VOCAB = 12


def params(allowed=(), bad_words=(), **more) -> SamplingParams:
    return SamplingParams(
        allowed_token_ids=PackedTokens.of(allowed), bad_words=tuple(bad_words), **more
    )


def row(asked: SamplingParams, *, prompt=(5,), output=()) -> Row:
    tokens = [*prompt, *output]
    seq = sequence(tokens, asked, samples=(0,), num_generated=len(output))
    return Row(seq=seq, start=len(tokens) - 1, num_tokens=1, samples=(0,))


def left(*rows: Row) -> list[set[int]]:
    """The tokens of each row that can still be drawn."""
    staged = StagedBatch()
    changes = collect_changes(rows, VOCAB, (EOS,), CountedTexts(), staged)
    DeviceStaging(torch.device("cpu")).send(staged)
    scores = torch.zeros(len(rows), VOCAB)
    adjust(scores, changes)
    return [set(scores[i].isfinite().nonzero().flatten().tolist()) for i in range(len(rows))]


EVERY = set(range(VOCAB))


def test_only_what_is_allowed_can_be_drawn_and_other_rows_are_as_they_were():
    listing = row(params(allowed=[3, 7, 11]))
    assert left(listing, row(params()), row(params(allowed=[0]))) == [{3, 7, 11}, EVERY, {0}]


def test_ids_outside_the_vocabulary_do_not_reach_another_row():
    assert left(row(params(allowed=[3, VOCAB, VOCAB + 4])), row(params())) == [{3}, EVERY]


def test_scores_of_what_is_allowed_stay_and_are_not_those_of_another_row():
    logits = torch.arange(2 * VOCAB, dtype=torch.float32).view(2, VOCAB)
    rows = [row(params(allowed=[3, 7])), row(params(allowed=[1], logit_bias={1: 2.0}))]
    staged = StagedBatch()
    changes = collect_changes(rows, VOCAB, (EOS,), CountedTexts(), staged)
    DeviceStaging(torch.device("cpu")).send(staged)
    scores = logits.clone()
    adjust(scores, changes)
    assert scores[0, [3, 7]].tolist() == [3.0, 7.0]
    assert scores[1, 1] == VOCAB + 1 + 2.0
    assert logits.tolist() == torch.arange(2.0 * VOCAB).view(2, VOCAB).tolist()


def test_the_last_token_of_a_bad_word_cannot_follow_the_others():
    words = [(4,), (6, 7), (6, 8, 9), (2, 6, 1)]
    cases = {
        (): {4},
        (6,): {4, 7},
        (6, 8): {4, 9},
        (8, 6): {4, 7},
        (2, 6): {4, 7, 1},
        (2, 6, 3): {4},
    }
    for output, gone in cases.items():
        assert left(row(params(bad_words=words), output=output)) == [EVERY - gone], output


def test_a_bad_word_that_began_in_the_prompt_is_not_one_of_the_output():
    assert left(row(params(bad_words=[(5, 6)]), prompt=(5,))) == [EVERY]
    assert left(row(params(bad_words=[(5, 6)]), prompt=(1,), output=(5,))) == [EVERY - {6}]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_would_leave_nothing_gives_way(temperature: float):
    asked = params(allowed=[3], bad_words=[(3,)], min_tokens=5, temperature=temperature, logprobs=1)
    ends_only = params(allowed=[EOS], min_tokens=5, temperature=temperature)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens, _ = Sampler((EOS,), logits.device).sample(logits, [row(asked), row(ends_only)]).read()
    assert tokens == [3, EOS]


def test_a_sequence_with_bad_words_waits_for_its_tokens_before_the_next_step_is_planned():
    assert row(params(bad_words=[(3,)])).seq.counts_tokens
    assert not row(params(allowed=[3])).seq.counts_tokens


WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=5)


@settings(max_examples=200, deadline=None)
@given(words=WORDS, prompt=st.lists(st.integers(0, 3), max_size=3), draws=st.randoms())
def test_no_output_holds_a_bad_word(words, prompt, draws):
    tokens = list(prompt)
    for _ in range(12):
        banned = completing_tokens(words, tokens, len(prompt), len(tokens))
        open_ = sorted({0, 1, 2, 3} - banned)
        if not open_:
            break
        tokens.append(draws.choice(open_))
    output = tokens[len(prompt) :]
    found = [w for w in words for i in range(len(output)) if tuple(output[i : i + len(w)]) == w]
    assert found == []
