"""Log-probabilities of drawn tokens under the model itself, before anything a request asked to change."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.generation import TokenLogprobs

_ALIGNED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTable:
    """Figures of the draws that asked for them, still on the device.

    Attributes:
        logprob: `[num_draws, 1]` of the drawn token.
        rank: `[num_draws, 1]`, 1 for the likeliest.
        top_ids: `[num_draws, k]`.
        top_logprobs: `[num_draws, k]`, falling.
    """

    logprob: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def flat(self) -> torch.Tensor:
        """Everything in one float64 vector (which holds token ids exactly), row by row."""
        parts = (self.logprob, self.rank, self.top_ids, self.top_logprobs)
        return torch.cat([part.double() for part in parts], dim=1).view(-1)


def logprob_table(
    logits: torch.Tensor, rows: torch.Tensor | None, tokens: torch.Tensor, top: int
) -> LogprobTable:
    """Looks up the draws' figures.

    Args:
        logits: `[num_rows, vocab]` float32, as the model gave them.
        rows: `[num_draws]` int64, row of `logits` of each draw; None where these are all rows in order.
        tokens: `[num_draws]` int64, the drawn tokens.
        top: How many of the likeliest tokens to list.
    """
    logprobs = _log_softmax(logits if rows is None else logits[rows])
    chosen = logprobs.gather(1, tokens.unsqueeze(1))
    best = logprobs.topk(min(top, logits.shape[1]), dim=1)
    return LogprobTable(
        logprob=chosen,
        rank=(logprobs > chosen).sum(1, keepdim=True) + 1,
        top_ids=best.indices,
        top_logprobs=best.values,
    )


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Each row's by itself. A GPU's order of summation depends on where a row begins: at multiples of 16 bytes all are alike."""
    vocab = logits.shape[1]
    if vocab % _ALIGNED:
        logits = functional.pad(logits, (0, -vocab % _ALIGNED), value=float("-inf"))
    return logits.log_softmax(-1)[:, :vocab]


def read_logprobs(values: Sequence[float], width: int, top: int) -> TokenLogprobs:
    """One draw's figures from its stretch of `LogprobTable.flat()` on the host.

    Args:
        values: logprob, rank, `width` ids, `width` logprobs.
        width: How many of the likeliest tokens the table lists.
        top: How many of them this request asked for.
    """
    ids, logprobs = values[2 : 2 + width], values[2 + width :]
    listed = zip(ids[:top], logprobs[:top], strict=True)
    return TokenLogprobs(
        logprob=values[0],
        rank=int(values[1]),
        top=tuple((int(token), logprob) for token, logprob in listed),
    )
