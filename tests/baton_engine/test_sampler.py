from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.generation import SamplingParams
from baton_engine.sampling.adjust import adjust, collect_changes
from baton_engine.sampling.draws import uniforms
from baton_engine.sampling.filters import collect_filters, drop_unlikely
from baton_engine.sampling.sampler import Sampler
from baton_engine.sampling.token_counts import CountedTexts
from baton_engine.scheduling.plan import NO_TOKEN, Row
from baton_engine.staging import DeviceStaging, StagedBatch
from tests.baton_engine.sequences import sequence

EOS = 0
VOCAB = 300


def row(params: SamplingParams, *, prompt=(5,), output=(), samples=(0,)) -> Row:
    tokens = [*prompt, *output]
    seq = sequence(tokens, params, samples=samples, num_generated=len(output))
    return Row(seq=seq, start=len(tokens) - 1, num_tokens=1, samples=samples)


def draw(logits: torch.Tensor, *rows: Row) -> list[list[int]]:
    tokens, _ = Sampler((EOS,), torch.device("cpu")).sample(logits.clone(), rows).read()
    drawn = iter(tokens)
    return [[next(drawn) for _ in row.samples] for row in rows]


def logits_of(**scores: float) -> torch.Tensor:
    """One row of logits, 0 but for `t<id>=score`."""
    logits = torch.zeros(1, VOCAB)
    for name, score in scores.items():
        logits[0, int(name[1:])] = score
    return logits


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def greedy(**params) -> SamplingParams:
    return SamplingParams(temperature=0, **params)


def test_greedy_takes_the_highest_and_the_lowest_id_among_equals():
    assert draw(logits_of(t7=2.0, t9=2.0), row(greedy())) == [[7]]


@pytest.mark.parametrize(
    "params",
    [{"logprobs": 2}, {"logit_bias": {3: -1.0}}, {"presence_penalty": 0.5}],
    ids=["figures", "bias", "penalty"],
)
def test_equals_are_told_apart_alike_where_more_is_asked_than_the_likeliest(params):
    logits = logits_of(t9=2.0, t7=2.0, t8=2.0)
    assert draw(logits, row(greedy(**params))) == [[7]]


def test_draws_follow_the_distribution():
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, [10, 20, 30]] = torch.tensor([0.5, 0.3, 0.2]).log()
    samples = tuple(range(4000))
    (tokens,) = draw(logits, row(SamplingParams(seed=1), samples=samples))
    counts = Counter(tokens)
    assert set(counts) == {10, 20, 30}
    assert [counts[t] / 4000 for t in (10, 20, 30)] == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_scores_far_below_the_likeliest_are_never_drawn_and_disturb_none_that_are():
    near = torch.full((1, VOCAB), float("-inf"))
    near[0, [10, 20, 30]] = torch.tensor([0.5, 0.3, 0.2]).log()
    far = near.clone()
    far[0, :10] = -81.0 - torch.arange(10)
    far[0, 40:] = -1000.0
    samples = tuple(range(500))
    for params in (SamplingParams(seed=1), SamplingParams(seed=2, top_k=9, top_p=0.9, min_p=0.01)):
        of_both = row(params, samples=samples)
        assert draw(far, of_both) == draw(near, of_both)
    (always,) = draw(
        torch.full((1, VOCAB), float("-inf")).index_fill(1, torch.tensor([9]), 0.0), of_both
    )
    assert set(always) == {9}


def test_temperature_sharpens():
    logits = random_logits(1)
    cold = SamplingParams(temperature=0.01, seed=1)
    assert set(draw(logits, row(cold, samples=tuple(range(50))))[0]) == {int(logits.argmax())}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**63),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 200]),
    top_p=st.sampled_from([0.1, 0.7, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    others=st.integers(0, 4),
)
def test_a_draw_does_not_depend_on_the_batch(seed, temperature, top_k, top_p, min_p, others):
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    company = [
        row(greedy(), samples=(0, 1)),
        row(SamplingParams(top_k=250, seed=9, logprobs=2)),
        row(SamplingParams(presence_penalty=1.0), output=(3, 3), samples=(0, 1, 2)),
        row(SamplingParams(top_p=0.5)),
    ][:others]
    logits = random_logits(others + 1)
    alone = draw(logits[-1:], row(params, samples=(0, 3)))
    assert draw(logits, *company, row(params, samples=(0, 3)))[-1] == alone[0]


def test_seed_sample_and_position_each_change_the_draw():
    numbers = uniforms([1, 2, 1, 1], [0, 0, 1, 0], [5, 5, 5, 6])
    assert len(set(numbers.tolist())) == 4
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert uniforms([1], [0], [5])[0] == numbers[0]


def test_negative_and_huge_seeds_are_streams_too():
    assert len(set(uniforms([-1, 2**70 + 1, 1, 0], [0] * 4, [0] * 4).tolist())) == 3


def kept(scores: torch.Tensor, **params) -> set[int]:
    weights = (scores - scores.max()).exp().unsqueeze(0)
    staged = StagedBatch()
    asked = collect_filters([SamplingParams(**params)], staged)
    DeviceStaging(weights.device).send(staged)
    drop_unlikely(weights, asked)
    return set(weights[0].nonzero().flatten().tolist())


def test_top_k_keeps_the_k_likeliest():
    assert kept(torch.tensor([1.0, 5.0, 3.0, 4.0, 2.0]), top_k=2) == {1, 3}


def test_top_k_keeps_all_that_tie_at_its_edge():
    assert kept(torch.tensor([1.0, 5.0, 3.0, 3.0]), top_k=2) == {1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    scores = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert kept(scores, top_p=0.5) == {1}
    assert kept(scores, top_p=0.51) == {1, 3}
    assert kept(scores, top_p=0.95) == {0, 1, 2, 3}


def test_top_p_divides_the_mass_that_top_k_leaves():
    scores = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert kept(scores, top_k=2, top_p=0.5) == {1}
    assert kept(scores, top_p=0.5) == {1, 3}


def test_min_p_drops_what_is_unlikely_beside_the_likeliest():
    assert kept(torch.tensor([0.5, 0.3, 0.04, 0.16]).log(), min_p=0.1) == {0, 1, 3}


@settings(max_examples=60, deadline=None)
@given(
    top_p=st.floats(0.01, 0.999),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.01, 1.0, 6.0]),
)
def test_top_p_agrees_with_a_full_sort(top_p, seed, spread):
    scores = spread * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    probabilities, order = scores.double().softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    expected = set(order[before < top_p - 1e-6].tolist())
    loose = set(order[before < top_p + 1e-6].tolist())
    assert expected <= kept(scores, top_p=top_p) <= loose


def test_presence_and_frequency_count_generated_tokens_only():
    logits = logits_of(t5=3.0, t7=3.5, t9=3.2)
    seen = {"prompt": (5, 5), "output": (7, 7, 9)}
    assert draw(logits, row(greedy(presence_penalty=1.0), **seen)) == [[5]]
    assert draw(logits, row(greedy(frequency_penalty=0.2), **seen)) == [[7]]
    assert draw(logits, row(greedy(frequency_penalty=0.26), **seen)) == [[5]]


def test_repetition_divides_positive_and_multiplies_negative_scores_of_prompt_and_output():
    logits = torch.full((1, VOCAB), -1.5)
    logits[0, 5], logits[0, 7] = -1.0, 2.0
    assert draw(logits, row(greedy(repetition_penalty=3.0), prompt=(5,), output=(7,))) == [[7]]
    logits[0, 7] = -1.2
    assert draw(logits, row(greedy(repetition_penalty=3.0), prompt=(5,), output=(7,))) == [[0]]


def test_bias_is_added_and_ids_outside_the_vocabulary_are_ignored():
    params = greedy(logit_bias={3: 10.0, 4: -100.0, 10**6: 100.0})
    assert draw(logits_of(t4=5.0), row(params)) == [[3]]


def test_ends_cannot_be_drawn_before_min_tokens():
    logits = logits_of(t0=9.0, t8=8.0, t9=7.0)
    params = greedy(min_tokens=2, stop_token_ids=(8,))
    assert draw(logits, row(params, output=(5,))) == [[9]]
    assert draw(logits, row(params, output=(5, 5))) == [[EOS]]


def test_nothing_is_changed_once_enough_tokens_are_there():
    params = greedy(min_tokens=2)
    for output, is_changed in (((5, 5), False), ((5,), True)):
        staged = StagedBatch()
        changes = collect_changes(
            [row(params, output=output)], VOCAB, (EOS,), CountedTexts(), staged
        )
        DeviceStaging(torch.device("cpu")).send(staged)
        scores = logits_of(t0=9.0)
        if changes:
            adjust(scores, changes)
        assert bool(changes) == is_changed
        assert torch.equal(scores, logits_of(t0=9.0)) != is_changed


def test_min_tokens_holds_back_an_ignored_end_too():
    params = greedy(min_tokens=1, ignore_eos=True)
    assert draw(logits_of(t0=9.0, t8=8.0), row(params)) == [[8]]
    assert draw(logits_of(t0=9.0, t8=8.0), row(params, output=(5,))) == [[EOS]]


def test_repetition_counts_a_token_once_however_often_it_stands_there():
    params = greedy(repetition_penalty=2.0)
    assert draw(logits_of(t7=3.0, t9=1.4), row(params, prompt=(7, 7, 7))) == [[7]]


@pytest.mark.parametrize("temperature", [1e-6, 1e-50, 1e-320])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature):
    params = SamplingParams(temperature=temperature, top_p=0.9)
    assert draw(logits_of(t7=2.0, t9=1.9), row(params)) == [[7]]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params",
    [
        pytest.param(greedy(logprobs=2), id="greedy"),
        pytest.param(SamplingParams(seed=1, top_p=0.9), id="top-p"),
        pytest.param(SamplingParams(seed=1, top_k=5, min_p=0.1), id="top-k"),
    ],
)
def test_nothing_is_drawn_from_scores_that_are_not_finite_and_others_are_undisturbed(
    params, broken
):
    logits = random_logits(3)
    others = [row(params, samples=(0, 1)), row(params, output=(3,))]
    alone = [*draw(logits[:1], others[0]), *draw(logits[2:], others[1])]
    logits[1, 77] = broken
    first, nothing, last = draw(logits, others[0], row(params, samples=(0, 1)), others[1])
    assert [first, last] == alone
    assert nothing == [NO_TOKEN, NO_TOKEN]


def test_logprobs_are_of_the_model_itself():
    logits = random_logits(2)
    params = greedy(logit_bias={17: 100.0}, logprobs=3)
    sampler = Sampler((EOS,), torch.device("cpu"))
    tokens, of_tokens = sampler.sample(logits, [row(greedy()), row(params)]).read()
    expected = logits[1].log_softmax(-1)
    assert tokens[1] == 17
    assert list(of_tokens) == [1]
    logprobs = of_tokens[1]
    assert logprobs.logprob == pytest.approx(expected[17].item())
    assert logprobs.rank == 1 + int((expected > expected[17]).sum())
    assert list(logprobs.top_tokens) == expected.topk(3).indices.tolist()


def test_each_row_gets_as_many_logprobs_as_it_asked_for():
    rows = [row(greedy(logprobs=k), samples=(0, 1)) for k in (0, 4, 2)]
    _, logprobs = Sampler((EOS,), torch.device("cpu")).sample(random_logits(3), rows).read()
    assert [len(logprobs[draw].top_tokens) for draw in range(6)] == [0, 0, 4, 4, 2, 2]


def test_the_models_logits_are_not_changed():
    logits = random_logits(1)
    before = logits.clone()
    params = SamplingParams(presence_penalty=1.0, min_tokens=5, top_k=3, logprobs=1)
    draw(logits, row(params, output=(3,)))
    assert torch.equal(logits, before)
