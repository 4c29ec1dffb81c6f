"""Which tokens stay in a draw: top-k, then top-p of what is left, then min-p, all as one threshold per row.

Thresholds are values of weights, so tokens that tie at the edge all stay, and the outcome does not depend on how a sort
happens to order them.
"""

from collections.abc import Sequence

import torch

from baton.generation import SamplingParams

_FIRST_WIDTH = 64
_WIDEN = 8


def filters(params: SamplingParams) -> bool:
    """Whether the request leaves out any token."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def drop_unlikely(weights: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Sets the weights that each row's filters leave out to 0, in place.

    Args:
        weights: `[num_rows, vocab]` float32, in proportion to the probabilities, the largest of each row 1.
        params: One per row.
    """
    asking = [i for i, p in enumerate(params) if filters(p)]
    if not asking:
        return
    taken = weights if len(asking) == len(params) else weights[asking]
    limits = weights.new_zeros(len(params), 1)
    limits[asking] = _thresholds(taken, [params[i] for i in asking])
    weights.masked_fill_(weights < limits, 0.0)


def _thresholds(weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The least weight that stays, `[num_rows, 1]`."""
    limits = torch.tensor([p.min_p for p in params], device=weights.device).unsqueeze(1)
    narrows = any(p.top_p < 1.0 for p in params)
    if any(p.top_k > 0 for p in params):
        least = _top_k_limits(weights, [p.top_k for p in params])
        limits = torch.maximum(limits, least)
        if narrows:
            weights = weights.masked_fill(weights < least, 0.0)
    if narrows:
        # min_p only cuts deeper than top_p: it does not change the mass that top_p divides.
        limits = torch.maximum(limits, _top_p_limits(weights, [p.top_p for p in params]))
    return limits


def _top_k_limits(weights: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    width = min(max(top_k), weights.shape[1])
    values = weights.topk(width).values
    last = torch.tensor([min(k, width) - 1 if k else 0 for k in top_k], device=weights.device)
    limits = values.gather(1, last.unsqueeze(1))
    unlimited = torch.tensor([k == 0 for k in top_k], device=weights.device).unsqueeze(1)
    return limits.masked_fill(unlimited, 0.0)


def _top_p_limits(weights: torch.Tensor, top_p: Sequence[float]) -> torch.Tensor:
    """The weight at which the likeliest tokens' mass reaches top_p of the whole, which top-k has already cut."""
    wanted = weights.sum(1, keepdim=True, dtype=torch.float64)
    wanted *= torch.tensor(top_p, dtype=torch.float64, device=weights.device).unsqueeze(1)
    values, mass = _likeliest(weights, wanted)
    reached = (mass < wanted).sum(1, keepdim=True).clamp(max=values.shape[1] - 1)
    limits = values.gather(1, reached)
    whole = torch.tensor([p >= 1.0 for p in top_p], device=weights.device).unsqueeze(1)
    return limits.masked_fill(whole, 0.0)


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
