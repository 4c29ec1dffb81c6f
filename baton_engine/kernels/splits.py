"""How the contexts of a step's decodes are cut into pieces that a GPU works on at once.

A decode reads its whole context for one token: few sequences would keep few multiprocessors busy, and the longest one
the rest waiting. So contexts are cut into pieces of about the same size, and as many programs start as there can be
pieces, which depends on the number of sequences alone: a CUDA graph is captured once per number of sequences, and what
each program does it reads from here (FlashDecoding, Dao et al. 2023; FlashInfer's plan, Ye et al. 2025).

    context 5000  ─▶ pieces 0 1 2        row_of_piece  0 0 0 1 2 2 -1 -1       programs with -1 end at once
    context 900   ─▶ piece  3            first_piece   0 3 4 6
    context 2900  ─▶ pieces 4 5
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from baton_engine.kernels.checks import expect

PIECE_TOKENS = 64
"""A piece is made of whole runs of so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """The pieces of a step, on the device.

    Attributes:
        row_of_piece: `[max_pieces]` int32, -1 for pieces that there are not.
        first_piece: `[num_decodes + 1]` int32, of each row, and the number of pieces at the end.
    """

    row_of_piece: torch.Tensor
    first_piece: torch.Tensor

    @property
    def num_decodes(self) -> int:
        """Leading rows of the batch that have one token each and are cut."""
        return self.first_piece.shape[0] - 1

    def check(self, num_rows: int, device: torch.device) -> None:
        """Refuses what a kernel would misread beside a batch of so many rows on `device`.

        Raises:
            ValueError: Names it.
        """
        expect("row_of_piece", self.row_of_piece, (None,), torch.int32, device)
        expect("first_piece", self.first_piece, (None,), torch.int32, device)
        if not 0 <= self.num_decodes <= num_rows:
            raise ValueError(f"splits: cuts {self.num_decodes} rows of {num_rows}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """Cuts contexts.

    Attributes:
        spread: Pieces that the whole step is cut into, about; never more than this plus one per row.
        most_of_row: Pieces that one row is cut into at most: those of a row are added up by few programs.
    """

    spread: int
    most_of_row: int = 32

    def max_pieces(self, num_decodes: int) -> int:
        """The most pieces that so many rows can have."""
        return min(self.spread + num_decodes, self.most_of_row * num_decodes)

    def cut(self, contexts: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """`row_of_piece` and `first_piece` of rows with these contexts, in tokens; a context of 0 has no piece."""
        runs = -(-contexts.astype(np.int64) // PIECE_TOKENS)
        per_piece = max(1, -(-int(runs.sum()) // self.spread))
        counts = np.minimum(-(-runs // per_piece), self.most_of_row)
        first_piece = np.zeros(len(contexts) + 1, np.int32)
        np.cumsum(counts, out=first_piece[1:])
        row_of_piece = np.full(self.max_pieces(len(contexts)), -1, np.int32)
        row_of_piece[: first_piece[-1]] = np.repeat(
            np.arange(len(contexts), dtype=np.int32), counts
        )
        return row_of_piece, first_piece
