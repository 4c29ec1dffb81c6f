"""Builds a step's flat tensors from the rows that the scheduler planned.

Buffers are kept from step to step and only grow. Nothing here runs per token in Python: rows are spliced into the
buffers, and slots follow for all tokens at once from positions and block tables.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from baton.errors import EngineError
from engine.kernels.ports import PagedBatch
from engine.kernels.splits import SplitRule, Splits
from engine.models.decoder import DecoderInput
from engine.scheduling.plan import Row

_Integer = TypeVar("_Integer", np.int32, np.int64)


class InputBuilder:
    """Makes one `DecoderInput` at a time; the next call overwrites what the last one's tensors look at.

    Args:
        block_tokens: Tokens per page.
        num_blocks: Pages of the arena.
        device: Where the tensors go.
        split_rule: How the kernels want the contexts of decodes to be cut, if they do.
    """

    def __init__(
        self,
        block_tokens: int,
        num_blocks: int,
        device: torch.device,
        split_rule: SplitRule | None = None,
    ) -> None:
        self._block_tokens = block_tokens
        self._num_blocks = num_blocks
        self._device = device
        self._split_rule = split_rule
        self._tokens = np.zeros(0, np.int64)
        self._positions = np.zeros(0, np.int64)
        self._tables = np.zeros(0, np.int32)

    def build(self, rows: Sequence[Row]) -> DecoderInput:
        """The step's tensors.

        Raises:
            EngineError: A row is empty, or its pages do not cover its tokens.
        """
        for row in rows:
            self._check(row)
        lengths = np.array([row.num_tokens for row in rows], np.int64)
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        tokens, positions = self._splice(rows, int(starts[-1]))
        tables = self._fill_tables(rows)
        slots = self._slots(positions, np.repeat(np.arange(len(rows)), lengths), tables)
        contexts = np.array([row.start + row.num_tokens for row in rows], np.int32)
        last = [int(starts[i + 1]) - 1 for i, row in enumerate(rows) if row.samples]
        scored = [
            np.arange(row.num_scored) + starts[i] for i, row in enumerate(rows) if row.num_scored
        ]
        return DecoderInput(
            tokens=self._tensor(tokens),
            positions=self._tensor(positions),
            batch=PagedBatch(
                slots=self._tensor(slots),
                query_starts=self._tensor(starts),
                context_lens=self._tensor(contexts),
                block_tables=self._tensor(tables),
                splits=self._splits(lengths, contexts),
            ),
            logit_tokens=self._tensor(np.concatenate((np.array(last, np.int64), *scored))),
        )

    def _splits(self, lengths: NDArray[np.int64], contexts: NDArray[np.int32]) -> Splits | None:
        decodes = int(np.cumprod(lengths == 1).sum())
        if self._split_rule is None or not decodes:
            return None
        row_of_piece, first_piece = self._split_rule.cut(contexts[:decodes])
        return Splits(
            row_of_piece=self._tensor(row_of_piece), first_piece=self._tensor(first_piece)
        )

    def _check(self, row: Row) -> None:
        end = row.start + row.num_tokens
        if row.num_tokens < 1 or row.start < 0 or end > len(row.seq.tokens):
            raise EngineError(
                f"row of {row.seq.seq_id} asks for tokens {row.start} to {end} of {len(row.seq.tokens)}"
            )
        if len(row.seq.blocks) * self._block_tokens < end:
            raise EngineError(
                f"{len(row.seq.blocks)} pages of {row.seq.seq_id} do not cover {end} tokens"
            )

    def _splice(
        self, rows: Sequence[Row], total: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        self._tokens, self._positions = _grown(self._tokens, total), _grown(self._positions, total)
        begin = 0
        for row in rows:
            end, stop = begin + row.num_tokens, row.start + row.num_tokens
            self._tokens[begin:end] = row.seq.tokens[row.start : stop]
            self._positions[begin:end] = np.arange(row.start, stop)
            begin = end
        return self._tokens[:total], self._positions[:total]

    def _fill_tables(self, rows: Sequence[Row]) -> NDArray[np.int32]:
        needed = [-(-(row.start + row.num_tokens) // self._block_tokens) for row in rows]
        width = max(needed)
        self._tables = _grown(self._tables, len(rows) * width)
        tables = self._tables[: len(rows) * width].reshape(len(rows), width)
        for table, row, count in zip(tables, rows, needed, strict=True):
            table[:count] = row.seq.blocks[:count]
            table[count:] = 0
        if int(tables.max()) >= self._num_blocks or int(tables.min()) < 0:
            raise EngineError(f"a block table names a page outside the arena's {self._num_blocks}")
        return tables

    def _slots(
        self, positions: NDArray[np.int64], row_of: NDArray[np.int64], tables: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        blocks = tables[row_of, positions // self._block_tokens].astype(np.int64)
        return blocks * self._block_tokens + positions % self._block_tokens

    def _tensor(self, array: NDArray[np.int64] | NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _grown(buffer: NDArray[_Integer], size: int) -> NDArray[_Integer]:
    """`buffer`, or a larger one whose contents do not matter."""
    return buffer if len(buffer) >= size else np.zeros(max(size, 2 * len(buffer)), buffer.dtype)
