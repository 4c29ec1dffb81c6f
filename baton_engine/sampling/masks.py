"""Which tokens grammars allow in a step: one bit per token for each constrained row, found on the host while the scores
are computed, and sent with all else that rows ask for.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from baton_engine.scheduling.plan import Row
from baton_engine.staging import StagedArray, StagedBatch

_WORD_BITS = 32

_LOOK_EVERY_S = 200e-6
"""So often it is looked whether the scores are there, while masks are waited for."""

_GRACE_S = 300e-6
"""So much longer than for the scores a step waits for masks that should be there any moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """What the constrained rows of a step may draw.

    Attributes:
        places: `[num_masked]` int64, of the rows among all.
        bits: `[num_masked, num_bytes]` uint8, a bit per token, lowest first.
    """

    places: StagedArray
    bits: StagedArray


def begin_masks(rows: Iterable[Row]) -> None:
    """Starts to find the masks of those that draw, beside the caller."""
    for row in rows:
        if row.samples and (constraint := row.constraint) is not None:
            constraint.begin()


def late_masks(rows: Sequence[Row], are_scores_there: Callable[[], bool]) -> frozenset[int]:
    """The places of those whose masks are not known, and are not waited for any longer: their draws mean nothing.

    Args:
        rows: Their masks were begun.
        are_scores_there: Whether nothing is left to be computed but the draws.
    """
    finding = {
        place: row.constraint
        for place, row in enumerate(rows)
        if row.constraint is not None and row.constraint.finding()
    }
    while finding and not are_scores_there():
        next(iter(finding.values())).finding(_LOOK_EVERY_S)
        finding = {place: mask for place, mask in finding.items() if mask.finding()}
    until_s = perf_counter() + _GRACE_S
    late = [
        place for place, mask in finding.items() if mask.finding(max(0.0, until_s - perf_counter()))
    ]
    for place in late:
        finding[place].begin(late=True)
    # One that was found meanwhile tells nobody, and can be drawn by.
    return frozenset(place for place in late if finding[place].finding())


def collect_masks(
    rows: Sequence[Row], held_back: Sequence[Set[int]], vocab_size: int, staged: StagedBatch
) -> Masks | None:
    """Asks the constraints of the rows; None where no row has one whose mask is known, or can be found here.

    Args:
        rows: One per row of the scores.
        held_back: Of each row the tokens that may not be drawn either, unless the grammar allows no others.
        vocab_size: Of the scores.
        staged: Takes the masks to the device.
    """
    places = [
        i
        for i, row in enumerate(rows)
        if row.constraint is not None and not row.constraint.finding()
    ]
    if not places:
        return None
    words = np.empty((len(places), -(-vocab_size // _WORD_BITS)), np.uint32)
    for mask, place in zip(words, places, strict=True):
        constraint = rows[place].constraint
        assert constraint is not None
        constraint.fill(mask)
        _hold_back(mask, held_back[place], vocab_size)
    return Masks(
        places=staged.add(np.array(places, np.int64)), bits=staged.add(words.view(np.uint8))
    )


def _hold_back(mask: NDArray[np.uint32], tokens: Set[int], vocab_size: int) -> None:
    """Clears the bits of `tokens`, unless no bit would be left."""
    kept = None
    for token in tokens:
        if 0 <= token < vocab_size:
            kept = mask.copy() if kept is None else kept
            kept[token // _WORD_BITS] &= np.uint32(~(1 << token % _WORD_BITS) & 0xFFFF_FFFF)
    if kept is not None and kept.any():
        mask[:] = kept


def mask_scores(scores: torch.Tensor, masks: Masks) -> None:
    """Makes `scores` minus infinity wherever a row's mask has no bit.

    Args:
        scores: `[num_rows, vocab]` float32.
        masks: Arrived.
    """
    places, bits = masks.places.tensor, masks.bits.tensor
    if bits.device.type == "cpu":
        for place, mask in zip(places.tolist(), bits, strict=True):
            # `where` takes ten times as long there, since nobody can predict its bits.
            limits = _LIMITS_OF_BYTES.index_select(0, mask.int()).flatten()
            torch.minimum(scores[place], limits[: scores.shape[1]], out=scores[place])
        return
    ranks = torch.arange(8, dtype=torch.uint8, device=bits.device)
    is_allowed = (bits.unsqueeze(-1) >> ranks & 1).bool().flatten(1)[:, : scores.shape[1]]
    if len(places) == len(scores):
        scores.masked_fill_(~is_allowed, float("-inf"))
    else:
        held = scores.index_select(0, places).masked_fill_(~is_allowed, float("-inf"))
        scores.index_copy_(0, places, held)


def _limits_of_bytes() -> torch.Tensor:
    allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(allowed, np.float32("inf"), np.float32("-inf")))


_LIMITS_OF_BYTES = _limits_of_bytes()
"""`[256, 8]` float32: how high the scores of eight tokens may be under each byte of a mask."""
