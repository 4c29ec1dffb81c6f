"""Decode steps as CUDA graphs: the kernels of a whole step in one launch, where launching them one by one takes longer than
they do. Between the runner, which has a plan of nothing but decodes, and the model.

A graph repeats what was captured, at the same addresses. So there is one per number of rows (a bucket), and its inputs lie in
tensors that stay. Rows that fill up a bucket are padding: they have no context, and their keys and values go nowhere.

    rows      7            ─▶  bucket 8    captured at start: 1 2 4 8 16 24 ... 64 96 128 ...
    contexts  5 900 .. 31      5 900 .. 31 0
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from baton_engine.cache.arena import DrafterPages, KvArena
from baton_engine.kernels.ports import PagedBatch
from baton_engine.kernels.splits import Splits
from baton_engine.models.decoder import Decoder, DecoderInput, HiddenObserver
from baton_engine.models.inputs import InputBuilder, Unseen
from baton_engine.scheduling.plan import Row, StepPlan

T = TypeVar("T")
_FINE_UP_TO = 64
_FINE, _COARSE = 8, 32


class GraphBackend(Protocol):
    """Captures work on a device."""

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """Runs `work` some times, and gives what repeats it: same addresses read, same tensors written and given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a graph computes of its rows.

    Attributes:
        logits: `[num_rows, vocab]` float32.
        greedy: `[num_rows]` int64, their likeliest tokens (`greedy_tokens`).
    """

    logits: torch.Tensor
    greedy: torch.Tensor


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows, rising up to `most`, that graphs are captured for."""
    sizes = [1, 2, 4, *range(_FINE, _FINE_UP_TO, _FINE), *range(_FINE_UP_TO, most, _COARSE)]
    return (*(size for size in sizes if size < most), most)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """One captured graph and its inputs."""

    inputs: DecoderInput
    repeat: Callable[[], Scored]


class DecodeGraphs:
    """Computes the decode steps of one model. All graphs are captured here; blocks for some seconds.

    Args:
        model: Its kernels ask nothing of the host, and cut the contexts of decodes (`KernelSet.split_rule`).
        arena: The pages; captured by address.
        observer: Reads hidden states in each step; None for none.
        pages: Of `arena`, which the model computes with; None for all of it.
        most_rows: Steps of more rows are not taken.
        table_width: Pages of the longest sequence.
        backend: Captures.
    """

    def __init__(
        self,
        model: Decoder,
        arena: KvArena,
        *,
        most_rows: int,
        table_width: int,
        backend: GraphBackend,
        pages: DrafterPages | None = None,
        observer: HiddenObserver | None = None,
    ) -> None:
        self._model = model
        self._observer = observer
        self._pages = arena if pages is None else pages
        self._table_width = table_width
        self._rule = model.kernels.split_rule(model.spec.num_heads, self._pages.layer(0))
        self._builder = InputBuilder(
            arena.layout.block_tokens,
            arena.num_blocks,
            model.device,
            self._rule,
            page_stride=1 if pages is None else pages.stride,
        )
        self._sizes = bucket_sizes(most_rows)
        # One for all graphs: with a large vocabulary those of each would take more than half a gigabyte together.
        self._logits = torch.empty(
            most_rows, model.spec.vocab_size, dtype=torch.float32, device=model.device
        )
        # The largest first: the others fit into the memory that it took.
        self._buckets = {size: self._capture(size, backend) for size in reversed(self._sizes)}

    def takes(self, plan: StepPlan) -> bool:
        """Whether the step can be repeated from a graph: it draws one token after each row, and fetches and exports nothing."""
        return not plan.fetches and not plan.exports and self.takes_rows(plan.rows)

    def takes_rows(self, rows: Sequence[Row]) -> bool:
        """The same, of what a step computes."""
        return 0 < len(rows) <= self._sizes[-1] and all(
            row.num_tokens == 1 and row.samples and not row.num_scored for row in rows
        )

    @torch.inference_mode()
    def scores(self, rows: Sequence[Row], unseen: Unseen | None = None) -> Scored:
        """Of the rows' next tokens; overwritten by the next step. That one may be asked for while this one is computed: the
        device does one after the other, and does not touch a graph's tensors before it is through with them.

        Raises:
            EngineError: A row cannot be computed; nothing was.
        """
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        bucket = self._buckets[size]
        _overwrite(bucket.inputs, self._builder.build(rows, size, unseen))
        scored = bucket.repeat()
        return Scored(logits=scored.logits[: len(rows)], greedy=scored.greedy[: len(rows)])

    @torch.inference_mode()
    def _capture(self, size: int, backend: GraphBackend) -> _Bucket:
        inputs = self._static(size)

        def work() -> Scored:
            logits = self._model.forward(
                inputs, self._pages, observer=self._observer, out=self._logits[:size]
            )
            return Scored(logits=logits, greedy=self._model.greedy(logits))

        return _Bucket(inputs=inputs, repeat=backend.capture(work))

    def _static(self, size: int) -> DecoderInput:
        """Inputs of a step in which every row is padding."""

        def filled(count: int, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=self._model.device)

        pieces = self._rule.max_pieces(size) if self._rule is not None else 0
        splits = Splits(row_of_piece=filled(pieces, -1), first_piece=filled(size + 1, 0))
        tables = filled(size * self._table_width, 0).view(size, self._table_width)
        return DecoderInput(
            tokens=filled(size, 0, torch.int64),
            positions=filled(size, 0, torch.int64),
            batch=PagedBatch(
                slots=filled(size, -1, torch.int64),
                query_starts=torch.arange(size + 1, dtype=torch.int32, device=self._model.device),
                context_lens=filled(size, 0),
                block_tables=tables,
                splits=splits if self._rule is not None else None,
            ),
            logit_tokens=torch.arange(size, device=self._model.device),
        )


def _overwrite(inputs: DecoderInput, step: DecoderInput) -> None:
    """On the device, where the step's inputs have come in one copy. Rows, their first tokens and whose logits are wanted are the
    same in every step of a bucket.
    """
    here, there = inputs.batch, step.batch
    torch._foreach_copy_(
        [inputs.tokens, inputs.positions, here.slots], [step.tokens, step.positions, there.slots]
    )
    narrow = [(here.context_lens, there.context_lens)]
    if here.splits is not None and there.splits is not None:
        narrow += [
            (here.splits.row_of_piece, there.splits.row_of_piece),
            (here.splits.first_piece, there.splits.first_piece),
        ]
    torch._foreach_copy_([static for static, _ in narrow], [given for _, given in narrow])
    here.block_tables[:, : there.block_tables.shape[1]].copy_(there.block_tables)


class CudaGraphs:
    """A `GraphBackend` over torch's; all graphs share one pool of memory, since one runs at a time, and are captured on one stream, since
    torch keeps memory for products, 32 MiB of it, for each that it has seen.
    """

    _WARM_UPS = 2

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """See `GraphBackend.capture`. What is compiled or allocated at first use is so before the capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(self._WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, which hand pages off, may go on calling the driver meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = work()

        def repeat() -> T:
            graph.replay()
            return output

        return repeat
