"""What a request asks to change in the scores before a token is chosen: penalties, biases, ends that come too early,
and which tokens it allows (`allowed`, `masks`).

Most of it touches few of a row's scores, so it is gathered on the host as (row, token) entries and applied in a handful
of scatters, however many rows ask.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from baton.generation import SamplingParams
from baton_engine.sampling.allowed import (
    AllowedTokens,
    collect_allowed,
    completing_tokens,
    keep_allowed,
    leaves_nothing,
)
from baton_engine.sampling.masks import Masks, collect_masks, mask_scores
from baton_engine.sampling.token_counts import CountedTexts
from baton_engine.scheduling.plan import Row
from baton_engine.staging import StagedArray, StagedBatch


class _Entries:
    """(row, token, amount) triples."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._indices: list[NDArray[np.int64]] = []
        self._amounts: list[NDArray[np.float32]] = []

    def add(self, row: int, tokens: Iterable[int], amounts: Iterable[float] | float) -> None:
        """Adds entries of one row; ids outside the vocabulary are dropped."""
        ids = tokens if isinstance(tokens, np.ndarray) else np.fromiter(tokens, np.int64)
        if isinstance(amounts, int | float):
            values = np.full(len(ids), amounts, np.float32)
        else:
            values = (
                np.fromiter(amounts, np.float32) if not isinstance(amounts, np.ndarray) else amounts
            )
        known = (ids >= 0) & (ids < self._vocab_size)
        self._indices.append(ids[known] + row * self._vocab_size)
        self._amounts.append(values[known])

    def pack(self, staged: StagedBatch) -> tuple[StagedArray, StagedArray] | None:
        """Flat indices and amounts, or None if there are none."""
        if not self._indices:
            return None
        return staged.add(np.concatenate(self._indices)), staged.add(np.concatenate(self._amounts))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreChanges:
    """What a step's rows ask for: flat places in the scores, and by how much. None for nothing.

    No two entries of one kind are for the same place: so the order in which a GPU comes to them does not matter.
    """

    masks: Masks | None
    repeated: tuple[StagedArray, StagedArray] | None
    penalised: tuple[StagedArray, StagedArray] | None
    biased: tuple[StagedArray, StagedArray] | None
    banned: tuple[StagedArray, StagedArray] | None
    allowed: AllowedTokens | None

    def __bool__(self) -> bool:
        kinds = (
            *(self.masks, self.repeated, self.penalised, self.biased),
            *(self.banned, self.allowed),
        )
        return any(kind is not None for kind in kinds)


def changes_scores(row: Row) -> bool:
    """Whether a row may need `adjust`."""
    return row.constraint is not None or _changes_scores(row.seq.params)


def _changes_scores(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias
        or params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.allowed_token_ids
        or params.bad_words
    )


def collect_changes(
    rows: Sequence[Row],
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    texts: CountedTexts,
    staged: StagedBatch,
) -> ScoreChanges:
    """Gathers what the rows ask for.

    Args:
        rows: One per row of the scores.
        vocab_size: Of the scores.
        eos_token_ids: The model's own ends.
        texts: Counts what penalties are for.
        staged: Takes the entries to the device.
    """
    kinds = repeated, penalised, biased, banned = tuple(_Entries(vocab_size) for _ in range(4))
    held_back: list[Set[int]] = [frozenset()] * len(rows)
    for i, row in enumerate(rows):
        params, seq = row.seq.params, row.seq
        if not _changes_scores(params):
            continue
        length = row.start + row.num_tokens
        if params.repetition_penalty != 1.0:
            tokens_there, _ = texts.counted(row, 0)
            repeated.add(i, tokens_there, params.repetition_penalty)
        if (params.presence_penalty or params.frequency_penalty) and length > seq.prompt_len:
            drawn, counts = texts.counted(row, seq.prompt_len)
            penalised.add(i, drawn, -params.presence_penalty - params.frequency_penalty * counts)
        if params.logit_bias:
            biased.add(i, params.logit_bias.keys(), params.logit_bias.values())
        tokens = completing_tokens(params.bad_words, row.text, seq.prompt_len, length)
        if length - seq.prompt_len < params.min_tokens:
            tokens |= {*eos_token_ids, *params.stop_token_ids}
        if row.constraint is not None:
            held_back[i] = tokens
        elif tokens and not leaves_nothing(params, tokens):  # something has to be drawn
            banned.add(i, tokens, 0.0)
    packed = [kind.pack(staged) for kind in kinds]
    return ScoreChanges(
        masks=collect_masks(rows, held_back, vocab_size, staged),
        repeated=packed[0],
        penalised=packed[1],
        biased=packed[2],
        banned=packed[3],
        allowed=collect_allowed([row.seq.params for row in rows], vocab_size, staged),
    )


def adjust(scores: torch.Tensor, changes: ScoreChanges) -> None:
    """Makes a step's logits the scores to choose from.

    The grammar first: what it forbids, nothing brings back. Then repetition penalty (as in transformers), then presence
    and frequency penalties, then biases, then the tokens that may not be drawn: ends of a text that must still grow,
    and of words that are not wanted; and all that are not allowed.

    Args:
        scores: `[num_rows, vocab]` float32.
        changes: What its rows ask for, arrived.
    """
    if changes.masks is not None:
        mask_scores(scores, changes.masks)
    flat = scores.view(-1)
    if changes.repeated is not None:
        places, penalties = (item.tensor for item in changes.repeated)
        found = flat[places]
        flat[places] = torch.where(found > 0, found / penalties, found * penalties)
    for kind in (changes.penalised, changes.biased):
        if kind is not None:
            places, amounts = (item.tensor for item in kind)
            flat[places] += amounts
    if changes.banned is not None:
        flat.index_fill_(0, changes.banned[0].tensor, float("-inf"))
    if changes.allowed is not None:
        keep_allowed(scores, changes.allowed)
