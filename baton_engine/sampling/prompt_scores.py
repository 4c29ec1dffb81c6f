"""Log-probabilities of a prompt's own tokens, for clients who score a text instead of, or before, continuing it.

The model gives a hidden vector per scored token; logits of all of them at once would be gigabytes for a long chunk over a
large vocabulary, so the output head runs over a slice at a time and only the few figures wanted of it are kept.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch

from baton.generation import TokenLogprobs
from baton_engine.sampling.logprobs import logprob_table, read_logprobs
from baton_engine.scheduling.plan import Row
from baton_engine.staging import DeviceStaging, StagedBatch

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
