"""Which tokens stay in a draw: top-k, then top-p of what is left, then min-p, all as one threshold per row.

Thresholds are values of scores, so tokens that tie at the edge all stay, and the outcome does not depend on how a sort
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


def drop_unlikely(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Sets the scores that each row's filters leave out to minus infinity.

    Args:
        scores: `[num_rows, vocab]` float32, divided by the temperature, the largest of each row 0. Not changed.
        params: One per row.
    """
    asking = [i for i, p in enumerate(params) if filters(p)]
    if not asking:
        return scores
    rows = torch.tensor(asking, device=scores.device)
    taken = scores.index_select(0, rows)
    limits = _thresholds(taken, [params[i] for i in asking])
    kept = taken.masked_fill(taken < limits, float("-inf"))
    return scores.index_copy(0, rows, kept)


def _thresholds(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The least score that stays, `[num_rows, 1]`."""
    device, vocab = scores.device, scores.shape[1]
    min_p = torch.tensor([p.min_p for p in params], device=device).unsqueeze(1)
    limits = min_p.log()
    if any(p.top_k > 0 for p in params):
        limits = torch.maximum(limits, _top_k_limits(scores, [p.top_k for p in params]))
    if any(p.top_p < 1.0 for p in params):
        # min_p only cuts deeper than top_p: it does not change the mass that top_p divides.
        top_k = [p.top_k or vocab for p in params]
        limits = torch.maximum(limits, _top_p_limits(scores, top_k, [p.top_p for p in params]))
    return limits


def _top_k_limits(scores: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    vocab = scores.shape[1]
    width = min(max(top_k), vocab)
    values = scores.topk(width).values
    last = torch.tensor([min(k, width) - 1 if k else 0 for k in top_k], device=scores.device)
    limits = values.gather(1, last.unsqueeze(1))
    unlimited = torch.tensor([k == 0 for k in top_k], device=scores.device).unsqueeze(1)
    return limits.masked_fill(unlimited, float("-inf"))


def _top_p_limits(
    scores: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]
) -> torch.Tensor:
    """The score at which the likeliest tokens' mass reaches top_p of the mass that top-k leaves."""
    if any(k < scores.shape[1] for k in top_k):
        scores = scores.masked_fill(scores < _top_k_limits(scores, top_k), float("-inf"))
    wanted = scores.exp().sum(1, keepdim=True, dtype=torch.float64)
    wanted *= torch.tensor(top_p, dtype=torch.float64, device=scores.device).unsqueeze(1)
    values, mass = _likeliest(scores, wanted)
    reached = (mass < wanted).sum(1, keepdim=True).clamp(max=values.shape[1] - 1)
    limits = values.gather(1, reached)
    whole = torch.tensor([p >= 1.0 for p in top_p], device=scores.device).unsqueeze(1)
    return limits.masked_fill(whole, float("-inf"))


def _likeliest(scores: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest scores in falling order and their running mass, as many as it takes to reach `wanted`."""
    vocab = scores.shape[1]
    # Few tokens usually suffice, and looking whether they did costs nothing on the CPU; elsewhere it would be a sync.
    width = min(_FIRST_WIDTH, vocab) if scores.device.type == "cpu" else vocab
    while True:
        values = scores.topk(width).values
        mass = values.exp().cumsum(1, dtype=torch.float64)
        if width == vocab or bool((mass[:, -1:] >= wanted).all()):
            return values, mass
        width = min(width * _WIDEN, vocab)
