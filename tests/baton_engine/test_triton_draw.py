"""Random draws over tiles of the vocabulary, against their torch twin."""

from typing import Any

import numpy as np
import pytest
import torch

from baton.generation import SamplingParams
from baton_engine.sampling.draws import (
    RandomRows,
    collect_random,
    draw_with_torch,
    draw_with_triton,
)
from baton_engine.scheduling.plan import Row
from baton_engine.staging import DeviceStaging, StagedBatch
from tests.baton_engine.sequences import sequence
from tests.baton_engine.triton_cases import DEVICE, kernels, needs_triton

pytestmark = needs_triton
CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 5000},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 1.7},
]


def row(seed: int, samples=(0,), **params) -> Row:
    seq = sequence([1], SamplingParams(**{"seed": seed, **params}), samples=samples)
    return Row(seq=seq, start=0, num_tokens=1, samples=samples)


def arrived(rows: list[Row], random: list[int]) -> RandomRows:
    staged = StagedBatch()
    first_draws = np.cumsum([0, *(len(row.samples) for row in rows)]).tolist()
    made = collect_random(rows, random, first_draws, staged)
    DeviceStaging(torch.device(DEVICE)).send(staged)
    return made


def scores_of(rows: int, vocab: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = (3 * torch.randn(rows, vocab, generator=generator)).to(DEVICE)
    return scores, scores.amax(-1, keepdim=True)


def assert_alike(scores, highest, rows) -> None:
    ours, theirs = (draw(scores, highest, rows) for draw in (draw_with_triton, draw_with_torch))
    assert torch.equal(ours, theirs)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "vocab", [50, pytest.param(2048, marks=SLOW), 2049, pytest.param(5000, marks=SLOW)]
)
def test_every_filter_draws_what_the_twin_draws(vocab):
    rows = [row(seed, **params) for seed, params in enumerate(CASES)]
    assert_alike(*scores_of(len(rows), vocab), arrived(rows, list(range(len(rows)))))


def test_samples_of_a_row_and_rows_between_greedy_ones_are_drawn_as_the_twin_does():
    rows = [row(0), row(1, (0, 1, 2), top_p=0.9), row(2), row(3, (4,), top_k=3)]
    assert_alike(*scores_of(4, 300), arrived(rows, [1, 3]))
    assert_alike(*scores_of(4, 300), arrived(rows, [0, 1, 2]))


@pytest.mark.parametrize("seed", [0, 2**63])
@pytest.mark.parametrize("top_k", [0, 1, 5])
@pytest.mark.parametrize("top_p", [0.1, 0.7, 1.0])
def test_ties_stay_or_go_together(seed, top_k, top_p):
    """Scores of three values only."""
    scores, _ = scores_of(2, 100, seed % 1000)
    scores = scores.sign() * (scores.abs() > 1)
    rows = [row(seed + i, tuple(range(5)), top_k=top_k, top_p=top_p) for i in range(2)]
    assert_alike(scores, scores.amax(-1, keepdim=True), arrived(rows, [0, 1]))


def test_a_row_draws_the_same_alone_and_among_others():
    rows = [row(seed, **params) for seed, params in enumerate(CASES[-4:])]
    scores, highest = scores_of(len(rows), 300)
    order = arrived(rows, list(range(len(rows)))).places.tensor.tolist()
    together = draw_with_triton(scores, highest, arrived(rows, list(range(len(rows)))))
    for column, place in enumerate(order):
        alone = draw_with_triton(scores, highest, arrived(rows, [place]))
        assert alone[0, 0] == together[column, 0]


def test_what_filters_or_a_grammar_leave_out_is_never_drawn():
    """Targets from 0 up to the last float below 1, over rows whose tiles are mostly empty."""
    scores = torch.full((2, 5000), float("-inf"), device=DEVICE)
    scores[:, [3, 2047, 2048, 4500]] = torch.tensor([1.0, 0.5, 0.9, 0.2], device=DEVICE)
    targets = torch.tensor([[0.0, 0.25, 0.5, 0.75, 1 - 2.0**-53]] * 2, dtype=torch.float64)
    drawn = kernels("random_draw").random_draw(
        scores,
        scores.amax(-1, keepdim=True),
        torch.tensor([1, 0], device=DEVICE),
        torch.ones(2, device=DEVICE),
        targets.to(DEVICE),
        (
            torch.tensor([3], device=DEVICE),
            torch.tensor([0.9], dtype=torch.float64, device=DEVICE),
            torch.zeros(1, device=DEVICE),
        ),
    )
    assert drawn.tolist() == [[3, 3, 2047, 2048, 2048], [3, 3, 2047, 2048, 4500]]


def test_a_row_that_is_not_finite_disturbs_no_other():
    rows = [row(seed, top_k=5, top_p=0.9) for seed in range(3)]
    scores, highest = scores_of(3, 100)
    healthy = draw_with_triton(scores, highest, arrived(rows, [0, 1, 2]))
    scores[1, 7] = float("nan")
    broken = draw_with_triton(scores, scores.amax(-1, keepdim=True), arrived(rows, [0, 1, 2]))
    assert torch.equal(broken[[0, 2]], healthy[[0, 2]])


def test_what_does_not_fit_is_refused_by_name():
    draw = kernels("random_draw").random_draw
    scores, highest = scores_of(2, 50)
    places = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    heat = torch.ones(1, device=DEVICE)
    targets = torch.zeros(1, 1, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match="scores"):
        draw(scores.half(), highest, places, heat, targets, None)
    with pytest.raises(ValueError, match="temperatures"):
        draw(scores, highest, places, heat.double(), targets, None)
    two = places.repeat(2)
    with pytest.raises(ValueError, match="filters: of 2 rows"):
        draw(scores, highest, places, heat, targets, (two, two.double(), two.float()))
