"""Builds a step's flat tensors from the rows that the scheduler planned.

Buffers are kept from step to step and only grow. Nothing here runs per token in Python: rows are spliced into the
buffers, and slots follow for all tokens at once from positions and block tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from baton.errors import EngineError
from baton_engine.kernels.ports import PagedBatch
from baton_engine.kernels.splits import SplitRule, Splits
from baton_engine.models.block_tables import NOBODY, BlockTables
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """The shape of a step that is repeated from a graph. Rows that the step lacks are padding,
    with no context and no page.

    Attributes:
        decodes: Rows of one token, which stand first.
        chunks: Rows behind them.
        chunk_tokens: Tokens of these together.
    """

    decodes: int
    chunks: int = 0
    chunk_tokens: int = 0

    @property
    def num_rows(self) -> int:
        """Of both kinds."""
        return self.decodes + self.chunks


class InputBuilder:
    """Makes one `DecoderInput` at a time; the next call overwrites what the last one's tensors look at.

    Args:
        block_tokens: Tokens per page.
        num_blocks: Pages of the arena.
        device: Where the tensors go.
        split_rule: How the kernels want the contexts of decodes to be cut, if they do.
        page_stride: Pages of the arena count as so many in the tensors (`DrafterPages`).
        shift: By how many places the tokens stand before their own (`models.eagle3`).
        one_by_one: Give each token a row of its own, as if it were decoded: which tokens are computed together then
            changes nothing for any of them. Otherwise only tokens that were generated before have one, where
            `split_rule` is None: a text that goes on after a preemption, or elsewhere,
            is attended as it was when it was decoded.
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
        self._tables = BlockTables(
            block_tokens, num_blocks, mirror, page_stride=page_stride, shift=shift
        )
        self._shift = shift
        self._one_by_one = one_by_one
        self._tokens = np.zeros(0, np.int64)
        self._positions = np.zeros(0, np.int64)
        self._builds_decodes = device.type == "cpu" and split_rule is None and not shift

    def build(
        self, rows: Sequence[Row], padding: Padding | None = None, unseen: Unseen | None = None
    ) -> DecoderInput:
        """The step's tensors.

        Args:
            rows: What each sequence computes; those of one token first, where there is padding.
            padding: The shape that the step is given, which has room for all rows; None for their own.
            unseen: Where the tokens are that rows of one token compute; None where their sequences have them.

        Raises:
            EngineError: A row is empty, or its pages do not cover its tokens.
        """
        for row in rows:
            self._check(row, num_unseen=0 if unseen is None else 1)
        if self._builds_decodes and unseen is None and padding is None and all(map(_decodes, rows)):
            return self._of_decodes(rows)
        places, lengths, total = _laid_out(rows, padding)
        starts = _starts(lengths)
        begins = starts[places]
        tokens, positions = self._splice(rows, begins.tolist(), total)
        tables = self._tables.update(rows)
        kept = _placed(tables.rows, places, len(lengths))
        slots = self._slots(positions, np.repeat(kept, lengths), is_padded=padding is not None)
        ends = np.array([row.start + row.num_tokens - self._shift for row in rows], np.int32)
        contexts = _placed(ends, places, len(lengths))
        wanted = _wanted(rows, begins.tolist(), 0 if padding is None else padding.num_rows)
        alone = [self._num_alone(row) for row in rows]
        if any(alone):
            lengths, own_rows = _split(rows, alone)
            kept = np.repeat(kept, own_rows)
            starts = _starts(lengths)
            last_of = starts[1:] - 1
            contexts = np.where(slots[last_of] < 0, 0, positions[last_of] + 1).astype(np.int32)
        pieces = self._pieces(lengths, contexts)
        follows = () if unseen is None else (np.array(unseen.places, np.int64),)
        changes = (kept, tables.places, tables.pages)
        sent = self._staging.send_arrays(
            [tokens, positions, slots, starts, contexts, wanted, *changes, *pieces, *follows]
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

    def _of_decodes(self, rows: Sequence[Row]) -> DecoderInput:
        """The same of rows that compute and draw one token each, for a CPU: of a small model's step the long way takes
        a twentieth, since its weights have pushed all of its code out of the caches.
        """
        tables = self._tables.update(rows)
        positions = np.array([row.start for row in rows], np.int64)
        pages, offsets = np.divmod(positions, self._block_tokens)
        blocks = self._tables.pages_at(tables.rows, pages).astype(np.int64)
        places = np.arange(len(rows) + 1, dtype=np.int64)
        return DecoderInput(
            tokens=torch.from_numpy(
                np.array([row.seq.tokens[row.start] for row in rows], np.int64)
            ),
            positions=torch.from_numpy(positions),
            batch=PagedBatch(
                slots=torch.from_numpy(blocks * self._block_tokens + offsets),
                query_starts=torch.from_numpy(places.astype(np.int32)),
                context_lens=torch.from_numpy((positions + 1).astype(np.int32)),
                block_tables=self._tables.gather_on_host(tables.width, tables.rows),
            ),
            logit_tokens=torch.from_numpy(places[:-1]),
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
        if self._split_rule is None or not (decodes := int(np.cumprod(lengths == 1).sum())):
            return ()
        return self._split_rule.cut(contexts[:decodes])

    def _check(self, row: Row, *, num_unseen: int) -> None:
        end = row.start + row.num_tokens
        known = len(row.seq.tokens) + len(row.draft)
        if row.num_tokens < 1 or row.start < 0 or end > known + num_unseen:
            raise EngineError(
                f"row of {row.seq.seq_id} asks for tokens {row.start} to {end} of {known}"
            )
        places = end - self._shift
        if len(row.seq.blocks) * self._block_tokens < places:
            raise EngineError(
                f"{len(row.seq.blocks)} pages of {row.seq.seq_id} do not cover {places} tokens"
            )

    def _splice(
        self, rows: Sequence[Row], begins: Sequence[int], total: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        self._tokens, self._positions = _grown(self._tokens, total), _grown(self._positions, total)
        tokens, positions = self._tokens[:total], self._positions[:total]
        if total > sum(row.num_tokens for row in rows):
            tokens[:], positions[:] = 0, 0
        for row, begin in zip(rows, begins, strict=True):
            known = row.computed  # all but one that is unseen
            tokens[begin : begin + len(known)] = known
            tokens[begin + len(known) : begin + row.num_tokens] = 0
            first = row.start - self._shift
            positions[begin : begin + row.num_tokens] = np.arange(first, first + row.num_tokens)
        return tokens, positions

    def _slots(
        self, positions: NDArray[np.int64], kept_row_of: NDArray[np.int64], *, is_padded: bool
    ) -> NDArray[np.int64]:
        """Where the KV of each token goes; nowhere, -1, for tokens of padding."""
        pages, offsets = np.divmod(positions[: len(kept_row_of)], self._block_tokens)
        blocks = self._tables.pages_at(kept_row_of, pages).astype(np.int64)
        own = blocks * self._block_tokens + offsets
        if not is_padded:
            return own
        slots = np.full(len(positions), -1, np.int64)
        slots[: len(own)] = np.where(kept_row_of == NOBODY, -1, own)
        return slots


def _laid_out(
    rows: Sequence[Row], padding: Padding | None
) -> tuple[slice | NDArray[np.int64], NDArray[np.int64], int]:
    """Which of the step's rows the given ones are, the lengths of all, and the tokens of all."""
    own = [row.num_tokens for row in rows]
    if padding is None:
        return slice(len(rows)), np.array(own, np.int64), sum(own)
    decodes = num_decodes(rows)
    places = np.arange(len(rows))
    places[decodes:] += padding.decodes - decodes
    lengths = np.zeros(padding.num_rows, np.int64)
    lengths[: padding.decodes] = 1
    lengths[places] = own
    return places, lengths, padding.decodes + padding.chunk_tokens


def _placed(
    values: NDArray[_Integer], places: slice | NDArray[np.int64], count: int
) -> NDArray[_Integer]:
    """`values` at `places` of so many; elsewhere zeros, which are `NOBODY` and no context."""
    if len(values) == count:
        return values
    placed = np.zeros(count, values.dtype)
    placed[places] = values
    return placed


def _decodes(row: Row) -> bool:
    """Whether a row computes the last token of its text and draws what follows."""
    return row.num_tokens == 1 and bool(row.samples) and not row.num_scored and not row.draft


def num_decodes(rows: Sequence[Row]) -> int:
    """How many of the leading rows have one token."""
    return next((i for i, row in enumerate(rows) if row.num_tokens > 1), len(rows))


def _wanted(rows: Sequence[Row], begins: Sequence[int], at_least: int) -> NDArray[np.int64]:
    """Tokens whose logits are wanted: the last ones of rows that draw, then those that are scored; the first token,
    where there are fewer than `at_least`.
    """
    last = [
        begin + row.num_tokens - 1 for row, begin in zip(rows, begins, strict=True) if row.samples
    ]
    scored = [
        begin + np.arange(row.num_scored)
        for row, begin in zip(rows, begins, strict=True)
        if row.num_scored
    ]
    lacking = at_least - len(last) - sum(map(len, scored))
    if not scored and lacking <= 0:
        return np.array(last, np.int64)
    return np.concatenate((np.array(last, np.int64), *scored, np.zeros(max(0, lacking), np.int64)))


def _split(
    rows: Sequence[Row], alone: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`rows` with the last `alone` tokens of each as rows of one: the lengths of all,
    and of how many each row now consists.
    """
    lengths: list[NDArray[np.int64]] = []
    for row, count in zip(rows, alone, strict=True):
        together = row.num_tokens - count
        lengths.append(np.array([together] if together else [], np.int64))
        lengths.append(np.ones(count, np.int64))
    own_rows = [count + (row.num_tokens > count) for row, count in zip(rows, alone, strict=True)]
    return np.concatenate(lengths), np.array(own_rows, np.int64)


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _grown(buffer: NDArray[_Integer], size: int) -> NDArray[_Integer]:
    """`buffer`, or a larger one whose contents do not matter."""
    return buffer if len(buffer) >= size else np.zeros(max(size, 2 * len(buffer)), buffer.dtype)
