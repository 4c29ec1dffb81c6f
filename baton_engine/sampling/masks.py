"""Which tokens grammars allow in a step: one bit per token for each constrained row, found on the host while the device
computes the scores, and sent with all else that rows ask for.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from baton_engine.scheduling.plan import Row
from baton_engine.staging import StagedArray, StagedBatch

_WORD_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """What the constrained rows of a step may draw.

    Attributes:
        places: `[num_masked]` int64, of the rows among all.
        bits: `[num_masked, num_bytes]` uint8, a bit per token, lowest first.
    """

    places: StagedArray
    bits: StagedArray


def collect_masks(
    rows: Sequence[Row], held_back: Sequence[Set[int]], vocab_size: int, staged: StagedBatch
) -> Masks | None:
    """Asks the constraints of the rows; None where no row has one.

    Args:
        rows: One per row of the scores.
        held_back: Of each row the tokens that may not be drawn either, unless the grammar allows no others.
        vocab_size: Of the scores.
        staged: Takes the masks to the device.
    """
    places = [i for i, row in enumerate(rows) if row.constraint is not None]
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


def masked(scores: torch.Tensor, masks: Masks) -> torch.Tensor:
    """A copy of `scores`, minus infinity wherever a row's mask has no bit.

    Args:
        scores: `[num_rows, vocab]` float32; not changed.
        masks: Arrived.
    """
    places = masks.places.tensor
    if len(places) == len(scores):
        return _held(scores, masks.bits.tensor)
    return scores.index_copy(0, places, _held(scores.index_select(0, places), masks.bits.tensor))


def _held(scores: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """A copy of `scores`, `[num_masked, vocab]`, minus infinity where `bits`, `[num_masked, num_bytes]` uint8,
    has none.
    """
    if bits.device.type == "cpu":
        # `where` takes ten times as long there, since nobody can predict its bits.
        limits = _LIMITS_OF_BYTES.index_select(0, bits.flatten().int()).view(len(bits), -1)
        limits = limits[:, : scores.shape[1]].contiguous()
        return torch.minimum(scores, limits, out=limits)
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    allowed = (bits.unsqueeze(-1) >> places & 1).bool().flatten(1)
    return scores.where(allowed[:, : scores.shape[1]], float("-inf"))


def _limits_of_bytes() -> torch.Tensor:
    allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(allowed, np.float32("inf"), np.float32("-inf")))


_LIMITS_OF_BYTES = _limits_of_bytes()
"""`[256, 8]` float32: how high the scores of eight tokens may be under each byte of a mask."""
