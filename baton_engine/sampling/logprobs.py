"""Log-probabilities under the model itself, before anything a request asked to change: of drawn tokens, and of a
prompt's own tokens for clients that score a text instead of, or before, continuing it.

For a prompt the model gives a hidden vector per scored token; logits of all of them at once would be gigabytes for a
long chunk over a large vocabulary, so the output head runs over a slice at a time and only the few figures wanted of it
are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch.nn import functional

from baton.generation import TokenLogprobs
from baton_engine.scheduling.plan import Row
from baton_engine.staging import DeviceStaging, StagedBatch

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
    """Each row's by itself. A GPU's order of summation depends on where a row begins:
    at multiples of 16 bytes all are alike.
    """
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
    return TokenLogprobs(
        logprob=values[0],
        rank=int(values[1]),
        top_tokens=tuple(map(int, ids[:top])),
        top_logprobs=tuple(logprobs[:top]),
    )


MAX_LOGITS_BYTES = 64 * 1024 * 1024
"""Of one slice; its log-softmax takes as much again."""


class PromptScorer:
    """Scores prompt tokens.

    Args:
        head: From hidden vectors `[n, hidden]` to logits `[n, vocab]` float32.
        vocab_size: Of the logits.
        device: Of both.
    """

    def __init__(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._head = head
        self._staging = DeviceStaging(device)
        self._slice = max(1, MAX_LOGITS_BYTES // (4 * vocab_size))

    def score(
        self, hidden: torch.Tensor, rows: Sequence[Row]
    ) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """One entry per scored token of each row, or nothing at all where no row has any.

        Blocks until the figures are on the host: part of the step's one synchronisation, and only of steps that score.

        Args:
            hidden: `[sum of num_scored, hidden]`, the rows' scored tokens one after the other.
            rows: All rows of the step.
        """
        if not any(row.num_scored for row in rows):
            return ()
        width = max(_top(row) for row in rows if row.num_scored)
        values = self._figures(hidden, rows, width)
        size = 2 + 2 * width
        scores, begin = [], 0
        for row in rows:
            end = begin + row.num_scored * size
            scores.append(
                tuple(
                    read_logprobs(values[i : i + size], width, _top(row))
                    for i in range(begin, end, size)
                )
            )
            begin = end
        return tuple(scores)

    def _figures(self, hidden: torch.Tensor, rows: Sequence[Row], width: int) -> list[float]:
        """`LogprobTable.flat()` of every scored token, `width` likeliest each."""
        following = chain.from_iterable(
            row.seq.tokens[row.start + 1 : row.start + 1 + row.num_scored] for row in rows
        )
        staged = StagedBatch()
        arriving = staged.add(np.fromiter(following, np.int64))
        self._staging.send(staged)
        tokens = arriving.tensor
        slices = []
        for begin in range(0, len(tokens), self._slice):
            logits = self._head(hidden[begin : begin + self._slice])
            chosen = tokens[begin : begin + self._slice]
            slices.append(logprob_table(logits, None, chosen, width).flat())
        values: list[float] = self._staging.read(torch.cat(slices)).tolist()
        return values


def _top(row: Row) -> int:
    return row.seq.params.prompt_logprobs or 0
