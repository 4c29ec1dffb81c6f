"""Random draws of a step: by inverting the cumulative distribution of what a row's filters leave, at one uniform number.

That number depends on (seed, sample, position) only (`streams`), so a draw is the same in every batch and after every retry; on
every device too, except where the number falls on the edge between two tokens within the rounding of an exponential.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch

from baton_engine.sampling.filters import Filters, collect_filters, drop_unlikely, filters
from baton_engine.sampling.streams import uniforms
from baton_engine.scheduling.plan import Row
from baton_engine.staging import StagedArray, StagedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRows:
    """The rows of a step that have a temperature. Those that leave tokens out come first.

    Attributes:
        places: `[num_random]` int64, of the rows among all.
        temperatures: `[num_random]` float32.
        targets: `[num_random, width]` float64, a uniform number per sample; shorter rows repeat their last one.
        filters: Of the leading rows; None where nobody leaves anything out.
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
    """Gathers how the rows `random`, at least one, draw; `first_draws` is each row's first place among the draws of the step."""
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
    weights = (
        scores[places].sub_(highest[places]).div_(rows.temperatures.tensor.unsqueeze(1)).exp_()
    )
    if rows.filters is not None:
        drop_unlikely(weights[: rows.num_filtering], rows.filters)
    cumulative = weights.double().cumsum(1)
    targets = rows.targets.tensor * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).clamp_(max=scores.shape[1] - 1)


def draw_with_triton(scores: torch.Tensor, highest: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    """A `DrawKernel` for GPUs."""
    from baton_engine.kernels.triton.random_draw import random_draw

    asked = rows.filters
    return random_draw(
        scores,
        highest,
        rows.places.tensor,
        rows.temperatures.tensor,
        rows.targets.tensor,
        None if asked is None else (asked.top_k.tensor, asked.top_p.tensor, asked.min_p.tensor),
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
