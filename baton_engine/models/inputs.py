"""Builds a step's flat tensors from the rows that the scheduler planned.

Buffers are kept from step to step and only grow. Nothing here runs per token in Python: rows are spliced into the
buffers, and slots follow for all tokens at once from positions and block tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from baton.errors import EngineError
from baton_engine.kernels.ports import PagedBatch
from baton_engine.kernels.splits import SplitRule, Splits
from baton_engine.models.block_tables import BlockTables
from baton_engine.models.decoder import DecoderInput
from baton_engine.scheduling.plan import Row
from baton_engine.staging import DeviceStaging

_Integer = TypeVar("_Integer", np.int32, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """Tokens that the device draws and the host has not seen yet.

    Attributes:
        tokens: `[num_draws]` int64 on the device: those of the step before; negative where none could be drawn.
        places: Of each row, which of them it computes.
    """

    tokens: torch.Tensor
    places: tuple[int, ...]


class InputBuilder:
    """Makes one `DecoderInput` at a time; the next call overwrites what the last one's tensors look at.

    Args:
        block_tokens: Tokens per page.
        num_blocks: Pages of the arena.
        device: Where the tensors go.
        split_rule: How the kernels want the contexts of decodes to be cut, if they do.
        page_stride: Pages of the arena count as so many in the tensors (`DrafterPages`).
        shift: By how many places the tokens stand before their own (`models.eagle3`).
        one_by_one: Give each token a row of its own, as if it were decoded: which tokens are computed together then changes
            nothing for any of them. Otherwise only tokens that were generated before have one, where `split_rule` is None:
            a text that goes on after a preemption, or elsewhere, is attended as it was when it was decoded.
    """

    def __init__(
        self,
        block_tokens: int,
        num_blocks: int,
        device: torch.device,
        split_rule: SplitRule | None = None,
        *,
        page_stride: int = 1,
        shift: int = 0,
        one_by_one: bool = False,
    ) -> None:
        self._block_tokens = block_tokens
        self._staging = DeviceStaging(device)
        self._split_rule = split_rule
        mirror = None if device.type == "cpu" else device
        self._tables = BlockTables(block_tokens, num_blocks, mirror, page_stride=page_stride)
        self._shift = shift
        self._one_by_one = one_by_one
        self._tokens = np.zeros(0, np.int64)
        self._positions = np.zeros(0, np.int64)

    def build(
        self, rows: Sequence[Row], pad_to: int = 0, unseen: Unseen | None = None
    ) -> DecoderInput:
        """The step's tensors.

        Args:
            rows: What each sequence computes.
            pad_to: Add rows of one token up to so many, if there are fewer: they have no context and no page.
            unseen: Where the tokens are that rows of one token compute; None where their sequences have them.

        Raises:
            EngineError: A row is empty, or its pages do not cover its tokens.
        """
        for row in rows:
            self._check(row, num_unseen=0 if unseen is None else 1)
        padding = max(0, pad_to - len(rows))
        lengths = np.array([row.num_tokens for row in rows] + [1] * padding, np.int64)
        starts = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        tokens, positions = self._splice(rows, int(starts[-1]))
        tables = self._tables.update(rows, padding)
        slots = self._slots(positions, np.repeat(tables.rows, lengths))
        slots[len(slots) - padding :] = -1
        ends = [row.start + row.num_tokens - self._shift for row in rows]
        contexts = np.array(ends + [0] * padding, np.int32)
        last = [int(starts[i + 1]) - 1 for i, row in enumerate(rows) if row.samples]
        scored = [
            np.arange(row.num_scored) + starts[i] for i, row in enumerate(rows) if row.num_scored
        ]
        wanted = np.concatenate((np.array(last, np.int64), *scored))
        alone = [self._num_alone(row) for row in rows]
        if any(alone):
            lengths, own_rows = _split(rows, alone, padding)
            tables = replace(tables, rows=np.repeat(tables.rows, own_rows))
            starts = np.zeros(len(lengths) + 1, np.int32)
            np.cumsum(lengths, out=starts[1:])
            last_of = starts[1:] - 1
            contexts = np.where(slots[last_of] < 0, 0, positions[last_of] + 1).astype(np.int32)
        pieces = self._pieces(lengths, contexts)
        places = () if unseen is None else (np.array(unseen.places, np.int64),)
        changes = (tables.rows, tables.places, tables.pages)
        sent = self._staging.send_arrays(
            [tokens, positions, slots, starts, contexts, wanted, *changes, *pieces, *places]
        )
        if unseen is not None:
            # A row without a token has failed, which the host will see; until then it computes some token.
            sent[0][: len(rows)] = unseen.tokens[sent[-1]].clamp_(min=0)
        return DecoderInput(
            tokens=sent[0],
            positions=sent[1],
            batch=PagedBatch(
                slots=sent[2],
                query_starts=sent[3],
                context_lens=sent[4],
                block_tables=self._tables.gather(tables.width, *sent[6:9]),
                splits=Splits(row_of_piece=sent[9], first_piece=sent[10]) if pieces else None,
            ),
            logit_tokens=sent[5],
        )

    def _num_alone(self, row: Row) -> int:
        """How many of the row's last tokens get a row of their own."""
        if row.num_tokens == 1:
            return 0
        if self._one_by_one:
            return row.num_tokens
        if self._split_rule is not None:
            return 0  # decodes go through another kernel, and stand first in a step
        return max(0, min(row.num_tokens, row.start + row.num_tokens - row.seq.prompt_len))

    def _pieces(
        self, lengths: NDArray[np.int64], contexts: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], ...]:
        """`row_of_piece` and `first_piece` of the leading decodes; nothing where none are cut."""
        decodes = int(np.cumprod(lengths == 1).sum())
        if self._split_rule is None or not decodes:
            return ()
        return self._split_rule.cut(contexts[:decodes])

    def _check(self, row: Row, *, num_unseen: int) -> None:
        end = row.start + row.num_tokens
        known = len(row.seq.tokens) + len(row.draft)
        if row.num_tokens < 1 or row.start < 0 or end > known + num_unseen:
            raise EngineError(
                f"row of {row.seq.seq_id} asks for tokens {row.start} to {end} of {known}"
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
            known = row.computed  # all but one that is unseen
            self._tokens[begin : begin + len(known)] = known
            self._positions[begin:end] = np.arange(row.start - self._shift, stop - self._shift)
            begin = end
        self._tokens[begin:total] = 0
        self._positions[begin:total] = 0
        return self._tokens[:total], self._positions[:total]

    def _slots(
        self, positions: NDArray[np.int64], kept_row_of: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        blocks = self._tables.pages_at(kept_row_of, positions // self._block_tokens)
        return blocks.astype(np.int64) * self._block_tokens + positions % self._block_tokens


def _split(
    rows: Sequence[Row], alone: Sequence[int], padding: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`rows` with the last `alone` tokens of each as rows of one: the lengths of all, and of how many each row now consists."""
    lengths: list[NDArray[np.int64]] = []
    for row, count in zip(rows, alone, strict=True):
        together = row.num_tokens - count
        lengths.append(np.array([together] if together else [], np.int64))
        lengths.append(np.ones(count, np.int64))
    own_rows = [count + (row.num_tokens > count) for row, count in zip(rows, alone, strict=True)]
    lengths.append(np.ones(padding, np.int64))
    return np.concatenate(lengths), np.array(own_rows + [1] * padding, np.int64)


def _grown(buffer: NDArray[_Integer], size: int) -> NDArray[_Integer]:
    """`buffer`, or a larger one whose contents do not matter."""
    return buffer if len(buffer) >= size else np.zeros(max(size, 2 * len(buffer)), buffer.dtype)
