"""Which tokens stay in a draw: top-k, then top-p of what is left, then min-p, all as one threshold per row.

Thresholds are values of weights, so tokens that tie at the edge all stay, and the outcome does not depend on how a sort
happens to order them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.generation import SamplingParams
from baton_engine.staging import StagedArray, StagedBatch

_FIRST_WIDTH = 64
_WIDEN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What the rows of a draw leave out.

    Attributes:
        top_k: `[num_rows]` int64; 0 for no limit.
        top_p: `[num_rows]` float64.
        min_p: `[num_rows]` float32.
        widest_k: The largest `top_k`; 0 if no row has one.
        narrows: Whether any row has a `top_p` below 1.
    """

    top_k: StagedArray
    top_p: StagedArray
    min_p: StagedArray
    widest_k: int
    narrows: bool


def filters(params: SamplingParams) -> bool:
    """Whether the request leaves out any token."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def collect_filters(params: Sequence[SamplingParams], staged: StagedBatch) -> Filters:
    """Gathers what requests ask for, one per row, at least one."""
    return Filters(
        top_k=staged.add(np.array([p.top_k for p in params], np.int64)),
        top_p=staged.add(np.array([p.top_p for p in params], np.float64)),
        min_p=staged.add(np.array([p.min_p for p in params], np.float32)),
        widest_k=max(p.top_k for p in params),
        narrows=any(p.top_p < 1.0 for p in params),
    )


def drop_unlikely(weights: torch.Tensor, asked: Filters) -> None:
    """Sets the weights that each row's filters leave out to 0, in place.

    Args:
        weights: `[num_rows, vocab]` float32, in proportion to the probabilities, the largest of each row 1.
        asked: One of each kind per row, arrived.
    """
    limits = asked.min_p.tensor.unsqueeze(1)
    kept = weights
    if asked.widest_k:
        least = _top_k_limits(weights, asked)
        limits = torch.maximum(limits, least)
        kept = weights.masked_fill(weights < least, 0.0) if asked.narrows else weights
    if asked.narrows:
        # min_p only cuts deeper than top_p: it does not change the mass that top_p divides.
        limits = torch.maximum(limits, _top_p_limits(kept, asked.top_p.tensor.unsqueeze(1)))
    weights.masked_fill_(weights < limits, 0.0)


def _top_k_limits(weights: torch.Tensor, asked: Filters) -> torch.Tensor:
    """The least weight that stays, `[num_rows, 1]`."""
    top_k = asked.top_k.tensor.unsqueeze(1)
    width = min(asked.widest_k, weights.shape[1])
    values = weights.topk(width).values
    limits = values.gather(1, (top_k - 1).clamp(0, width - 1))
    return limits.masked_fill(top_k == 0, 0.0)


def _top_p_limits(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The weight at which the likeliest tokens' mass reaches top_p of the whole, which top-k has already cut."""
    # Rows that keep all tokens ask for no mass, so that weights are not sorted for them.
    wanted = weights.sum(1, keepdim=True, dtype=torch.float64) * top_p.masked_fill(
        top_p >= 1.0, 0.0
    )
    values, mass = _likeliest(weights, wanted)
    reached = (mass < wanted).sum(1, keepdim=True).clamp(max=values.shape[1] - 1)
    return values.gather(1, reached).masked_fill(top_p >= 1.0, 0.0)


def _likeliest(weights: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest weights in falling order and their running mass, as many as it takes to reach `wanted`."""
    vocab = weights.shape[1]
    # Few tokens usually suffice, and looking whether they did costs nothing on the CPU; elsewhere it would be a sync.
    width = min(_FIRST_WIDTH, vocab) if weights.device.type == "cpu" else vocab
    while True:
        values = weights.topk(width).values
        mass = values.cumsum(1, dtype=torch.float64)
        if width == vocab or not bool((mass[:, -1:] < wanted).any()):
            return values, mass
        width = min(width * _WIDEN, vocab)
