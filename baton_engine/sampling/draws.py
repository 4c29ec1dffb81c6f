"""How a step's tokens are drawn from its scores: each row's likeliest, or at random.

A random draw inverts the cumulative distribution of what a row's filters leave at one uniform number, which depends on
(seed, sample, position) only. No generator holds state, so a draw is the same in every batch, on every worker and after
every retry; on every device too, except where the number falls on the edge between two tokens within the rounding of an
exponential.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from baton_engine.sampling.filters import Filters, collect_filters, drop_unlikely, filters
from baton_engine.scheduling.plan import NO_TOKEN, Row
from baton_engine.staging import StagedArray, StagedBatch

_PIECES = 8
"""Of a row. On an H200 128,256 scores take 12 us so, and 27 as a whole; those of 64 rows 20 and 27."""


def greedy_tokens(scores: torch.Tensor) -> torch.Tensor:
    """The highest of each row of `scores` `[num_rows, vocab]`, the lowest id among equals;
    `NO_TOKEN` of a row that is not finite.

    Returns:
        `[num_rows]` int64 on the device.
    """
    if (
        scores.device.type == "cpu"
    ):  # few calls, whose code a model's weights have pushed out of the caches
        found, places = _likeliest_on_host(scores.numpy())
        return torch.from_numpy(np.where(np.isfinite(found), places, NO_TOKEN))
    highest, tokens = likeliest(scores)
    # One not-a-number makes the maximum one. Told on the device: it comes to the host with the tokens.
    return tokens.where(highest.isfinite(), NO_TOKEN)


def likeliest(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest of each row of `scores` `[num_rows, vocab]`, which is not a number where one of them is none, and where
    it stands first; each `[num_rows]`.
    """
    if scores.device.type == "cpu":
        found, at = _likeliest_on_host(scores.numpy())
        return torch.from_numpy(found), torch.from_numpy(at)
    if scores.shape[1] % _PIECES:
        highest, places = scores.max(-1)
        return highest, places
    return likeliest_in_pieces(scores, _PIECES)


def _likeliest_on_host(
    scores: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The same by numpy: torch's own search takes a processor 15 times as long."""
    places = scores.argmax(-1)
    return scores[np.arange(len(scores)), places], places


def likeliest_in_pieces(scores: torch.Tensor, pieces: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by `pieces` of each row, which must divide the vocabulary: a GPU gives each a block of threads, and one
    for a whole row leaves most of it idle.
    """
    size = scores.shape[1] // pieces
    of_pieces, within = scores.view(-1, pieces, size).max(-1)
    highest, piece = of_pieces.max(-1, keepdim=True)
    return highest[:, 0], (within.gather(1, piece) + piece * size)[:, 0]


_LEAST_LOG = -80.0
_LEAST = 2 * math.exp(_LEAST_LOG)
"""Weights below it, of the likeliest token's, are 0. No random number is so small that they would be drawn; and a
processor takes ten times as long for an exponential that float32 cannot hold in full,
such as that of what a grammar forbids.
"""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_WORD = 0xFFFF_FFFF_FFFF_FFFF


def uniforms(seeds: list[int], samples: list[int], positions: list[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per entry, with 53 random bits.

    Args:
        seeds: Any integers; taken modulo 2**64.
        samples: Index of the sample, from 0.
        positions: Index in the text of the token being drawn.
    """
    mixed = _splitmix(np.array([seed & _WORD for seed in seeds], np.uint64))
    mixed = _splitmix(mixed ^ np.array(samples, np.uint64))
    mixed = _splitmix(mixed ^ np.array(positions, np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRows:
    """The rows of a step that have a temperature. Those that leave tokens out come first.

    Attributes:
        places: `[num_random]` int64, of the rows among all.
        temperatures: `[num_random]` float32.
        targets: `[num_random, width]` float64, a uniform number per sample; shorter rows repeat their last one.
        filters: Of the leading rows; None where no row leaves anything out.
        num_filtering: How many these are.
        draws: `[num_drawn]` int64, where each drawn token goes among all draws of the step.
        drawn: `[num_drawn]` int64, and which of the `num_random * width` draws it is.
    """

    places: StagedArray
    temperatures: StagedArray
    targets: StagedArray
    filters: Filters | None
    num_filtering: int
    draws: StagedArray
    drawn: StagedArray


class DrawKernel(Protocol):
    """Draws on one device."""

    def __call__(
        self, scores: torch.Tensor, highest: torch.Tensor, rows: RandomRows
    ) -> torch.Tensor:
        """Draws every sample of the random rows.

        Args:
            scores: `[num_rows, vocab]` float32; not changed.
            highest: `[num_rows, 1]` float32, the largest of each row.
            rows: Which rows, and how; arrived.

        Returns:
            `[num_random, width]` int64; of a row whose scores are not finite, any token.
        """


def collect_random(
    rows: Sequence[Row], random: Sequence[int], first_draws: Sequence[int], staged: StagedBatch
) -> RandomRows:
    """Gathers how the rows `random`, at least one, draw;
    `first_draws` is each row's first place among the draws of the step.
    """
    ordered = sorted(random, key=lambda i: not filters(rows[i].seq.params))
    chosen = [rows[i] for i in ordered]
    filtering = [row.seq.params for row in chosen if filters(row.seq.params)]
    width = max(len(row.samples) for row in chosen)
    draws = [first_draws[i] + place for i in ordered for place in range(len(rows[i].samples))]
    drawn = [
        column * width + place
        for column, row in enumerate(chosen)
        for place in range(len(row.samples))
    ]
    return RandomRows(
        places=staged.add(np.array(ordered, np.int64)),
        temperatures=staged.add(np.array([r.seq.params.temperature for r in chosen], np.float32)),
        targets=staged.add(_targets(chosen, width)),
        filters=collect_filters(filtering, staged) if filtering else None,
        num_filtering=len(filtering),
        draws=staged.add(np.array(draws, np.int64)),
        drawn=staged.add(np.array(drawn, np.int64)),
    )


def draw_with_torch(scores: torch.Tensor, highest: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    """A `DrawKernel` for any device: the definition, which others are held against."""
    places = rows.places.tensor
    weights = scores.index_select(0, places).sub_(highest[places])
    weights = weights.div_(rows.temperatures.tensor.unsqueeze(1)).clamp_(min=_LEAST_LOG).exp_()
    torch.threshold_(weights, _LEAST, 0.0)
    if rows.filters is not None:
        drop_unlikely(weights[: rows.num_filtering], rows.filters)
    cumulative = weights.double().cumsum(1)
    targets = rows.targets.tensor * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).clamp_(max=scores.shape[1] - 1)


def draw_with_triton(scores: torch.Tensor, highest: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    """A `DrawKernel` for GPUs."""
    from baton_engine.kernels.triton.random_draw import random_draw

    asked = rows.filters
    drawn = (rows.places.tensor, rows.temperatures.tensor, rows.targets.tensor)
    if asked is None:
        return random_draw(scores, highest, *drawn, None)
    return random_draw(
        scores,
        highest,
        *drawn,
        (asked.top_k.tensor, asked.top_p.tensor, asked.min_p.tensor),
        with_top_k=asked.widest_k > 0,
        with_top_p=asked.narrows,
    )


def choose_draw(device: torch.device) -> DrawKernel:
    """The fastest for a device."""
    has_triton = device.type == "cuda" and find_spec("triton") is not None
    return draw_with_triton if has_triton else draw_with_torch


def _targets(rows: Sequence[Row], width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    seeds: list[int] = []
    samples: list[int] = []
    positions: list[int] = []
    for row in rows:
        padding = (row.samples[-1],) * (width - len(row.samples))
        samples.extend(row.samples + padding)
        seeds.extend([row.seq.params.seed] * width)
        positions.extend([row.start + row.num_tokens] * width)
    return uniforms(seeds, samples, positions).reshape(len(rows), width)
