"""What a request asks to change in the scores before a token is chosen: penalties, biases, and ends that come too early.

All of it touches few of a row's scores, so it is gathered on the host as (row, token) entries and applied in a handful of
scatters, however many rows ask.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from baton.generation import SamplingParams
from engine.scheduling.plan import Row


class _Entries:
    """(row, token, amount) triples on their way to the device."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._indices: list[NDArray[np.int64]] = []
        self._amounts: list[NDArray[np.float32]] = []

    def __bool__(self) -> bool:
        return bool(self._indices)

    def add(self, row: int, tokens: Iterable[int], amounts: Iterable[float] | float) -> None:
        """Adds entries of one row; ids outside the vocabulary are dropped."""
        ids = np.fromiter(tokens, np.int64)
        values = (
            np.full(len(ids), amounts, np.float32)
            if isinstance(amounts, int | float)
            else np.fromiter(amounts, np.float32)
        )
        known = (ids >= 0) & (ids < self._vocab_size)
        self._indices.append(ids[known] + row * self._vocab_size)
        self._amounts.append(values[known])

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Flat indices and amounts as tensors, or None if there are none."""
        if not self._indices:
            return None
        indices = torch.from_numpy(np.concatenate(self._indices))
        amounts = torch.from_numpy(np.concatenate(self._amounts))
        return indices.to(device), amounts.to(device)


def changes_scores(params: SamplingParams) -> bool:
    """Whether any step of this request may need `adjust`."""
    return bool(
        params.logit_bias
        or params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def adjust(
    logits: torch.Tensor, rows: Sequence[Row], eos_token_ids: tuple[int, ...]
) -> torch.Tensor:
    """The scores to choose from.

    Repetition penalty first (as in transformers), then presence and frequency penalties, then biases, then the ends of a
    text that must still grow.

    Args:
        logits: `[num_rows, vocab]` float32; not changed.
        rows: One per row of `logits`.
        eos_token_ids: The model's own ends.

    Returns:
        `logits` itself when nothing is to be changed in this step.
    """
    repeated, added, ended = changes = tuple(_Entries(logits.shape[1]) for _ in range(3))
    for i, row in enumerate(rows):
        if changes_scores(row.seq.params):
            _collect(i, row, eos_token_ids, repeated, added, ended)
    if not any(changes):
        return logits
    adjusted = logits.clone()
    flat = adjusted.view(-1)
    if (entries := repeated.on(logits.device)) is not None:
        scores = flat[entries[0]]
        flat[entries[0]] = torch.where(scores > 0, scores / entries[1], scores * entries[1])
    if (entries := added.on(logits.device)) is not None:
        flat.index_add_(0, *entries)
    if (entries := ended.on(logits.device)) is not None:
        flat[entries[0]] = float("-inf")
    return adjusted


def _collect(
    index: int,
    row: Row,
    eos_token_ids: tuple[int, ...],
    repeated: _Entries,
    added: _Entries,
    ended: _Entries,
) -> None:
    params, seq = row.seq.params, row.seq
    length = row.start + row.num_tokens
    if params.repetition_penalty != 1.0:
        # A token that stands there twice is read twice before it is written, both times the same.
        repeated.add(index, seq.tokens[:length], params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and length > seq.prompt_len:
        ids, counts = np.unique(seq.tokens[seq.prompt_len : length], return_counts=True)
        added.add(index, ids, -params.presence_penalty - params.frequency_penalty * counts)
    if params.logit_bias:
        added.add(index, params.logit_bias.keys(), params.logit_bias.values())
    if length - seq.prompt_len < params.min_tokens:
        ended.add(index, {*eos_token_ids, *params.stop_token_ids}, 0.0)
